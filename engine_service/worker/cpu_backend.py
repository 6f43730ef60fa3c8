"""The CPU backend: the C++ kernels, whole models of the Llama family in one call a step, others by attention alone.

Must not know: requests, plans, how a token is drawn.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from engine_service.core.weight_report import LogitError, WeightReport
from engine_service.worker.attention import BlockCopies
from engine_service.worker.backend import LoadedModel, ModelFacts, ModelRunner, StepLogits
from engine_service.worker.checkpoint import (
    Checkpoint,
    check_files,
    max_positions,
    read_config,
    read_eos_token_ids,
    refuse_keys,
)
from engine_service.worker.config import Device, ModelDtype, WeightFormat, WorkerConfig
from engine_service.worker.cpu_facts import CPU_PREFILL_PER_DECODE, num_threads
from engine_service.worker.input_batch import StepInput
from engine_service.worker.kernels.build import Unavailable, default_folder, prepare_best_library
from engine_service.worker.kernels.cpu_model import GROUP_SLOTS, CpuModel, PoolSize, kv_bytes_per_block
from engine_service.worker.kernels.decoder_shape import (
    DecoderShape,
    Unsupported,
    decoder_shape,
    num_weights,
    rotary_tables,
)
from engine_service.worker.kernels.fused_adapter import fuse_adapter, linear_shapes
from engine_service.worker.kernels.fused_codes import codes_refusal
from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam
from engine_service.worker.kernels.row_draw import KernelDraw
from engine_service.worker.kernels.step_batch import StepBatch
from engine_service.worker.kernels.weight_formats import weight_format_refusal
from engine_service.worker.logit_error import NUM_TEXTS, TEXT_TOKENS
from engine_service.worker.lora.adapter import Adapter, LinearShapes
from engine_service.worker.memory import free_memory
from engine_service.worker.plain_config import read_plain_config
from engine_service.worker.quantized.checkpoint import QuantizedCheckpoint, open_checkpoint
from engine_service.worker.transfer import DirectTransfer, Transfer
from engine_service.worker.weight_error import POOL, measure_error

_LOG = logging.getLogger(__name__)
_DTYPES = {ModelDtype.FLOAT32: torch.float32, ModelDtype.BFLOAT16: torch.bfloat16, ModelDtype.FLOAT16: torch.float16}
# Tensors that some checkpoints carry although they follow from the configuration.
_DERIVED = ("rotary_emb.inv_freq",)


class CpuBackend:
    """Falls back to torch, saying so once, for models and machines the kernels cannot serve."""

    devices = frozenset({Device.CPU})

    def load(self, config: WorkerConfig) -> LoadedModel:
        threads = num_threads(config.threads)
        torch.set_num_threads(threads)
        library = prepare_best_library(default_folder(), _LOG.warning)
        if isinstance(library, Unavailable):
            config.require_plain_weights(library.reason)
            _LOG.warning("%s: plain torch computes, several times slower", library.reason)
            return _load_generic(config, None)
        team = ThreadTeam(KernelLibrary(library), threads)
        fused = _read_fused(config, team)
        if isinstance(fused, FusedModel):
            return fused
        config.require_plain_weights(fused.reason)
        _LOG.warning("%s: transformers computes it, the kernels do its attention", fused.reason)
        return _load_generic(config, team)


def _load_generic(config: WorkerConfig, team: ThreadTeam | None) -> LoadedModel:
    """A model of another family: transformers' own layers, with the kernels' attention where it fits."""
    # These imports take seconds, which a fused model's start need not pay.
    from engine_service.worker.cpu_attention import CpuAttentionKind
    from engine_service.worker.model_loader import load_model
    from engine_service.worker.torch_attention import TorchAttentionKind
    from engine_service.worker.torch_backend import GenericModel

    cpu = torch.device("cpu")
    model = load_model(config.model_folder, config.dtype, cpu, config.max_model_len)
    if team is None:
        return GenericModel("torch", model, TorchAttentionKind(), cpu)
    kind = CpuAttentionKind(team)
    refusal = kind.refusal(model.paged.layers, model.facts.dtype)
    if refusal is not None:
        _LOG.warning("attention in plain torch: %s", refusal)
        return GenericModel("torch", model, TorchAttentionKind(), cpu)
    return GenericModel("cpu attention", model, kind, cpu)


def _read_fused(config: WorkerConfig, team: ThreadTeam) -> "FusedModel | Unsupported":
    check_files(config.model_folder)
    model_config = read_plain_config(config.model_folder) or read_config(config.model_folder)
    shape = decoder_shape(model_config)
    if isinstance(shape, Unsupported):
        return shape
    dtype = _DTYPES.get(config.dtype, model_config.dtype or torch.float32)
    if dtype not in (torch.float32, torch.bfloat16):
        return Unsupported(f"the kernels do not compute in {dtype}")
    if config.dtype is not ModelDtype.AUTO and model_config.dtype not in (None, dtype):
        _LOG.warning("checkpoint is %s, served as %s because dtype was set", model_config.dtype, dtype)
    facts = ModelFacts(
        vocab_size=shape.vocabulary,
        max_model_len=max_positions(model_config),
        eos_token_ids=read_eos_token_ids(config.model_folder, model_config),
        architecture=(model_config.architectures or [model_config.model_type])[0],
        dtype=dtype,
    )
    reason = weight_format_refusal(shape, dtype, config.weight_format)
    if reason is not None:
        return Unsupported(reason)
    checkpoint = open_checkpoint(config.model_folder, dtype)
    if isinstance(checkpoint, QuantizedCheckpoint) and config.weight_format is not WeightFormat.PLAIN:
        reason = codes_refusal(checkpoint.scheme, shape, config.weight_format)
        if reason is not None:
            return Unsupported(reason)
    return FusedModel(facts, model_config, shape, checkpoint, team, config.weight_format, config.measure_weight_error)


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A checkpoint of the Llama family whose weights are packed when the size of the pool is known."""

    facts: ModelFacts
    config: Any
    shape: DecoderShape
    checkpoint: Checkpoint | QuantizedCheckpoint
    team: ThreadTeam
    weight_format: WeightFormat
    measures_error: bool
    name = "cpu"
    device = torch.device("cpu")
    default_block_size = GROUP_SLOTS
    prefill_per_decode = CPU_PREFILL_PER_DECODE
    rows_are_independent = True

    @property
    def row_draw(self) -> KernelDraw:
        return KernelDraw(self.shape.vocabulary, self.team)

    def block_bytes(self, block_size: int) -> int:
        PoolSize(1, block_size)
        return kv_bytes_per_block(self.shape, block_size, self.facts.dtype)

    def reserved_bytes(self, block_size: int) -> int:
        return 0

    def linear_shapes(self) -> LinearShapes:
        return linear_shapes(self.shape)

    def transfer(self) -> Transfer:
        return DirectTransfer(self.device)

    def build(self, block_size: int, num_blocks: int, max_model_len: int) -> ModelRunner:
        pool = PoolSize(num_blocks, block_size)
        model = self._pack(pool, max_model_len, self.weight_format, self.facts.dtype)
        weights = self._report(model, pool)
        unread = [name for name in self.checkpoint.never_read if not name.endswith(_DERIVED)]
        refuse_keys("unexpected", [name for name in unread if not (self.shape.tied_head and name == "lm_head.weight")])
        return FusedRunner(model, self.team, self.facts.dtype, weights)

    def _pack(self, pool: PoolSize, positions: int, weight_format: WeightFormat, dtype: torch.dtype) -> CpuModel:
        rotary = rotary_tables(self.config, positions)
        source = self.checkpoint
        weights = source.in_dtype(dtype) if isinstance(source, QuantizedCheckpoint) else source
        try:
            return CpuModel(weights, self.shape, rotary, pool, dtype, self.team, weight_format)
        except KeyError as missing:
            refuse_keys("missing", [str(missing.args[0])])
            raise

    def _report(self, packed: CpuModel, pool: PoolSize) -> WeightReport:
        """`packed` has served nothing yet."""
        is_plain = self.weight_format is WeightFormat.PLAIN
        kept = str(self.facts.dtype).removeprefix("torch.") if is_plain else self.weight_format.value
        if not isinstance(self.checkpoint, QuantizedCheckpoint):
            error = None if is_plain else self._measure(packed, pool, self.facts.dtype)
            return WeightReport("plain", kept, error)
        is_exact = is_plain and self.facts.dtype is torch.float32
        error = None if is_exact else self._measure(packed, pool, torch.float32)
        return WeightReport(self.checkpoint.scheme.summary, kept, error)

    def _measure(self, packed: CpuModel, pool: PoolSize, dtype: torch.dtype) -> LogitError | None:
        """Against the same weights in `dtype`. None, and said so, where that is not wanted or takes too much memory."""
        if not self.measures_error:
            return None
        needed, free = num_weights(self.shape) * dtype.itemsize, free_memory(Device.CPU)
        if needed > free or pool.num_blocks < NUM_TEXTS:
            _LOG.warning(
                "the error of the weights is not measured: the reference takes %d bytes of %d that are free, "
                "and %d KV blocks of %d",
                *(needed, free, NUM_TEXTS, pool.num_blocks),
            )
            return None
        reference = self._pack(POOL, TEXT_TOKENS, WeightFormat.PLAIN, dtype)
        error = measure_error(reference, packed, self.config.bos_token_id or 0, pool.block_size)
        reference.close()
        return error


class FusedRunner:
    """One call of the C++ decoder a step."""

    def __init__(self, model: CpuModel, team: ThreadTeam, dtype: torch.dtype, weights: WeightReport) -> None:
        self.weights: WeightReport | None = weights
        self._model = model
        self._team = team
        self._dtype = dtype

    def run(self, step: StepInput, *, best_only: bool) -> StepLogits:
        layout = step.layout
        batch = StepBatch(
            input_ids=step.input_ids,
            positions=step.positions,
            slot_mapping=layout.slot_mapping,
            block_tables=layout.block_tables,
            query_start=layout.query_start,
            seq_lens=layout.seq_lens,
            sample_rows=step.sample_rows,
            adapters=step.adapters,
        )
        output = self._model.step(batch, want_logits=not best_only)
        return StepLogits(None if best_only else output.logits, output.best)

    def copy_blocks(self, pairs: BlockCopies) -> None:
        self._model.copy_blocks(pairs)

    def install_adapter(self, number: int, adapter: Adapter) -> None:
        self._model.install_adapter(number, fuse_adapter(adapter, self._model.shape, self._dtype))

    def drop_adapter(self, number: int) -> None:
        self._model.drop_adapter(number)

    def close(self) -> None:
        self._model.close()
        self._team.close()
