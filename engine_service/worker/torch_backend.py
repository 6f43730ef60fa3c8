"""The plain backend: any model as transformers writes it, paged attention in plain torch. The reference.

Must not know: requests, plans, how a token is drawn.
"""

from dataclasses import dataclass

import torch

from engine_service.core.weight_report import WeightReport
from engine_service.worker.attention import AttentionBackend, AttentionKind, BlockCopies, KvGeometry
from engine_service.worker.backend import LoadedModel, ModelFacts, ModelRunner, StepLogits
from engine_service.worker.config import Device, WorkerConfig
from engine_service.worker.cpu_facts import CPU_PREFILL_PER_DECODE, num_threads
from engine_service.worker.input_batch import StepInput
from engine_service.worker.lora.adapter import Adapter, LinearShapes
from engine_service.worker.model_loader import TransformersModel, load_model
from engine_service.worker.paged_model import StepContext, StepModel
from engine_service.worker.torch_attention import TorchAttentionKind
from engine_service.worker.transfer import DirectTransfer, Transfer


class TorchBackend:
    """Runs wherever torch does."""

    devices = frozenset({Device.CPU, Device.CUDA})

    def load(self, config: WorkerConfig) -> LoadedModel:
        config.require_plain_weights("the torch backend keeps weights as they are")
        torch.set_num_threads(num_threads(config.threads, config.tensor_parallel_size))
        device = torch_device(config.device)
        model = load_model(config.model_folder, config.dtype, device, config.max_model_len, config.tensor_parallel_size)
        return GenericModel("torch", model, TorchAttentionKind(), device)


@dataclass(frozen=True, slots=True)
class GenericModel:
    """A transformers model and the attention it will use."""

    name: str
    model: TransformersModel
    attention: AttentionKind
    device: torch.device
    weights: WeightReport | None = None
    row_draw = None
    rows_are_independent = False

    @property
    def facts(self) -> ModelFacts:
        return self.model.facts

    @property
    def default_block_size(self) -> int:
        return self.attention.default_block_size

    @property
    def prefill_per_decode(self) -> int:
        return CPU_PREFILL_PER_DECODE if self.device.type == "cpu" else 0

    def block_bytes(self, block_size: int) -> int:
        geometry = self._geometry(block_size)
        self.attention.check(geometry)
        return self.attention.block_bytes(geometry)

    def reserved_bytes(self, block_size: int) -> int:
        return 0

    def linear_shapes(self) -> LinearShapes:
        return self.model.paged.find_linears()

    def transfer(self) -> Transfer:
        return DirectTransfer(self.device)

    def build(self, block_size: int, num_blocks: int, max_model_len: int) -> ModelRunner:
        attention = self.attention.build(self._geometry(block_size), num_blocks)
        return GenericRunner(self.model.paged, attention, self.weights)

    def _geometry(self, block_size: int) -> KvGeometry:
        return KvGeometry(self.model.paged.layers, block_size, self.facts.dtype, self.device)


class GenericRunner:
    """One forward pass of the transformers model a step."""

    def __init__(self, model: StepModel, attention: AttentionBackend, weights: WeightReport | None = None) -> None:
        self.weights: WeightReport | None = weights
        self._model = model
        self._attention = attention

    def run(self, step: StepInput, *, best_only: bool) -> StepLogits:
        context = StepContext(self._attention, self._attention.prepare(step.layout))
        inputs = step.input_ids, step.positions, step.sample_rows
        return StepLogits(self._model.forward(*inputs, context, step.adapters), None)

    def copy_blocks(self, pairs: BlockCopies) -> None:
        self._attention.copy_blocks(pairs)

    def install_adapter(self, number: int, adapter: Adapter) -> None:
        self._model.adapters.install(number, adapter)

    def drop_adapter(self, number: int) -> None:
        self._model.adapters.drop(number)

    def close(self) -> None:
        """Memory goes when the runner does."""


def torch_device(device: Device) -> torch.device:
    """ValueError, in words, for a device that this machine or this torch does not have."""
    if device is Device.CUDA and not torch.cuda.is_available():
        raise ValueError("device is cuda, but this torch finds no CUDA device")
    return torch.device(device.value)
