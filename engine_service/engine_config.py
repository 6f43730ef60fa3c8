"""The engine process's part of the settings: model, KV pool, bounds of a step and of the queue, log.

Must not know: torch, gRPC, how the settings are used.
"""

from dataclasses import dataclass
from pathlib import Path

from engine_service.config import (
    DefaultSamplingName,
    DeviceChoice,
    DtypeName,
    EngineSettings,
    SpeculationName,
    WeightFormatName,
)
from engine_service.lora_options import named_adapters
from service_runtime.logs import LogFormat

DEFAULT_MAX_NUM_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model and how it runs. `max_model_len` None: the model's own context."""

    reference: str
    device: DeviceChoice
    dtype: DtypeName
    backend: str
    weight_format: WeightFormatName
    max_model_len: int | None
    threads: int
    default_sampling: DefaultSamplingName = "model"
    simulate: str | None = None
    tensor_parallel_size: int = 1
    cuda_graph_requests: int = 512
    batch_invariant: bool = False
    cuda_compile: bool = False
    measure_weight_error: bool = True


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Size of the KV pool: at most one of the three is given; none means the device's default."""

    block_size: int | None
    num_blocks: int | None
    memory_bytes: int | None
    memory_fraction: float | None
    prefix_cache: bool


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """Bounds of one step (tokens) and of the queue. `prefill_per_decode` None: the backend's choice."""

    step_token_budget: int
    prefill_chunk_size: int
    prefill_per_decode: int | None
    max_num_requests: int
    max_waiting_requests: int
    max_waiting_tokens: int
    overlap: bool
    check_invariants: bool = False
    speculation: SpeculationName = "off"
    max_draft_tokens: int = 0

    def draft_tokens(self, rows_are_independent: bool) -> int:
        """Guessed tokens of a request in a step at most; 0: none. The argument is the worker's."""
        is_certain = rows_are_independent and not self.overlap
        speculates = is_certain if self.speculation == "auto" else self.speculation == "prompt-lookup"
        return self.max_draft_tokens if speculates else 0


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str
    log_format: LogFormat


@dataclass(frozen=True, slots=True)
class RecorderConfig:
    """`steps` are kept, 0: none; `dump_folder` is for them when the engine fails or hangs."""

    steps: int
    dump_folder: Path | None


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """`named`: pairs (name, folder) of the start. `max_resident` are in memory at once; 0: none is served."""

    named: tuple[tuple[str, str], ...] = ()
    max_resident: int = 0
    max_rank: int = 64


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process is built from."""

    model: ModelConfig
    cache: CacheConfig
    scheduling: SchedulingConfig
    log: LogConfig
    recorder: RecorderConfig
    lora: LoraConfig = LoraConfig()


def engine_config(settings: EngineSettings) -> EngineConfig:
    """The engine process's part of the settings."""
    return EngineConfig(
        ModelConfig(
            settings.model,
            DeviceChoice(settings.device),
            settings.dtype,
            settings.backend,
            settings.weight_format,
            settings.max_model_len,
            settings.threads,
            settings.default_sampling,
            settings.simulate,
            settings.tensor_parallel_size,
            settings.cuda_graph_requests,
            settings.batch_invariant,
            settings.cuda_compile,
            settings.measure_weight_error,
        ),
        CacheConfig(
            settings.block_size,
            settings.num_blocks,
            settings.kv_cache_memory,
            settings.kv_cache_fraction,
            settings.prefix_cache,
        ),
        SchedulingConfig(
            settings.step_token_budget,
            settings.prefill_chunk_size or settings.step_token_budget,
            settings.prefill_per_decode,
            settings.max_num_requests or min(DEFAULT_MAX_NUM_REQUESTS, settings.step_token_budget),
            settings.max_waiting_requests,
            settings.max_waiting_tokens,
            settings.overlap,
            settings.check_invariants,
            settings.speculation,
            settings.max_draft_tokens,
        ),
        LogConfig(settings.log_level, settings.log_format),
        RecorderConfig(settings.step_recorder_steps, settings.step_dump_folder),
        _lora_config(settings),
    )


def _lora_config(settings: EngineSettings) -> LoraConfig:
    if not settings.lora and settings.lora_dir is None:
        return LoraConfig()
    return LoraConfig(named_adapters(settings.lora), settings.max_loras, settings.max_lora_rank)
