"""The CPU backend: the C++ kernels, whole models of the Llama family in one call a step, others by attention alone.

Must not know: requests, plans, how a token is drawn.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch

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
from engine_service.worker.kernels.cpu_model import (
    GROUP_SLOTS,
    CpuModel,
    PoolSize,
    StepBatch,
    kv_bytes_per_block,
    weight_format_refusal,
)
from engine_service.worker.kernels.decoder_shape import DecoderShape, Unsupported, decoder_shape, rotary_tables
from engine_service.worker.kernels.fused_adapter import fuse_adapter, linear_shapes
from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam
from engine_service.worker.kernels.row_draw import KernelDraw
from engine_service.worker.lora.adapter import Adapter, LinearShapes
from engine_service.worker.plain_config import read_plain_config
from engine_service.worker.transfer import DirectTransfer, Transfer
from engine_service.worker.weight_error import NUM_TOKENS, POOL, measure_error

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
    return FusedModel(facts, model_config, shape, Checkpoint(config.model_folder), team, config.weight_format)


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A checkpoint of the Llama family whose weights are packed when the size of the pool is known."""

    facts: ModelFacts
    config: Any
    shape: DecoderShape
    checkpoint: Checkpoint
    team: ThreadTeam
    weight_format: WeightFormat
    name = "cpu"
    device = torch.device("cpu")
    default_block_size = GROUP_SLOTS
    prefill_per_decode = CPU_PREFILL_PER_DECODE

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
        model = self._pack(PoolSize(num_blocks, block_size), max_model_len, self.weight_format)
        if self.weight_format is not WeightFormat.PLAIN:
            self._report_error(model)
        unread = [name for name in self.checkpoint.never_read if not name.endswith(_DERIVED)]
        refuse_keys("unexpected", [name for name in unread if not (self.shape.tied_head and name == "lm_head.weight")])
        return FusedRunner(model, self.team, self.facts.dtype)

    def _pack(self, pool: PoolSize, positions: int, weight_format: WeightFormat) -> CpuModel:
        rotary = rotary_tables(self.config, positions)
        try:
            return CpuModel(self.checkpoint, self.shape, rotary, pool, self.facts.dtype, self.team, weight_format)
        except KeyError as missing:
            refuse_keys("missing", [str(missing.args[0])])
            raise

    def _report_error(self, packed: CpuModel) -> None:
        """Says in the log what the lossy format does to this model's logits. `packed` has served nothing yet."""
        plain = self._pack(POOL, NUM_TOKENS, WeightFormat.PLAIN)
        error = measure_error(plain, packed, first_token=self.config.bos_token_id or 0)
        plain.close()
        _LOG.warning(
            "weights kept as %s: logits differ by %.4f (relative to %s); same best token at %.1f %% of %d positions",
            *(self.weight_format.value, error.relative, self.facts.dtype, 100 * error.same_best, NUM_TOKENS),
        )


class FusedRunner:
    """One call of the C++ decoder a step."""

    def __init__(self, model: CpuModel, team: ThreadTeam, dtype: torch.dtype) -> None:
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
