"""Questions to an engine beside its session: does it step, and why does no session open?

Must not know: requests, what is done about the answers.
"""

from dataclasses import dataclass

import grpc
import structlog

from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

_PROBE_TIMEOUT_S = 1.0
_VERIFY_FAILED = "CERTIFICATE_VERIFY_FAILED: "
# What gRPC's own messages hold, and what it means. They may name hosts and ports, so they are not passed on.
_MEANINGS = (
    ("Hostname Verification", "its certificate is for another name"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS"),
    (
        "Socket closed",
        "it closes the connection at once: one side may speak TLS and the other not, or it wants another certificate "
        "of ours",
    ),
    ("Connection refused", "nothing listens at its address"),
    ("resolving", "its name cannot be resolved"),
)
_SILENT = "it does not answer"

_log = structlog.get_logger()


async def step_age(stub: "engine_pb2_grpc.EngineServiceAsyncStub", timeout_s: float) -> float | None:
    """Seconds since the engine's last step; None when it does not answer in time or has taken none."""
    try:
        load = await stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return None
    return load.last_step_age.ToNanoseconds() / 1e9 if load.HasField("last_step_age") else None


@dataclass(slots=True)
class LinkTrouble:
    """Why no session opens with one engine: logged once, when two attempts in a row failed for the same reason."""

    address: str
    _seen: str = ""
    _told: str = ""

    async def after(self, stub: "engine_pb2_grpc.EngineServiceAsyncStub", error: Exception) -> None:
        """After an attempt that `error` ended."""
        if isinstance(error, grpc.aio.AioRpcError):
            self.refused(error)
        else:
            await self.ask(stub)

    async def ask(self, stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> None:
        """After an attempt that only waited: a call that does not wait says what for."""
        try:
            await stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=_PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self.note(_meaning(error) or _SILENT)
        else:
            self.note("it answers, but opens no session")

    def refused(self, error: grpc.aio.AioRpcError) -> None:
        """After an attempt that failed with a status. What the engine itself says (it is starting) is none."""
        self.note(_meaning(error) or "")

    def note(self, reason: str) -> None:
        if reason and reason == self._seen and reason != self._told:
            self._told = reason
            _log.warning("engine_unreachable", engine=self.address, reason=reason)
        self._seen = reason

    def over(self) -> None:
        """A session is open."""
        self._seen = self._told = ""


def _meaning(error: grpc.aio.AioRpcError) -> str | None:
    details = error.details() or ""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return None
    _, found, why = details.partition(_VERIFY_FAILED)
    if found:
        return f"its certificate is not accepted: {why.partition(':')[0]}"
    return next((meaning for words, meaning in _MEANINGS if words in details), None)
