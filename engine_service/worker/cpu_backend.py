"""The CPU backend: the C++ kernels, whole models of the Llama family in one call a step, others by attention alone.

Must not know: requests, plans, how a token is drawn.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch

from engine_service.worker.backend import LoadedModel, ModelFacts, ModelRunner, StepLogits
from engine_service.worker.checkpoint import (
    Checkpoint,
    max_positions,
    read_config,
    read_eos_token_ids,
    refuse_keys,
)
from engine_service.worker.config import Device, ModelDtype, WorkerConfig
from engine_service.worker.input_batch import StepInput
from engine_service.worker.kernels.build import Unavailable, default_folder, prepare_best_library
from engine_service.worker.kernels.cpu_model import (
    GROUP_SLOTS,
    CpuModel,
    PoolSize,
    StepBatch,
    kv_bytes_per_block,
)
from engine_service.worker.kernels.decoder_shape import DecoderShape, Unsupported, decoder_shape, rotary_tables
from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam
from engine_service.worker.threads import num_threads

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
            _LOG.warning("%s: plain torch computes, several times slower", library.reason)
            return _load_generic(config, None)
        team = ThreadTeam(KernelLibrary(library), threads)
        fused = _read_fused(config, team)
        if isinstance(fused, FusedModel):
            return fused
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
    model_config = read_config(config.model_folder)
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
    return FusedModel(facts, model_config, shape, Checkpoint(config.model_folder), team)


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A checkpoint of the Llama family whose weights are packed when the size of the pool is known."""

    facts: ModelFacts
    config: Any
    shape: DecoderShape
    checkpoint: Checkpoint
    team: ThreadTeam
    name = "cpu"
    device = torch.device("cpu")
    default_block_size = GROUP_SLOTS

    def block_bytes(self, block_size: int) -> int:
        PoolSize(1, block_size)
        return kv_bytes_per_block(self.shape, block_size, self.facts.dtype)

    def build(self, block_size: int, num_blocks: int, max_model_len: int) -> ModelRunner:
        rotary = rotary_tables(self.config, max_model_len)
        pool = PoolSize(num_blocks, block_size)
        try:
            model = CpuModel(self.checkpoint, self.shape, rotary, pool, self.facts.dtype, self.team)
        except KeyError as missing:
            refuse_keys("missing", [str(missing.args[0])])
            raise
        unread = [name for name in self.checkpoint.never_read if not name.endswith(_DERIVED)]
        refuse_keys("unexpected", [name for name in unread if not (self.shape.tied_head and name == "lm_head.weight")])
        return FusedRunner(model, self.team)


class FusedRunner:
    """One call of the C++ decoder a step."""

    def __init__(self, model: CpuModel, team: ThreadTeam) -> None:
        self._model = model
        self._team = team

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
        )
        output = self._model.step(batch, want_logits=not best_only)
        return StepLogits(None if best_only else output.logits, output.best)

    def close(self) -> None:
        self._model.close()
        self._team.close()
