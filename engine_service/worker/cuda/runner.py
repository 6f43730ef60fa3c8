"""Runs steps of a model with its KV pool: decodes by graphs, everything else kernel by kernel.

Must not know: how a graph is recorded, which kernel attends, requests.
"""

from dataclasses import dataclass

import torch

from engine_service.core.weight_report import WeightReport
from engine_service.worker.attention import BlockCopies
from engine_service.worker.backend import StepLogits
from engine_service.worker.cuda.attention import PagedAttention
from engine_service.worker.cuda.decode_graphs import DecodeGraphs
from engine_service.worker.cuda.graph_capture import Recorder
from engine_service.worker.cuda.static_step import StaticStep
from engine_service.worker.input_batch import StepInput
from engine_service.worker.lora.adapter import Adapter
from engine_service.worker.paged_model import StepContext, StepModel


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """The padded numbers of decodes that get a graph, and what graphs are made of. No request exceeds `max_keys`."""

    sizes: tuple[int, ...]
    static: StaticStep
    recorder: Recorder
    max_keys: int


class CudaRunner:
    """One forward pass a step. Without a `plan` there are no graphs."""

    def __init__(
        self,
        model: StepModel,
        attention: PagedAttention,
        plan: GraphPlan | None,
        weights: WeightReport | None = None,
    ) -> None:
        self.weights: WeightReport | None = weights
        self._model = model
        self._attention = attention
        self._graphs = None if plan is None else _record(model, attention, plan)

    def run(self, step: StepInput, *, best_only: bool) -> StepLogits:
        # A graph was recorded without adapters: rows that have one are computed kernel by kernel.
        graphs = self._graphs if step.adapters is None else None
        if graphs is not None and (output := graphs.run(step)) is not None:
            return output
        context = StepContext(self._attention, self._attention.prepare(step.layout))
        inputs = step.input_ids, step.positions, step.sample_rows
        return StepLogits(*with_best(self._model.forward(*inputs, context, step.adapters)))

    def copy_blocks(self, pairs: BlockCopies) -> None:
        self._attention.copy_blocks(pairs)

    def install_adapter(self, number: int, adapter: Adapter) -> None:
        self._model.adapters.install(number, adapter)

    def drop_adapter(self, number: int) -> None:
        self._model.adapters.drop(number)

    def close(self) -> None:
        """Graphs hold memory of the pool; all of it goes with the runner."""
        self._graphs = None


def _record(model: StepModel, attention: PagedAttention, plan: GraphPlan) -> DecodeGraphs:
    def decode(size: int) -> tuple[torch.Tensor, ...]:
        step = attention.prepare_static(plan.static.layout(size), plan.max_keys)
        return with_best(model.forward(*plan.static.inputs(size), StepContext(attention, step)))

    with torch.inference_mode():
        return DecodeGraphs(plan.sizes, plan.static, decode, plan.recorder)


def with_best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [R, vocabulary], and the lowest id of the largest of each row, -1 where it is not finite."""
    if logits.shape[0] == 0:
        return logits, torch.empty(0, dtype=torch.int64, device=logits.device)
    values, ids = logits.max(dim=-1)
    return logits, torch.where(torch.isfinite(values), ids, -1)
