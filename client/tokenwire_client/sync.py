"""The blocking client of the tokenizer service.

Must not know: the command line, the engine service, what a request means.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message as ProtoMessage

from tokenwire.common.v1 import health_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire.tokenizer.v1 import tokenizer_pb2_grpc
from tokenwire_client import convert
from tokenwire_client.assembly import Assembly, new_assembly
from tokenwire_client.channels import (
    CHANNEL_OPTIONS,
    DEFAULT_TARGET,
    HEALTH_METHOD,
    MAX_CONNECTIONS,
    STREAMS_PER_CONNECTION,
    LinkPool,
    addresses_of,
    key_metadata,
)
from tokenwire_client.errors import Unavailable
from tokenwire_client.retry import DEFAULT_RETRIES, Attempts, RetryPolicy, check_timeout
from tokenwire_client.sync_stream import OpenCall, Stream, translate_blocking
from tokenwire_client.tls import Tls
from tokenwire_client.tools import Tool, ToolChoice
from tokenwire_client.tracing import RequestTrace, Tracer, trace_of
from tokenwire_client.types import DEFAULT_SAMPLING, Health, Message, Model, Sampling

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class _Link:
    """One connection and its methods."""

    channel: grpc.Channel
    service: tokenizer_pb2_grpc.TokenizerServiceStub
    check_health: "grpc.UnaryUnaryMultiCallable[ProtoMessage, health_pb2.HealthAnswer]"


class Client:
    """All of a tokenizer service, blocking. Connects at the first call; safe to use from several threads.

    `target` is any gRPC name ("host:port", "dns:///name:port", "unix:path"), or several for services that serve the
    same: a call that one of them cannot serve goes to another, as long as nothing of the answer has come. Connections
    are encrypted with `tls`. `api_key` says who asks, where the service wants to know; without `tls` others on the
    network can read it. `timeout`, in seconds, is the deadline of each call that gives none; None is no deadline,
    `math.inf` in a call overrides it. Every method raises subclasses of TokenwireError; InvalidRequest is raised before
    anything is sent when a value cannot go on the wire. Generations join the trace that is current in the application
    (OpenTelemetry's), or that of their `traceparent`; with an OpenTelemetry `tracer` each is a span of its own there.
    """

    def __init__(
        self,
        target: str | Sequence[str] = DEFAULT_TARGET,
        *,
        tls: Tls | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
        retry: RetryPolicy = DEFAULT_RETRIES,
        streams_per_connection: int = STREAMS_PER_CONNECTION,
        max_connections: int = MAX_CONNECTIONS,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._tls = tls
        self._metadata = key_metadata(api_key)
        self._timeout = check_timeout(timeout)
        self._retry = retry
        self._clock = clock
        openers = [partial(self._connect, name) for name in addresses_of(target)]
        self._pool = LinkPool(openers, streams_per_connection, max_connections, self._close_link, clock)

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        cache_salt: str | None = None,
        priority: int | None = None,
        request_id: str = "",
        traceparent: str | None = None,
        timeout: float | None = None,
    ) -> Stream:
        """Continues a text, or token ids. The request is sent at once."""
        identity = convert.Identity(model, request_id, cache_salt, priority)
        request = convert.generate_request(prompt, sampling, identity, add_special_tokens=add_special_tokens)

        trace = trace_of("text_completion", model, self._tracer, traceparent)

        def start(remaining: float | None) -> OpenCall:
            lease = self._pool.lease()
            metadata = (*self._metadata, *trace.metadata)
            return OpenCall(lease.link.service.Generate(request, timeout=remaining, metadata=metadata), lease)

        return self._stream(start, timeout, new_assembly(sampling), trace)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling = DEFAULT_SAMPLING,
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        chat_template: str | None = None,
        cache_salt: str | None = None,
        priority: int | None = None,
        request_id: str = "",
        traceparent: str | None = None,
        timeout: float | None = None,
    ) -> Stream:
        """The assistant's next turn, which may call `tools`. The request is sent at once."""
        identity = convert.Identity(model, request_id, cache_salt, priority)
        rendering = convert.Rendering(add_generation_prompt, continue_final_message, tools, chat_template)
        request = convert.chat_request(
            messages, sampling, identity, rendering, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls
        )

        trace = trace_of("chat", model, self._tracer, traceparent)

        def start(remaining: float | None) -> OpenCall:
            lease = self._pool.lease()
            metadata = (*self._metadata, *trace.metadata)
            return OpenCall(lease.link.service.Chat(request, timeout=remaining, metadata=metadata), lease)

        return self._stream(start, timeout, new_assembly(sampling, tools), trace)

    def tokenize(
        self,
        source: str | Sequence[Message],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        tools: Sequence[Tool] = (),
        chat_template: str | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a text, or of a conversation rendered by the model's template."""
        rendering = convert.Rendering(add_generation_prompt, continue_final_message, tools, chat_template)
        request = convert.tokenize_request(source, rendering, model=model, add_special_tokens=add_special_tokens)
        answer = self._ask(
            lambda link, left: link.service.Tokenize(request, timeout=left, metadata=self._metadata), timeout
        )
        return tuple(answer.token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = convert.detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        answer = self._ask(
            lambda link, left: link.service.Detokenize(request, timeout=left, metadata=self._metadata), timeout
        )
        return answer.text

    def models(self, *, timeout: float | None = None) -> tuple[Model, ...]:
        """What is served."""
        request = pb.ListModelsRequest()
        answer = self._ask(
            lambda link, left: link.service.ListModels(request, timeout=left, metadata=self._metadata), timeout
        )
        return convert.models_from(answer)

    def health(self, service: str = "", *, timeout: float | None = None) -> Health:
        """The standard gRPC health check; NotFound for a service that is not there."""
        query = convert.health_query(service)
        answer = self._ask(lambda link, left: link.check_health(query, timeout=left), timeout)
        return convert.health_from(answer)

    def close(self) -> None:
        """Cancels what still runs and disconnects. Idempotent; later calls raise Cancelled."""
        for link in self._pool.close():
            link.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, target: str) -> _Link:
        if self._tls is None:
            channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        else:
            options = (*CHANNEL_OPTIONS, *self._tls.options())
            channel = grpc.secure_channel(target, self._tls.credentials(), options=options)
        check_health = channel.unary_unary(
            HEALTH_METHOD,
            request_serializer=health_pb2.HealthQuery.SerializeToString,
            response_deserializer=health_pb2.HealthAnswer.FromString,
        )
        return _Link(channel, tokenizer_pb2_grpc.TokenizerServiceStub(channel), check_health)

    @staticmethod
    def _close_link(link: _Link) -> None:
        link.channel.close()

    def _attempts(self, timeout: float | None) -> Attempts:
        seconds = self._timeout if timeout is None else check_timeout(timeout)
        return Attempts(self._retry, seconds, self._clock)

    def _stream(
        self, start: Callable[[float | None], OpenCall], timeout: float | None, assembly: Assembly, trace: RequestTrace
    ) -> Stream:
        attempts = self._attempts(timeout)
        with trace.ending_with_failure():
            return Stream(start(attempts.remaining()), start, attempts, assembly, trace)

    def _ask(self, call: Callable[[_Link, float | None], Answer], timeout: float | None) -> Answer:
        attempts = self._attempts(timeout)
        while True:
            try:
                lease = self._pool.lease()
                with lease:
                    return call(lease.link, attempts.remaining())
            except grpc.RpcError as error:
                failure = translate_blocking(error)
                elsewhere = isinstance(failure, Unavailable) and lease.retire()
                pause = attempts.pause_after(failure, elsewhere)
                if pause is None:
                    raise failure from error
            time.sleep(pause)
