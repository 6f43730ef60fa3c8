"""Settings of the tokenizer service, with units and ranges.

Must not know: how they are used.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from service_runtime.config import ServiceSettings
from service_runtime.grpc_server import DEFAULT_MAX_REQUEST_BYTES, MAX_MESSAGE_BYTES
from service_runtime.logs import LogFormat
from service_runtime.model_files import DEFAULT_MODEL
from service_runtime.tls_files import LinkTlsFiles, ServerTlsFiles, link_files, server_files
from service_runtime.trace_options import OtlpEndpoint, TraceOptions

ENV_PREFIX = "TOKENWIRE_TOKENIZER_"
PROGRAM = "tokenwire-tokenizer"

Address = Annotated[str, StringConstraints(pattern=r"^[^\s,/]+:[0-9]{1,5}$")]
Port = Annotated[int, Field(ge=0, le=65535)]


class TokenizerSettings(ServiceSettings):
    """Flags of `tokenwire-tokenizer`."""

    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="model whose tokenizer is used: a folder, a Hugging Face id or the default",
    )
    served_model_name: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="name that clients use (default: end of --model)",
    )
    engine: tuple[Address, ...] = Field(
        ("127.0.0.1:50051",), min_length=1, max_length=1024, description="HOST:PORT of an engine service"
    )
    engine_ca_file: Path | None = Field(
        None, description="PEM certificates that sign the engines' ones; turns TLS on for the links to engines"
    )
    engine_cert_file: Path | None = Field(None, description="PEM certificate chain to show to engines (mTLS)")
    engine_key_file: Path | None = Field(None, description="PEM key of that certificate")
    engine_server_name: str | None = Field(
        None, min_length=1, max_length=253, description="name in the engines' certificates (default: --engine's host)"
    )
    tls_cert_file: Path | None = Field(
        None, description="PEM certificate chain of gRPC and HTTP; with --tls-key-file turns TLS on"
    )
    tls_key_file: Path | None = Field(None, description="PEM key of that certificate; both are read again on change")
    tls_client_ca_file: Path | None = Field(
        None, description="PEM certificates; clients must show one that was signed by them (mTLS)"
    )
    engine_dns: tuple[Address, ...] = Field(
        (),
        max_length=64,
        description="NAME:PORT whose addresses are all engine services; with it, --engine has no default",
    )
    engine_dns_interval: float = Field(
        10.0, ge=0.1, le=86_400, description="seconds between two questions for the addresses of --engine-dns"
    )
    routing: Literal["prefix", "least-work", "round-robin", "power-of-two"] = Field(
        "prefix", description="how the engine of a request is chosen (docs/routing.md)"
    )
    operator_host: str = Field("127.0.0.1", min_length=1, description="address to listen on for operators")
    operator_port: Port | None = Field(
        None, description="port for operators, who list, add and remove engines; 0: any free one (default: off)"
    )
    engine_hang_timeout: float = Field(
        30.0,
        ge=0.5,
        le=86_400,
        description="seconds that an engine which holds work may be silent and take no step; "
        "then its requests go elsewhere",
    )
    failover_attempts: int = Field(
        3,
        ge=0,
        le=100,
        description="engines in a row that may be lost under a request without a new token before it fails; "
        "0: it fails with its first engine",
    )
    failover_wait: float = Field(
        30.0,
        ge=0,
        le=86_400,
        description="seconds that a request whose engine was lost waits for another one that takes it",
    )
    failover_share: float = Field(
        0.5, ge=0, le=100, description="resumptions that each new request allows, however many engines fail"
    )
    failover_burst: int = Field(
        1024, ge=1, le=1_000_000, description="resumptions allowed at once, say when a large engine is lost"
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on for gRPC")
    port: Port = Field(50050, description="port for gRPC; 0: any free one")
    metrics_host: str = Field("127.0.0.1", min_length=1, description="address to listen on for /metrics")
    metrics_port: Port = Field(9090, description="port for /metrics; 0: any free one")
    http: bool = Field(True, description="serve the OpenAI-compatible HTTP endpoint and the page at /")
    http_host: str = Field("127.0.0.1", min_length=1, description="address to listen on for HTTP")
    http_port: Port = Field(8000, description="port for HTTP; 0: any free one")
    api_key: tuple[str, ...] = Field(
        (), max_length=1024, description="key that clients must send; best as a variable: others can see flags"
    )
    api_key_file: str | None = Field(
        None, min_length=1, description="file of more such keys, as one hexadecimal SHA-256 a line"
    )
    tenants: Path | None = Field(
        None, description="TOML file of tenants: their keys, limits and weights; read again when it changes"
    )
    cors_origin: tuple[str, ...] = Field(
        (), max_length=256, description="origin whose web pages may use the HTTP endpoint (default: none)"
    )
    http_max_connections: int = Field(
        8192, ge=1, le=1_000_000, description="HTTP connections open at once; more are refused"
    )
    http_header_timeout: float = Field(
        10.0, gt=0, le=3600, description="seconds until the headers of an HTTP request must have come"
    )
    http_body_timeout: float = Field(60.0, gt=0, le=3600, description="seconds until its body must have come")
    http_write_timeout: float = Field(
        120.0, gt=0, le=86_400, description="seconds that an HTTP client may read nothing of an answer that is due"
    )
    http_keep_alive_timeout: int = Field(
        75, ge=1, le=3600, description="seconds until an idle HTTP connection is closed"
    )
    encode_threads: int = Field(2, ge=1, le=256, description="threads for templates and encoding")
    max_queued_encodes: int = Field(
        1024, ge=0, le=1_000_000, description="texts that may wait for such a thread; more are refused"
    )
    max_requests: int = Field(4096, ge=1, le=1_000_000, description="requests served at once; more are refused")
    max_request_bytes: int = Field(
        DEFAULT_MAX_REQUEST_BYTES, ge=1024, le=MAX_MESSAGE_BYTES, description="largest request message, bytes"
    )
    max_unread_tokens: int = Field(
        65_536,
        ge=1,
        le=100_000_000,
        description="tokens that a slow reader may leave unread before its request is cancelled",
    )
    allow_tokenizer_mismatch: bool = Field(
        False, description="use engines whose model has another tokenizer (for tests and repairs)"
    )
    tool_call_format: Literal["auto", "hermes", "llama3-json", "mistral", "none"] = Field(
        "auto", description="how the model writes tool calls; auto: what its chat template and vocabulary show"
    )
    allow_chat_template_override: bool = Field(False, description="let requests bring a chat template of their own")
    drain_timeout: float = Field(
        30.0, ge=0, le=86_400, description="seconds that running requests get to finish after SIGTERM"
    )
    slow_request_seconds: float = Field(
        60.0,
        ge=0,
        le=86_400,
        description="seconds after which a generation is slow: a line slow_request says where they went; 0: never",
    )
    otlp_endpoint: OtlpEndpoint | None = Field(
        None,
        description="http://HOST:PORT or https://HOST:PORT that takes traces over OTLP/gRPC (default: off)",
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="share of the requests to trace, of those whose caller has not decided it"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="lowest level logged")
    log_format: LogFormat = Field("auto", description="auto (JSON unless on a terminal), json or console")

    @property
    def traces(self) -> TraceOptions:
        return TraceOptions(self.otlp_endpoint, self.trace_sample_ratio)

    @property
    def tls(self) -> ServerTlsFiles | None:
        return server_files(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)

    @property
    def engine_tls(self) -> LinkTlsFiles | None:
        return link_files(self.engine_ca_file, self.engine_cert_file, self.engine_key_file, self.engine_server_name)

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        self.tls, self.engine_tls  # noqa: B018 (they raise)
        return self

    @property
    def named_engines(self) -> tuple[str, ...]:
        """The default address counts only where nothing else names engines."""
        return () if self.engine_dns and "engine" not in self.model_fields_set else self.engine

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]
