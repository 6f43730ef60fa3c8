"""What comes of one request, and the interface of whatever it is sent to.

Must not know: transports, statistics, schedules.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from tokenwire_client.load.workload import LoadRequest


class Part(NamedTuple):
    """Something of an answer: so many new tokens; the counts of the server where it gives them (else None)."""

    tokens: int
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class RequestFailed(Exception):
    """There is no whole answer. `status` is one of few (`http_429`, `unavailable`); the message is for people."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message


class Target(Protocol):
    """A server under load."""

    def stream(self, request: LoadRequest) -> AsyncGenerator[Part, None]:
        """Sends at the first step, then gives what comes. Leaving it cancels. RequestFailed unless it ends well."""
        ...

    async def close(self) -> None: ...


class Ending(Enum):
    """How a request that was sent has ended."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"  # left early, as the workload wanted
    ABANDONED = "abandoned"  # still running when the test was ended


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds on one monotonic clock. `intended`: when the schedule wanted it to start (in a closed loop: `sent`).

    `arrivals` are (time, tokens in that message). Token counts are the server's; None where it gave none.
    """

    request: LoadRequest
    intended: float
    sent: float
    end: float
    ending: Ending
    arrivals: tuple[tuple[float, int], ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    status: str = ""
    message: str = ""

    @property
    def lag(self) -> float:
        """How late the generator itself was."""
        return self.sent - self.intended

    @property
    def tokens(self) -> int:
        """The server's count, or else what arrived."""
        return self.arrived if self.completion_tokens is None else self.completion_tokens

    @property
    def arrived(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float | None:
        """Intended start to first token."""
        return self.arrivals[0][0] - self.intended if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """(last token - first) / tokens after the first message; None for answers of one message."""
        later = self.tokens - self.arrivals[0][1] if self.arrivals else 0
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later > 0 else None

    @property
    def e2e(self) -> float:
        """Intended start to the end."""
        return self.end - self.intended
