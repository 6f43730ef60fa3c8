"""What engines call the requests that they get from us.

Clients choose their ids: two tenants, or two services, may choose the same one, and an engine that has lost sight of us
may still know a request that another goes on with. Must not know: engines, tenants, what a request is.
"""

from dataclasses import dataclass

MAX_CHARS = 256
"""What an engine takes."""


@dataclass(slots=True)
class EngineIds:
    """`service` is of this process alone, and holds no '~'."""

    service: str
    _count: int = 0

    def new(self, request_id: str) -> str:
        """An id that no engine has from anybody else. It begins with the client's, so that logs can be followed.

        What follows the last '~' is never given twice, so ids differ whatever clients call their requests.
        """
        self._count += 1
        suffix = f"~{self.service}-{self._count}"
        return request_id[: MAX_CHARS - len(suffix)] + suffix
