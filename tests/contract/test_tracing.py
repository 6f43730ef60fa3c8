"""Traces of real services, taken by a real collector: their trees, their attributes, and that they always end."""

import asyncio
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from benchmarks.serving.trace_collector import Collector, Seen, Tree, collector
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.checkpoints import SCRIPT_S1_TEXT, write_succ
from tests.fixtures.http_calls import CHAT, COMPLETIONS
from tests.fixtures.http_stack import HttpStack, http_stack
from tests.fixtures.stack import until
from tests.fixtures.tokenizer_process import tokenizer_process
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc
from tokenwire_client import Client, Message, Sampling
from tokenwire_client.errors import InvalidRequest, TokenwireError

TOKENIZER, ENGINE = "tokenwire-tokenizer", "tokenwire-engine"
PROMPT, SALT = "xylophonic zugzwang", "ornithorhynchus"
REQUEST = "chat succ"
STAGES = ("validate", "encode", "route", "generate", "deliver")


@dataclass(frozen=True, slots=True)
class Traced:
    stack: HttpStack
    collector: Collector
    target: str

    def client(self, **options: Any) -> Client:
        return Client(self.target, timeout=30, **options)

    def logged(self, trace_id: str, event: str) -> list[dict[str, Any]]:
        services = (self.stack.tokenizer, self.stack.engine)
        return [line for each in services for line in each.events(event) if line.get("trace_id") == trace_id]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = write_succ(tmp_path_factory.mktemp("models") / "succ", resolve_model_folder(DEFAULT_MODEL))
    with collector() as made:
        flags = ("--otlp-endpoint", made.endpoint, "--log-level", "debug")
        engine = (*flags, "--num-blocks", "256", "--max-model-len", "2048")
        with http_stack(folder, tmp_path_factory.mktemp("logs"), engine_flags=engine, tokenizer_flags=flags) as stack:
            (listening,) = stack.tokenizer.events("listening")
            yield Traced(stack, made, f"127.0.0.1:{listening['grpc_port']}")


def new_parent() -> tuple[str, str]:
    """A trace id, and the header of a caller in that trace."""
    trace_id = secrets.token_hex(16)
    return trace_id, f"00-{trace_id}-{secrets.token_hex(8)}-01"


def assert_nested(tree: Tree) -> None:
    """No span begins before its parent, or ends after it: all on one machine here, so on one wall clock."""
    for span in tree.spans:
        parent = tree.parent(span)
        if parent is not None:
            assert span.began >= parent.began - 0.005, (span.name, parent.name)
            assert span.ended <= parent.ended + 0.05, (span.name, parent.name)


def assert_end_to_end(spans: list[Seen]) -> None:
    for one, other in pairwise(spans):
        assert abs(other.began - one.ended) < 0.02, (one.name, other.name)


def test_one_trace_from_the_client_to_the_engine(traced: Traced) -> None:
    provider = TracerProvider(resource=Resource({"service.name": "app"}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=traced.collector.endpoint)))
    tracer = provider.get_tracer("app")
    with tracer.start_as_current_span("page") as page, traced.client(tracer=tracer) as client:
        sampling = Sampling(max_tokens=20, temperature=0.0, seed=7)
        done = client.chat([Message("user", PROMPT)], sampling, model="succ", request_id="r-1").result()
    provider.shutdown()
    trace_id = f"{page.get_span_context().trace_id:032x}"
    tree = traced.collector.wait_trace(trace_id, "page", REQUEST, REQUEST, "engine", "decode", "deliver")

    client_span, server = tree.all_named(REQUEST)
    assert (client_span.service, client_span.kind, server.service, server.kind) == (
        "app",
        "client",
        TOKENIZER,
        "server",
    )
    assert tree.parent(client_span) == tree.named("page")
    assert tree.parent(server) == client_span
    assert tree.children(server) == list(STAGES)
    engine = tree.named("engine")
    assert (engine.service, engine.kind) == (ENGINE, "server")
    assert tree.parent(engine) == tree.named("generate")
    assert tree.children(engine) == ["queue", "prefill", "decode"]
    assert len(tree.spans) == 3 + len(STAGES) + 4
    assert_nested(tree)
    assert_end_to_end([tree.named(name) for name in STAGES])
    assert_end_to_end([tree.named(name) for name in ("queue", "prefill", "decode")])
    assert not any(span.is_error or "error.type" in span.attributes for span in tree.spans)
    assert_attributes(tree, server, done.usage.prompt_tokens)
    assert client_span.attributes["tokenwire.request_id"] == "r-1"
    assert client_span.attributes["gen_ai.usage.output_tokens"] == 20


def assert_attributes(tree: Tree, server: Seen, prompt_tokens: int) -> None:
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tokenwire",
        "gen_ai.request.model": "succ",
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "tokenwire.request_id": "r-1",
    }
    assert {name: server.attributes.get(name) for name in expected} == expected
    assert 0 < server.attributes["tokenwire.detokenize.duration"] < server.seconds
    assert server.events == ("first_token",)
    prefill, decode = tree.named("prefill"), tree.named("decode")
    assert prefill.attributes["tokenwire.steps"] == 1
    assert decode.attributes["tokenwire.steps"] == 19
    assert (decode.attributes["tokenwire.preemptions"], decode.attributes["gen_ai.usage.output_tokens"]) == (0, 20)
    assert tree.named("engine").attributes["gen_ai.response.finish_reasons"] == ["length"]


def test_every_log_line_of_a_request_names_its_trace(traced: Traced) -> None:
    trace_id, parent = new_parent()
    with traced.client() as client:
        client.generate(PROMPT, Sampling(max_tokens=3), request_id="r-2", traceparent=parent).result()
    traced.collector.wait_trace(trace_id, "engine")
    asyncio.run(until(lambda: len(traced.logged(trace_id, "request_end")) == 1, 5))
    (finished,) = traced.logged(trace_id, "request finished")
    assert finished["request_id"].startswith("r-2")
    assert traced.logged(trace_id, "request_end")[0]["request_id"] == "r-2"


@pytest.mark.parametrize("stream", [False, True])
def test_over_http_all_prompts_are_in_one_trace(traced: Traced, stream: bool) -> None:
    trace_id, parent = new_parent()
    body = {"prompt": [PROMPT, "Hello"], "max_tokens": 3, "stream": stream}
    answer = traced.stack.post(COMPLETIONS, body, headers={"traceparent": parent, "tracestate": "a=1"})
    assert answer.status_code == 200
    tree = traced.collector.wait_trace(trace_id, f"POST {COMPLETIONS}", *["text_completion succ", "engine"] * 2)
    server = tree.named(f"POST {COMPLETIONS}")
    assert (server.parent_id, server.kind, server.attributes["http.response.status_code"]) == (
        parent.split("-")[2],
        "server",
        200,
    )
    assert tree.children(server) == ["text_completion succ"] * 2
    assert all(tree.children(span)[:4] == list(STAGES[:4]) for span in tree.all_named("text_completion succ"))
    assert_nested(tree)


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "x" * 5000])
def test_a_malformed_context_costs_neither_the_answer_nor_the_trace(traced: Traced, header: str) -> None:
    before = len(traced.collector.spans)
    request_id = secrets.token_hex(8)
    headers = {"traceparent": header, "x-request-id": request_id}
    answer = traced.stack.post(
        CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, headers=headers
    )
    assert answer.status_code == 200

    def mine(spans: Any) -> list[Seen]:
        return [s for s in spans[before:] if s.attributes.get("tokenwire.request_id") == request_id]

    found = mine(traced.collector.wait(lambda spans: bool(mine(spans))))
    assert found[0].trace_id not in header


def test_a_caller_that_does_not_sample_is_obeyed_by_both_services(traced: Traced) -> None:
    """And its trace is named in the logs all the same."""
    quiet, loud = new_parent(), new_parent()
    with traced.client() as client:
        for parent in (quiet[1].removesuffix("01") + "00", loud[1]):
            client.generate(PROMPT, Sampling(max_tokens=2), traceparent=parent).result()
    traced.collector.wait_trace(loud[0], "text_completion succ", "engine")
    assert traced.collector.of_trace(quiet[0]) == []
    assert len(traced.logged(quiet[0], "request finished")) == 1


def test_a_refused_request_has_a_trace_that_says_so(traced: Traced) -> None:
    trace_id, parent = new_parent()
    with traced.client() as client, pytest.raises(InvalidRequest):
        client.generate(PROMPT, Sampling(max_tokens=0), traceparent=parent).result()
    span = traced.collector.wait_trace(trace_id, "text_completion succ").named("text_completion succ")
    assert (span.attributes["error.type"], span.is_error) == ("INVALID_ARGUMENT", False)


def test_a_passed_deadline_ends_all_spans(traced: Traced) -> None:
    trace_id, parent = new_parent()
    with traced.client() as client, pytest.raises(TokenwireError):
        client.generate(PROMPT, Sampling(max_tokens=2000, ignore_eos=True), traceparent=parent, timeout=0.15).result()
    tree = traced.collector.wait_trace(trace_id, "text_completion succ", "generate", "engine")
    server, engine = tree.named("text_completion succ"), tree.named("engine")
    assert (server.attributes["error.type"], server.is_error) == ("DEADLINE_EXCEEDED", True)
    assert engine.attributes["error.type"] in ("DEADLINE_EXCEEDED", "CANCELLED")


def test_a_client_that_leaves_ends_all_spans(traced: Traced) -> None:
    trace_id, parent = new_parent()
    sampling = Sampling(max_tokens=2000, ignore_eos=True)
    with traced.client() as client, client.generate(PROMPT, sampling, traceparent=parent) as stream:
        next(iter(stream))
    tree = traced.collector.wait_trace(trace_id, "text_completion succ", "generate", "engine", "decode")
    server, engine = tree.named("text_completion succ"), tree.named("engine")
    assert (server.attributes["error.type"], server.is_error) == ("CANCELLED", False)
    assert (engine.attributes["error.type"], engine.is_error) == ("CANCELLED", False)
    assert tree.named("generate").attributes["tokenwire.cancelled"] is True
    assert server.attributes["gen_ai.usage.output_tokens"] < 2000


def test_a_stop_string_is_a_good_end(traced: Traced) -> None:
    trace_id, parent = new_parent()
    stop = SCRIPT_S1_TEXT.split()[2]
    with traced.client() as client:
        client.generate("Hello", Sampling(temperature=0.0, stop=(stop,)), traceparent=parent).result()
    tree = traced.collector.wait_trace(trace_id, "text_completion succ", "generate", "engine", "deliver")
    server = tree.named("text_completion succ")
    assert (server.attributes["gen_ai.response.finish_reasons"], server.is_error) == (["stop"], False)
    assert "error.type" not in server.attributes


def test_the_engines_own_api_reads_the_metadata(traced: Traced) -> None:

    trace_id, parent = new_parent()
    (listening,) = traced.stack.engine.events("listening")
    with grpc.insecure_channel(f"127.0.0.1:{listening['grpc_port']}") as channel:
        request = engine_pb2.TokenRequest(prompt_token_ids=[5, 6])
        request.sampling.max_tokens = 2
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        list(stub.Generate(engine_pb2.GenerateRequest(request=request), metadata=(("traceparent", parent),)))
    tree = traced.collector.wait_trace(trace_id, "engine", "decode")
    assert tree.named("engine").parent_id == parent.split("-")[2]


def test_no_text_is_in_any_trace(traced: Traced) -> None:
    """What the other tests have sent, and more that goes wrong."""
    trace_id, parent = new_parent()
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3, "stop": [PROMPT], "cache_salt": SALT},
        {"messages": [{"role": PROMPT, "content": PROMPT}]},
        {"messages": [{"role": "user", "content": PROMPT}], "model": PROMPT},
        {"messages": [{"role": "user", "content": PROMPT}], "response_format": {"type": PROMPT}},
    ]
    codes = {traced.stack.post(CHAT, body, headers={"traceparent": parent}).status_code for body in bodies}
    assert codes == {200, 400, 404}
    traced.collector.wait_trace(trace_id, *[f"POST {CHAT}"] * 4)
    everything = json.dumps([[s.name, s.attributes, s.events] for s in traced.collector.spans]).lower()
    for secret in (*PROMPT.split(), SALT, SCRIPT_S1_TEXT.split()[2].lower()):
        assert secret not in everything
    assert len(traced.collector.spans) > 50


async def test_without_a_collector_requests_are_served_and_the_service_stops_in_time(
    tmp_path_factory: pytest.TempPathFactory, traced: Traced
) -> None:
    (listening,) = traced.stack.engine.events("listening")
    folder = str(resolve_model_folder(DEFAULT_MODEL))
    engine = f"127.0.0.1:{listening['grpc_port']}"
    flags = ("--model", folder, "--engine", engine, "--otlp-endpoint", "http://127.0.0.1:9")
    async with tokenizer_process(*flags) as service:
        ports = await service.wait_for_event("listening")
        await service.wait_for_event("serving")
        with Client(f"127.0.0.1:{ports['grpc_port']}", timeout=30) as client:
            done = await asyncio.to_thread(lambda: client.generate("Hello", Sampling(temperature=0.0)).result())
        assert done.text == SCRIPT_S1_TEXT
        began = time.monotonic()
        service.process.terminate()
        assert await service.wait_exit() == 0
        assert time.monotonic() - began < 10
    (lost,) = [event for event in service.events if event.get("event") == "trace_spans_lost"]
    assert lost["spans"] == lost["of"] > 0
    assert [line for line in service.other_lines if "Traceback" in line] == []


def test_without_an_endpoint_the_library_is_not_loaded() -> None:
    """Off costs nothing."""

    program = (
        "import sys, engine_service.__main__, tokenizer_service.__main__, tokenwire_client\n"
        "from service_runtime.trace_options import TraceOptions\n"
        "from service_runtime.tracing import NO_TRACER, start_tracer\n"
        "assert start_tracer(TraceOptions(), service='s', version='1') is NO_TRACER\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_histograms_lead_to_the_trace(traced: Traced) -> None:
    """Exemplars, for who asks for OpenMetrics."""
    trace_id, parent = new_parent()
    body = {"prompt": "Hello", "temperature": 0}
    assert traced.stack.post(COMPLETIONS, body, headers={"traceparent": parent}).status_code == 200
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    page = traced.stack.client.get("/metrics", headers=accept).text
    found = [line.partition("_bucket")[0] for line in page.splitlines() if f'trace_id="{trace_id}"' in line]
    assert sorted(found) == [f"tokenwire_tokenizer_{name}_seconds" for name in ("request", "time_to_first_token")]
