"""What a worker is built from, and what it turned out to be: two frozen objects.

Must not know: the environment, gRPC, the scheduler.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from engine_service.core.weight_report import WeightReport


class ModelDtype(Enum):
    """Arithmetic of the model and of its KV cache; `AUTO` is the checkpoint's own."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class WeightFormat(Enum):
    """How weights are kept. INT4: groups of 32 with a scale and a minimum; INT8: a scale for each output, or for groups
    where a checkpoint has them. Both are for small batches, and lossy."""

    PLAIN = "plain"
    INT4 = "int4"
    INT8 = "int8"


class Device(Enum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Of the cuda backend alone. `graph_requests`: decode steps of so many requests at most are recorded as graphs, 0:
    none. `batch_invariant`: decodes always have the same number of rows, and keys are never split. `compile`: what a
    fused decoder computes between its products is compiled by torch.
    """

    graph_requests: int = 512
    batch_invariant: bool = False
    compile: bool = False


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What was asked for. `None` leaves the choice to the worker; sizes of memory are in bytes.

    The KV pool is sized by the first of `num_blocks`, `kv_cache_memory` and `kv_cache_fraction` that is
    given (the fraction is of the memory that is free once the model is loaded). `max_num_requests` and
    `step_token_budget` bound one plan. `threads` 0 is automatic. `backend` is "auto" or a name
    of the registry. At most `max_loras` LoRA adapters are in memory, of rank `max_lora_rank` at most; 0: none is
    served. With `measure_weight_error` what lossy weights do to the logits is measured at the start.
    `tensor_parallel_size` ranks share the model; memory is that of each rank, `threads` of all.
    """

    model_folder: Path
    dtype: ModelDtype = ModelDtype.AUTO
    device: Device = Device.CPU
    backend: str = "auto"
    block_size: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_fraction: float = 0.5
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_requests: int = 64
    step_token_budget: int = 512
    threads: int = 0
    weight_format: WeightFormat = WeightFormat.PLAIN
    tensor_parallel_size: int = 1
    cuda: CudaOptions = CudaOptions()
    max_loras: int = 0
    max_lora_rank: int = 64
    measure_weight_error: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError with field and number for a setting out of range."""
        for field in (
            "block_size",
            "num_blocks",
            "max_model_len",
            "max_num_requests",
            "step_token_budget",
            "tensor_parallel_size",
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, not {value}")
        if not 0.0 < self.kv_cache_fraction <= 1.0:
            raise ValueError(f"kv_cache_fraction must be in (0, 1], not {self.kv_cache_fraction}")
        if self.kv_cache_memory is not None and self.kv_cache_memory < 0:
            raise ValueError(f"kv_cache_memory must not be negative, but is {self.kv_cache_memory}")
        if self.threads < 0:
            raise ValueError(f"threads must not be negative, but is {self.threads}")

    def require_plain_weights(self, reason: str) -> None:
        """ValueError with `reason` if a lossy weight format was asked for."""
        if self.weight_format is not WeightFormat.PLAIN:
            raise ValueError(f"weight_format {self.weight_format.value} cannot be served: {reason}")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What was resolved at the start; true for the worker's whole life.

    `prefill_per_decode`: prompt tokens that may share a step with each decode before they slow it down much (0: any
    number). `max_model_len` may be lower than the model's own limit when the KV pool cannot hold that many tokens.
    `rows_are_independent`: what other rows a step has changes no bit of a row.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    dtype: str
    backend: str
    block_size: int
    num_blocks: int
    kv_bytes_per_block: int
    prefill_per_decode: int
    weights: WeightReport | None = None
    rows_are_independent: bool = False
