"""The CUDA backend: paged attention by the best kernel that this device and this torch have, decodes as graphs.

It also runs on a CPU, with the reference in the kernels' place and graphs that are rehearsed: that is how it is tested
where there is no device. Must not know: requests, plans, how a token is drawn.
"""

import logging
from dataclasses import dataclass

import torch

from engine_service.core.weight_report import WeightReport
from engine_service.worker.attention import KvGeometry
from engine_service.worker.backend import LoadedModel, ModelFacts, ModelRunner
from engine_service.worker.config import CudaOptions, Device, WorkerConfig
from engine_service.worker.cpu_facts import CPU_PREFILL_PER_DECODE, num_threads
from engine_service.worker.cuda.attention import PagedAttention
from engine_service.worker.cuda.choice import Choice, candidates, choose_kernel
from engine_service.worker.cuda.fused_loader import LoadedDecoder, load_fused
from engine_service.worker.cuda.graph_capture import recorder_for
from engine_service.worker.cuda.graph_sizes import graph_sizes
from engine_service.worker.cuda.pieces import compiled_pieces, plain_pieces, torch_compiler
from engine_service.worker.cuda.pinned import PinnedTransfer
from engine_service.worker.cuda.profiling import CudaMeter, LargestStep, bytes_beside_pool, measure_peak
from engine_service.worker.cuda.runner import CudaRunner, GraphPlan
from engine_service.worker.cuda.self_test import find_fault
from engine_service.worker.cuda.static_step import StaticStep
from engine_service.worker.cuda.varlen import GATHERED_TOKENS
from engine_service.worker.kernels.decoder_shape import Unsupported
from engine_service.worker.kv_storage import kv_bytes_per_block
from engine_service.worker.lora.adapter import LinearShapes
from engine_service.worker.model_loader import TransformersModel, load_model
from engine_service.worker.paged_model import StepModel
from engine_service.worker.torch_attention import TorchAttentionKind
from engine_service.worker.torch_backend import GenericModel, torch_device
from engine_service.worker.transfer import Transfer

_LOG = logging.getLogger(__name__)


class CudaBackend:
    """Falls back to plain torch, saying why, for models that no kernel attends in."""

    devices = frozenset({Device.CUDA, Device.CPU})

    def load(self, config: WorkerConfig) -> LoadedModel:
        torch.set_num_threads(num_threads(config.threads))
        device = torch_device(config.device)
        fused = _load_fused(config, device)
        if not isinstance(fused, Unsupported):
            return serve(fused.model, fused.facts, config, device, fused.weights)
        config.require_plain_weights(fused.reason)
        _LOG.warning("%s: transformers' layers compute", fused.reason)
        model = load_model(config.model_folder, config.dtype, device, config.max_model_len)
        return serve(model.paged, model.facts, config, device)


def _load_fused(config: WorkerConfig, device: torch.device) -> LoadedDecoder | Unsupported:
    if config.max_loras:
        return Unsupported(f"max_loras is {config.max_loras}, and LoRA adapters change layers one by one")
    return load_fused(config, device, compiled_pieces(torch_compiler) if config.cuda.compile else plain_pieces())


def serve(
    model: StepModel,
    facts: ModelFacts,
    config: WorkerConfig,
    device: torch.device,
    weights: WeightReport | None = None,
) -> LoadedModel:
    """Choose the attention of a model that lies on the device. `weights`: how it has them, if they are packed."""
    layers, dtype = model.layers, facts.dtype
    kernels = candidates(device, batch_invariant=config.cuda.batch_invariant)
    choice = choose_kernel(kernels, layers, dtype, device, config.block_size, find_fault)
    passed_over = choice.passed_over if isinstance(choice, Choice) else choice
    for passed in passed_over:
        _LOG.warning("attention is not by %s: %s", passed.kernel, passed.reason)
    if isinstance(choice, Choice):
        bounds = StepBounds(config.max_num_requests, config.step_token_budget)
        return CudaModel(model, facts, device, choice, config.cuda, bounds, weights)
    _LOG.warning("attention in plain torch, many times slower")
    return GenericModel("torch", TransformersModel(model, facts), TorchAttentionKind(), device, weights)


@dataclass(frozen=True, slots=True)
class StepBounds:
    """What the scheduler promises of every step."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CudaModel:
    """A model on its device, and the kernel that will attend for it."""

    model: StepModel
    facts: ModelFacts
    device: torch.device
    choice: Choice
    options: CudaOptions
    bounds: StepBounds
    weights: WeightReport | None = None
    name = "cuda"
    rows_are_independent = False
    row_draw = None

    def __post_init__(self) -> None:
        """ValueError for a promise that cannot be kept."""
        if self.options.batch_invariant and self.bounds.requests > max(self._graph_sizes(), default=0):
            raise ValueError(
                f"batch_invariant needs graphs for all of max_num_requests {self.bounds.requests:,}, but attention by "
                f"{self.choice.kernel.name} has them for {max(self._graph_sizes(), default=0):,}"
            )

    @property
    def default_block_size(self) -> int:
        return self.choice.pages.block_size

    @property
    def prefill_per_decode(self) -> int:
        return CPU_PREFILL_PER_DECODE if self.device.type == "cpu" else 0

    def block_bytes(self, block_size: int) -> int:
        return kv_bytes_per_block(self._geometry())

    def reserved_bytes(self, block_size: int) -> int:
        if self.device.type != "cuda":
            return 0
        step = LargestStep(self.bounds.tokens, min(self.bounds.requests, self.bounds.tokens))
        peak = measure_peak(self.model, self.device, step, CudaMeter(self.device))
        layer_bytes = self.block_bytes(block_size) // len(self.model.layers)
        gathered = 0 if self.choice.kernel.is_static else GATHERED_TOKENS // block_size * layer_bytes
        reserved = bytes_beside_pool(
            peak, self.facts.vocab_size, len(self._graph_sizes()), self.block_bytes(block_size), gathered
        )
        _LOG.info("a step of %d tokens takes %d bytes; %d are kept from the KV pool", step.tokens, peak, reserved)
        return reserved

    def linear_shapes(self) -> LinearShapes:
        if self.options.batch_invariant:
            raise ValueError("batch_invariant cannot be kept beside LoRA adapters: their steps are not padded")
        return self.model.find_linears()

    def transfer(self) -> Transfer:
        return PinnedTransfer(self.device, max(self.bounds.requests, self.bounds.tokens))

    def build(self, block_size: int, num_blocks: int, max_model_len: int) -> ModelRunner:
        # The last block is the runner's own: the scheduler knows of `num_blocks`.
        attention = PagedAttention(self.choice.kernel, self._geometry(), self.choice.pages, num_blocks + 1)
        sizes = self._graph_sizes()
        plan = None
        if sizes:
            width = -(-max_model_len // block_size)
            static = StaticStep(sizes[-1], width, block_size, num_blocks, self.device)
            plan = GraphPlan(sizes, static, recorder_for(self.device), max_model_len)
        _LOG.info("attention by %s, %d decode graphs", self.choice.kernel.name, len(sizes))
        return CudaRunner(self.model, attention, plan, self.weights)

    def _geometry(self) -> KvGeometry:
        return KvGeometry(self.model.layers, self.choice.pages.block_size, self.facts.dtype, self.device)

    def _graph_sizes(self) -> tuple[int, ...]:
        if not self.choice.kernel.is_static:
            return ()
        options = self.options
        return graph_sizes(self.bounds.requests, options.graph_requests, only_largest=options.batch_invariant)
