"""From a checkpoint folder to a fused decoder, where its model is of a family that there is one for.

Must not know: the KV pool, kernels, requests.
"""

from collections.abc import Mapping
from typing import Any

import torch

from engine_service.worker.backend import ModelFacts
from engine_service.worker.checkpoint import (
    check_files,
    max_positions,
    read_config,
    read_eos_token_ids,
    refuse_keys,
)
from engine_service.worker.config import ModelDtype, WorkerConfig
from engine_service.worker.cuda.fused_model import FusedDecoder
from engine_service.worker.cuda.pieces import Pieces
from engine_service.worker.kernels.decoder_shape import DecoderShape, Unsupported, decoder_shape, rotary_tables
from engine_service.worker.plain_config import read_plain_config
from engine_service.worker.quantized.checkpoint import open_checkpoint

_DTYPES = {ModelDtype.FLOAT32: torch.float32, ModelDtype.BFLOAT16: torch.bfloat16, ModelDtype.FLOAT16: torch.float16}
# Tensors that some checkpoints carry although they follow from the configuration.
_DERIVED = ("rotary_emb.inv_freq",)


def load_fused(
    config: WorkerConfig, device: torch.device, pieces: Pieces
) -> tuple[FusedDecoder, ModelFacts] | Unsupported:
    """ValueError, with the reason, for a checkpoint that cannot be served; Unsupported for one that others can."""
    folder = config.model_folder
    check_files(folder)
    model_config = read_plain_config(folder) or read_config(folder)
    shape = decoder_shape(model_config)
    if isinstance(shape, Unsupported):
        return shape
    facts = ModelFacts(
        vocab_size=shape.vocabulary,
        max_model_len=max_positions(model_config),
        eos_token_ids=read_eos_token_ids(folder, model_config),
        architecture=(model_config.architectures or [model_config.model_type])[0],
        dtype=_DTYPES.get(config.dtype, model_config.dtype or torch.float32),
    )
    checkpoint = open_checkpoint(folder, facts.dtype)
    try:
        decoder = fused_decoder(checkpoint, model_config, shape, facts, device, pieces)
    except KeyError as missing:
        refuse_keys("missing", [str(missing.args[0])])
        raise
    unread = [name for name in checkpoint.never_read if not name.endswith(_DERIVED)]
    refuse_keys("unexpected", [name for name in unread if not (shape.tied_head and name == "lm_head.weight")])
    return decoder, facts


def fused_decoder(
    weights: Mapping[str, torch.Tensor],
    model_config: Any,
    shape: DecoderShape,
    facts: ModelFacts,
    device: torch.device,
    pieces: Pieces,
) -> FusedDecoder:
    """Of weights by the names that transformers gives, with rotations for every position of the model's context."""
    rotary = rotary_tables(model_config, facts.max_model_len)
    with torch.inference_mode():
        return FusedDecoder(weights, shape, rotary, facts.dtype, device, pieces)
