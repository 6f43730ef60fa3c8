"""However an HTTP request goes, every span that was begun for it is ended: what is not ended is never exported."""

import asyncio
from dataclasses import dataclass, field

from service_runtime.trace_context import TraceContext
from service_runtime.tracing import Anchor, Attributes, SpanKind
from tests.fixtures import fake_engine as fe
from tests.fixtures.http_calls import CHAT, COMPLETIONS, body_of, error_of, http
from tests.fixtures.tokenizer_app import default_model, eventually, running


@dataclass(slots=True)
class CountedSpan:
    """A Span that remembers its end. `made` has all of them."""

    name: str
    made: "list[CountedSpan]"
    ends: list[str | None] = field(default_factory=list)
    context: TraceContext | None = None
    is_recorded: bool = True

    def child(self, name: str, at: float, kind: SpanKind = SpanKind.INTERNAL) -> "CountedSpan":
        self.made.append(CountedSpan(name, self.made))
        return self.made[-1]

    def stage(self, name: str, began: float, ended: float, attributes: Attributes | None = None) -> None:
        assert ended >= began

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        return

    def set(self, attributes: Attributes) -> None:
        return

    def end(
        self, at: float, attributes: Attributes | None = None, *, error: str | None = None, is_fault: bool = True
    ) -> None:
        self.ends.append(error)


@dataclass(slots=True)
class Counter:
    """A Tracer of counted spans."""

    made: list[CountedSpan] = field(default_factory=list)

    def begin(self, name: str, kind: SpanKind, parent: TraceContext | None, anchor: Anchor) -> CountedSpan:
        return CountedSpan(name, self.made).child(name, 0.0, kind)

    def close(self) -> None:
        return

    async def take(self) -> list[tuple[str, str | None]]:
        """Name and error of all spans until now, once each of them is ended: a moment after the answer was read."""
        await eventually(lambda: all(span.ends for span in self.made))
        made = self.made.copy()
        self.made.clear()
        return [(span.name, span.ends[0]) for span in made]


async def hello(request: fe.FakeRequest) -> None:
    if request.client_id == "held":
        await fe.until_cancelled(request)
    await request.play([19556], eos=2)


async def test_every_span_of_an_http_request_is_ended() -> None:
    tracer = Counter()
    async with (
        running(default_model(), hello, tracer=tracer, max_requests=1, served_model_name="m") as service,
        http(service) as client,
    ):
        assert (await client.post(CHAT, json=body_of(CHAT))).status_code == 200
        assert await tracer.take() == [(f"POST {CHAT}", None), ("chat m", None), ("generate", None)]
        error_of(await client.post(CHAT, json=body_of(CHAT, messages=[{"role": "user", "content": 5}])), 400)
        assert await tracer.take() == [(f"POST {CHAT}", None)]
        held = asyncio.create_task(client.post(CHAT, json=body_of(CHAT), headers={"x-request-id": "held"}))
        await service.engine.wait_until(lambda: service.engine.num_live == 1)
        tracer.made.clear()
        error_of(await client.post(COMPLETIONS, json=body_of(COMPLETIONS)), 429)
        assert await tracer.take() == [(f"POST {COMPLETIONS}", None), ("text_completion m", "RESOURCE_EXHAUSTED")]
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        await service.engine.wait_until(lambda: service.engine.num_live == 0)
