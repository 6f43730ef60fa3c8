"""How many requests the service works on at once, and which of their ids are in use.

Must not know: grpc, what a request does.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from tokenizer_service.engines.refusal import Refusal, RefusalCode


class Admission:
    """A counted place for each request, from its first check to its last message."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._active = 0
        self._live_ids: set[tuple[str, str]] = set()  # of a tenant
        self.draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_active(self) -> int:
        return self._active

    def enter(self) -> Refusal | None:
        """Takes a place, to be given back with `leave`; or says why there is none."""
        if self.draining.is_set():
            return Refusal(RefusalCode.UNAVAILABLE, "the service is shutting down", retry_after_s=1.0)
        if self._active >= self._max_requests:
            return Refusal(
                RefusalCode.RESOURCE_EXHAUSTED,
                f"{self._active:,} requests are being served, the limit is {self._max_requests:,}",
                retry_after_s=1.0,
            )
        self._active += 1
        self._idle.clear()
        return None

    def leave(self) -> None:
        self._active -= 1
        if self._active == 0:
            self._idle.set()

    @contextmanager
    def place(self) -> Iterator[Refusal | None]:
        """A place for the time of the block; or why there is none."""
        refusal = self.enter()
        try:
            yield refusal
        finally:
            if refusal is None:
                self.leave()

    def claim_id(self, tenant: str, request_id: str) -> Refusal | None:
        """Marks an id as live, to be given back with `release_id`; one that is live for the same tenant is refused.

        Of the ids of other tenants nobody learns anything.
        """
        if (tenant, request_id) in self._live_ids:
            return Refusal(RefusalCode.ALREADY_EXISTS, f"a request with the id {request_id!r} is running")
        self._live_ids.add((tenant, request_id))
        return None

    def release_id(self, tenant: str, request_id: str) -> None:
        self._live_ids.discard((tenant, request_id))

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.draining.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()
