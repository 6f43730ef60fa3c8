"""The interface between the worker and what computes: a backend loads a model and runs steps of it.

A backend owns everything that is particular to a device: the layout of the KV pool, the block size it likes,
packed weights, threads, graphs. The worker only passes it flattened steps and gets logits back.
Must not know: any device, requests, plans, how a token is drawn.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine_service.core.weight_report import WeightReport
from engine_service.worker.attention import BlockCopies
from engine_service.worker.config import Device, WorkerConfig
from engine_service.worker.input_batch import StepInput
from engine_service.worker.lora.adapter import Adapter, LinearShapes
from engine_service.worker.row_draw import RowDraw
from engine_service.worker.transfer import Transfer


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a checkpoint says of its model. `max_model_len`: positions it was made for."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    architecture: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Of the R rows that sample: logits [R, vocabulary], and, where the backend finds it on the way, `best`
    int64 [R], the lowest id of the largest logit, or -1 for a row that is not finite.

    `logits` may be None when only the best was asked for. Views, valid until the backend's next step.
    """

    logits: torch.Tensor | None
    best: torch.Tensor | None


class ModelRunner(Protocol):
    """A loaded model with its KV pool; one step at a time."""

    @property
    def weights(self) -> WeightReport | None:
        """How the weights are kept, where the runner knows."""
        ...

    def run(self, step: StepInput, *, best_only: bool) -> StepLogits:
        """Compute the step's tokens and store their KV. `best_only`: a backend that fills `best` may leave the
        logits out."""
        ...

    def copy_blocks(self, pairs: BlockCopies) -> None:
        """Copy whole KV blocks, all layers; the next step sees the copies."""
        ...

    def install_adapter(self, number: int, adapter: Adapter) -> None:
        """Steps may name the adapter by this number, which none has now; 1 or more."""
        ...

    def drop_adapter(self, number: int) -> None:
        """No step names the adapter any more. Nothing happens for a number that is not installed."""
        ...

    def close(self) -> None:
        """Free weights, pool and threads; no step may follow."""
        ...


class LoadedModel(Protocol):
    """A checkpoint that has been read, before it is known how large its KV pool will be."""

    @property
    def name(self) -> str:
        """What will run it, for the log: "cpu", "torch", ..."""
        ...

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def default_block_size(self) -> int: ...

    @property
    def prefill_per_decode(self) -> int:
        """Prompt tokens that may share a step with each decode; 0: any number. Where decoding is bound by memory,
        prompt tokens beside it are nearly free; where it is bound by arithmetic, each one makes the step longer."""
        ...

    @property
    def rows_are_independent(self) -> bool:
        """Whether the numbers of a step's row are the same, to the last bit, whatever other rows the step has."""
        ...

    @property
    def row_draw(self) -> RowDraw | None:
        """What draws tokens from its logits faster than torch, if there is such a thing."""
        ...

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one KV block over all layers. ValueError for a block size that cannot be."""
        ...

    def reserved_bytes(self, block_size: int) -> int:
        """Bytes that steps need beside the pool and that are not taken yet; 0 where that is not measured."""
        ...

    def linear_shapes(self) -> LinearShapes:
        """The layers that adapters may change. ValueError where the backend serves none."""
        ...

    def transfer(self) -> Transfer:
        """What brings a step's numbers to the device and its tokens back."""
        ...

    def build(self, block_size: int, num_blocks: int, max_model_len: int) -> ModelRunner:
        """Allocate the pool and make ready to run."""
        ...


class Backend(Protocol):
    """A registered kind of backend."""

    @property
    def devices(self) -> frozenset[Device]: ...

    def load(self, config: WorkerConfig) -> LoadedModel:
        """Read the checkpoint. ValueError, with the reason, for one that cannot be served."""
        ...
