"""W3C Trace Context: what is read, what is ignored, what is passed on."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service_runtime.trace_context import TraceContext, context_of_headers, read_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_good_header_is_read_and_written_again() -> None:
    found = read_context(GOOD, "a=1,b=2")
    assert found == TraceContext(TRACE, SPAN, 1, "a=1,b=2")
    assert (found.traceparent, found.is_sampled) == (GOOD, True)


def test_the_caller_may_have_decided_not_to_sample() -> None:
    found = read_context(f"00-{TRACE}-{SPAN}-00")
    assert found is not None
    assert not found.is_sampled
    assert found.traceparent.endswith("-00")


def test_of_a_later_version_only_what_is_known_is_kept() -> None:
    found = read_context(f"cc-{TRACE}-{SPAN}-ff-what-ever")
    assert found is not None
    assert found.traceparent == GOOD


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        GOOD.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0g",
        f"{GOOD}\n",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 600}",
        GOOD.replace("4", "٤"),
    ],
)
def test_what_is_malformed_is_ignored(text: str) -> None:
    assert read_context(text) is None


@pytest.mark.parametrize("state", ["a=1\r\nb", "é=1", "x" * 513])
def test_a_bad_state_does_not_cost_the_trace(state: str) -> None:
    assert read_context(GOOD, state) == TraceContext(TRACE, SPAN)


def test_headers_of_grpc_and_http() -> None:
    headers = [("authorization", "x"), ("traceparent", f" {GOOD} "), ("tracestate", "a=1"), ("tracestate", "b=2")]
    assert context_of_headers(headers) == TraceContext(TRACE, SPAN, 1, "a=1,b=2")
    assert context_of_headers([*headers, ("traceparent", GOOD)]) is None
    assert context_of_headers([("traceparent", GOOD.encode())]) is None
    assert context_of_headers([]) is None


@given(st.text(alphabet="0123456789abcdef-fF ", max_size=70), st.text(max_size=20))
def test_any_text_gives_a_context_that_is_read_back_or_none(parent: str, state: str) -> None:
    found = read_context(parent, state)
    if found is not None:
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", found.traceparent)
        assert read_context(found.traceparent, found.state) == found
