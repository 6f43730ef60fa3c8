"""The generations that are being delivered now, so that all of them can be ended at once.

Must not know: grpc, why they must end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.sessions.session import TextSession


class LiveSessions:
    """A set of open sessions."""

    def __init__(self) -> None:
        self._sessions: set[TextSession] = set()

    @contextmanager
    def keep(self, session: TextSession) -> Iterator[None]:
        """Holds an open session for the time of the block, and closes it however the block ends."""
        self._sessions.add(session)
        try:
            yield
        finally:
            self._sessions.discard(session)
            session.close()

    def fail_all(self, refusal: Refusal) -> None:
        for session in list(self._sessions):
            session.fail(refusal)
