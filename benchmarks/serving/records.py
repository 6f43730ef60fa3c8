"""What is noted of one request: when it was sent and when its tokens arrived.

Standard library only, and importable by the interpreters of peers. Must not know: targets, statistics.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    """Seconds on one monotonic clock. `arrivals` are (time, tokens in that message); `tokens` is how many the
    server says it generated, None where it does not say. `error`: why there is no whole answer."""

    key: int
    sent: float
    arrivals: tuple[tuple[float, int], ...]
    end: float
    tokens: int | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """The server's count, or else what arrived."""
        return self.tokens if self.tokens is not None else sum(count for _, count in self.arrivals)


def to_json(record: Record) -> dict[str, Any]:
    return {
        "key": record.key,
        "sent": record.sent,
        "arrivals": record.arrivals,
        "end": record.end,
        "tokens": record.tokens,
        "error": record.error,
    }


def from_json(data: dict[str, Any]) -> Record:
    arrivals = tuple((float(at), int(count)) for at, count in data["arrivals"])
    return Record(data["key"], data["sent"], arrivals, data["end"], data["tokens"], data["error"])
