"""W3C Trace Context: which trace a request is part of, read from headers and passed on. Needs no library.

What cannot be read is ignored, as the standard asks: a wrong trace must never cost an answer. Must not know: spans,
exporters, gRPC. Source: https://www.w3.org/TR/trace-context/
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_CHARACTERS = 512
"""Of each header; the standard asks for as many of `tracestate`, and `traceparent` has 55 today."""

_SAMPLED = 0x01
_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_STATE = re.compile(r"[\x20-\x7e\t]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of somebody's, under which we go on. Ids are lower-case hexadecimal, `flags` a byte."""

    trace_id: str
    span_id: str
    flags: int = _SAMPLED
    state: str = ""

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context that two headers mean; None when there is none or it is malformed."""
    if len(traceparent) > MAX_CHARACTERS:
        return None
    found = _HEADER.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not (trace_id.strip("0") and span_id.strip("0")):
        return None
    # Of a later version only what this one knows is passed on.
    kept = int(flags, 16) if version == "00" else int(flags, 16) & _SAMPLED
    is_good = len(tracestate) <= MAX_CHARACTERS and _STATE.fullmatch(tracestate) is not None
    return TraceContext(trace_id, span_id, kept, tracestate.strip() if is_good else "")


def context_of_headers(headers: Iterable[tuple[str, str | bytes]]) -> TraceContext | None:
    """From gRPC metadata or HTTP headers with names in lower case. Two `traceparent` are none."""
    parents: list[str] = []
    states: list[str] = []
    for name, value in headers:
        if name in (TRACEPARENT, TRACESTATE) and isinstance(value, str):
            (parents if name == TRACEPARENT else states).append(value)
    return read_context(parents[0].strip(), ",".join(states)) if len(parents) == 1 else None
