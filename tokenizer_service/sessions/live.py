"""The generations that are being delivered now, so that all of them can be ended at once.

Must not know: grpc, why they must end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.sessions.session import TextSession


class LiveSessions:
    """A set of open sessions. Once all were ended, a session that comes later ends at once."""

    def __init__(self) -> None:
        self._sessions: set[TextSession] = set()
        self._closed: Refusal | None = None

    @contextmanager
    def keep(self, session: TextSession) -> Iterator[None]:
        """Holds an open session for the time of the block, and closes it however the block ends."""
        self._sessions.add(session)
        if self._closed is not None:
            session.fail(self._closed)
        try:
            yield
        finally:
            self._sessions.discard(session)
            session.close()

    def fail_all(self, refusal: Refusal) -> None:
        self._closed = refusal
        for session in list(self._sessions):
            session.fail(refusal)
