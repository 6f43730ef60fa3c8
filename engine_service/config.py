"""Settings of the engine service: flat flags, checked before anything loads.

Must not know: torch, gRPC, how the settings are used.
"""

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from engine_service.byte_sizes import Bytes
from engine_service.setting_rules import check_together
from service_runtime.config import ServiceSettings
from service_runtime.grpc_server import DEFAULT_MAX_REQUEST_BYTES
from service_runtime.logs import LogFormat
from service_runtime.model_files import DEFAULT_MODEL
from service_runtime.tls_files import ServerTlsFiles, server_files
from service_runtime.trace_options import OtlpEndpoint, TraceOptions

ENV_PREFIX = "TOKENWIRE_ENGINE_"
PROGRAM = "tokenwire-engine"
DEFAULT_CPU_KV_CACHE_BYTES = 1024**3
DEFAULT_DEVICE_KV_CACHE_FRACTION = 0.9

Port = Annotated[int, Field(ge=0, le=65535)]


class DeviceChoice(Enum):
    CPU = "cpu"
    CUDA = "cuda"
    AUTO = "auto"


DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
WeightFormatName = Literal["plain", "int4", "int8"]
DefaultSamplingName = Literal["model", "neutral"]
SpeculationName = Literal["auto", "off", "prompt-lookup"]


class EngineSettings(ServiceSettings):
    """What an operator may set. See `--help`; each name is also an environment variable and a TOML key."""

    model: str = Field(DEFAULT_MODEL, min_length=1, description="model folder or Hugging Face id")
    served_model_name: str | None = Field(
        None, min_length=1, max_length=256, description="name that clients see (default: the model's)"
    )
    host: str = Field("127.0.0.1", description="address to listen on for gRPC")
    port: Port = Field(50051, description="gRPC port; 0: any free one")
    metrics_host: str = Field("127.0.0.1", description="address to listen on for Prometheus")
    metrics_port: Port = Field(9091, description="Prometheus port; 0: any free one")
    vllm_compat_host: str = Field("127.0.0.1", description="address to listen on for gateways, see --vllm-compat-port")
    vllm_compat_port: Port | None = Field(
        None,
        description="gRPC port that speaks vllm.grpc.engine.VllmEngine, for gateways; 0: any free one (default: off)",
    )
    tls_cert_file: Path | None = Field(
        None, description="PEM certificate chain of the gRPC ports; with --tls-key-file turns TLS on"
    )
    tls_key_file: Path | None = Field(None, description="PEM key of that certificate; both are read again on change")
    tls_client_ca_file: Path | None = Field(
        None, description="PEM certificates; clients must show one that was signed by them (mTLS)"
    )
    device: Literal["cpu", "cuda", "auto"] = Field("auto", description="cpu, cuda or auto (cuda where there is one)")
    dtype: DtypeName = Field(
        "auto", description="auto (the checkpoint's), float32, bfloat16 or float16: of weights and KV cache"
    )
    backend: str = Field(
        "auto",
        min_length=1,
        description="auto, cpu (compiled kernels), cuda (paged kernels, graphs) or torch (plain, the reference)",
    )
    simulate: str | None = Field(
        None,
        min_length=1,
        description="file of a step model: compute nothing, take the time that it says and answer with tokens drawn at "
        "random; for tests of routing, overload and capacity (default: off)",
    )
    weight_format: WeightFormatName = Field(
        "plain",
        description="plain, or int8 or int4: weight-only, faster for a few requests at a time, lossy",
    )
    measure_weight_error: bool = Field(
        True,
        description="measure at the start what lossy weights do to the logits; takes the time and, for a moment, the "
        "memory of loading the model once more",
    )
    block_size: int | None = Field(
        None, ge=1, le=1024, description="token positions per KV block (default: the backend's choice)"
    )
    num_blocks: int | None = Field(None, ge=1, description="KV blocks, instead of a memory budget")
    kv_cache_memory: Bytes | None = Field(
        None, ge=0, description="bytes for the KV cache, as 512MiB or 1GiB (default on CPU: 1GiB)"
    )
    kv_cache_fraction: float | None = Field(
        None, gt=0, le=1, description="fraction of the free memory for the KV cache (default on CUDA: 0.9)"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest prompt + completion, tokens (default: the model's context)"
    )
    step_token_budget: int = Field(512, ge=1, le=1_048_576, description="tokens computed in one step at most")
    prefill_chunk_size: int | None = Field(
        None,
        ge=1,
        description="prompt tokens of one request in a step at most (default: the step's budget)",
    )
    prefill_per_decode: int | None = Field(
        None,
        ge=0,
        le=1_048_576,
        description="prompt tokens that a step may carry for each decode in it, 24 at least; 0: no such bound "
        "(default: the backend's choice, 4 on CPU)",
    )
    max_num_requests: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="requests that run at the same time (default: 256, or a smaller step's budget)",
    )
    max_waiting_requests: int = Field(
        2048,
        ge=1,
        le=1_000_000,
        description="requests that may wait; more are refused (RESOURCE_EXHAUSTED)",
    )
    max_waiting_tokens: int = Field(4_000_000, ge=1, description="prompt tokens that may wait")
    default_sampling: DefaultSamplingName = Field(
        "model",
        description="what fields of sampling mean that a request leaves unset: model (its generation_config.json, "
        "neutral where that is silent) or neutral (temperature 1, nothing cut off, nothing penalised)",
    )
    prefix_cache: bool = Field(True, description="reuse the KV cache of common prompt prefixes")
    speculation: SpeculationName = Field(
        "auto",
        description="off, or prompt-lookup: decodes verify tokens guessed from earlier in their own text, where that "
        "pays; the text stays the same. auto: prompt-lookup where that is certain to the last bit (the compiled CPU "
        "kernels) and there is no overlap",
    )
    max_draft_tokens: int = Field(16, ge=1, le=64, description="guessed tokens of a request in a step at most")
    lora: tuple[str, ...] = Field(
        (), description="NAME=FOLDER: a LoRA adapter (PEFT format) that requests may name from the start on"
    )
    lora_dir: Path | None = Field(
        None, description="folder whose folders are LoRA adapters that can be loaded by name while the engine runs"
    )
    max_loras: int = Field(
        8, ge=1, le=256, description="LoRA adapters in memory at once; of more, those not in use are read again"
    )
    max_lora_rank: int = Field(64, ge=1, le=1024, description="rank of a LoRA adapter at most")
    allow_lora_rpc: bool = Field(
        False, description="let whoever reaches the gRPC port load adapters from --lora-dir, and unload adapters"
    )
    overlap: bool = Field(False, description="plan the next step while the device computes this one")
    check_invariants: bool = Field(
        False,
        description="check all blocks, queues and counters after each step and end the engine when they disagree; "
        "slow, for soak tests",
    )
    threads: int = Field(0, ge=0, le=1024, description="compute threads on CPU; 0: automatic")
    tensor_parallel_size: int = Field(
        1, ge=1, le=64, description="processes that share the model, one per GPU; on CPU they share --threads"
    )
    cuda_graph_requests: int = Field(
        512, ge=0, le=1024, description="decode steps of so many requests at most run as CUDA graphs; 0: none"
    )
    cuda_compile: bool = Field(
        False,
        description="on CUDA: compile what lies between the products of matrices (Llama, Mistral, Qwen2, Qwen3); "
        "faster steps, a start that takes a minute longer",
    )
    batch_invariant: bool = Field(
        False,
        description="on CUDA: decode steps are padded to --max-num-requests rows and keys are never split, so that an "
        "answer does not depend on how many others are decoded; slower for a few requests",
    )
    drain_timeout: float = Field(30.0, ge=0, le=86_400, description="seconds that running work may take after SIGTERM")
    allow_drain_rpc: bool = Field(
        False, description="let whoever reaches the gRPC port drain the service (best with --tls-client-ca-file)"
    )
    step_recorder_steps: int = Field(
        256, ge=0, le=100_000, description="engine steps that are kept, to be looked at in a trace viewer; 0: none"
    )
    allow_step_dump_rpc: bool = Field(
        False, description="let whoever reaches the gRPC port fetch the recorded steps: request ids, no tokens"
    )
    step_dump_folder: Path | None = Field(
        None,
        description="folder for the recorded steps when the engine fails or hangs, 20 files at most (default: off)",
    )
    stalled_step_timeout: float = Field(
        10.0,
        gt=0,
        le=86_400,
        description="seconds without a finished step, while there is work, until health of loop is NOT_SERVING",
    )
    hung_step_timeout: float = Field(
        120.0,
        ge=0,
        le=86_400,
        description="seconds without a finished step, while there is work, until the engine is killed; 0: never",
    )
    restart_engine: bool = Field(
        False, description="start a fresh engine process when it dies, instead of exiting non-zero"
    )
    max_request_bytes: Bytes = Field(
        DEFAULT_MAX_REQUEST_BYTES, ge=1024, le=2**31 - 1, description="bytes of one incoming message at most"
    )
    max_unread_tokens: int = Field(
        65_536, ge=1, description="tokens a slow reader may leave unread before its request is cancelled"
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
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="debug, info, warning or error")
    log_format: LogFormat = Field("auto", description="auto (JSON unless on a terminal), json or console")

    @field_validator("host", "metrics_host", "vllm_compat_host")
    @classmethod
    def _host_is_given(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("an address is needed, as 127.0.0.1 or 0.0.0.0")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        check_together(self)
        return self

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def traces(self) -> TraceOptions:
        return TraceOptions(self.otlp_endpoint, self.trace_sample_ratio)

    @property
    def tls(self) -> ServerTlsFiles | None:
        return server_files(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)
