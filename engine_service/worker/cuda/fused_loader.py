"""From a checkpoint folder to a fused decoder, where its model is of a family that there is one for.

Must not know: the KV pool, how matrices are packed, requests.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine_service.core.weight_report import LogitError, WeightReport
from engine_service.worker.backend import ModelFacts
from engine_service.worker.checkpoint import (
    Checkpoint,
    check_files,
    max_positions,
    read_config,
    read_eos_token_ids,
    refuse_keys,
)
from engine_service.worker.config import ModelDtype, WeightFormat, WorkerConfig
from engine_service.worker.cuda.fused_model import FusedDecoder
from engine_service.worker.cuda.linear import MakeLinear, plain_linear
from engine_service.worker.cuda.packed_choice import choose_products
from engine_service.worker.cuda.packed_error import measure_packed_error
from engine_service.worker.cuda.packed_linear import Scratch
from engine_service.worker.cuda.packed_source import GROUP_SIZES, PackedLinears, packing_refusal
from engine_service.worker.cuda.pieces import Pieces
from engine_service.worker.kernels.decoder_shape import (
    DecoderShape,
    Unsupported,
    decoder_shape,
    num_weights,
    rotary_tables,
)
from engine_service.worker.kernels.weight_formats import BITS
from engine_service.worker.memory import free_memory
from engine_service.worker.plain_config import read_plain_config
from engine_service.worker.quantized.checkpoint import QuantizedCheckpoint, open_checkpoint

_LOG = logging.getLogger(__name__)
_DTYPES = {ModelDtype.FLOAT32: torch.float32, ModelDtype.BFLOAT16: torch.bfloat16, ModelDtype.FLOAT16: torch.float16}
# Tensors that some checkpoints carry although they follow from the configuration.
_DERIVED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    """`weights`: how those of the layers are kept, where they are packed."""

    model: FusedDecoder
    facts: ModelFacts
    weights: WeightReport | None = None


def load_fused(config: WorkerConfig, device: torch.device, pieces: Pieces) -> LoadedDecoder | Unsupported:
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
    loading = _Loading(checkpoint, model_config, shape, facts, device, pieces)
    if config.weight_format is WeightFormat.PLAIN:
        return LoadedDecoder(loading.decoder(checkpoint, plain_linear), facts)
    return loading.packed(config)


def fused_decoder(
    weights: Mapping[str, torch.Tensor],
    model_config: Any,
    shape: DecoderShape,
    facts: ModelFacts,
    device: torch.device,
    pieces: Pieces,
    make: MakeLinear = plain_linear,
) -> FusedDecoder:
    """Of weights by the names that transformers gives, with rotations for every position of the model's context."""
    rotary = rotary_tables(model_config, facts.max_model_len)
    with torch.inference_mode():
        return FusedDecoder(weights, shape, rotary, facts.dtype, device, pieces, make)


def packed_linears(weight_format: WeightFormat, dtype: torch.dtype, device: torch.device) -> PackedLinears:
    """For plain weights, which are quantized."""
    bits = BITS[weight_format]
    return PackedLinears(bits, choose_products(device, dtype, bits, GROUP_SIZES[bits]), Scratch(dtype, device))


@dataclass(frozen=True, slots=True)
class _Loading:
    """What decoders of one checkpoint are made from."""

    checkpoint: Checkpoint | QuantizedCheckpoint
    model_config: Any
    shape: DecoderShape
    facts: ModelFacts
    device: torch.device
    pieces: Pieces

    def decoder(
        self, weights: Mapping[str, torch.Tensor], make: MakeLinear, dtype: torch.dtype | None = None
    ) -> FusedDecoder:
        """Refuses keys that are missing or that nobody read."""
        facts = self.facts if dtype is None else replace(self.facts, dtype=dtype)
        try:
            decoder = fused_decoder(weights, self.model_config, self.shape, facts, self.device, self.pieces, make)
        except KeyError as missing:
            refuse_keys("missing", [str(missing.args[0])])
            raise
        unread = [name for name in self.checkpoint.never_read if not name.endswith(_DERIVED)]
        refuse_keys("unexpected", [name for name in unread if not (self.shape.tied_head and name == "lm_head.weight")])
        return decoder

    def packed(self, config: WorkerConfig) -> LoadedDecoder:
        source, bits = self.checkpoint, BITS[config.weight_format]
        scheme = source.scheme if isinstance(source, QuantizedCheckpoint) else None
        reason = packing_refusal(scheme, bits)
        if reason is not None:
            config.require_plain_weights(reason)
        group_size = GROUP_SIZES[bits] if scheme is None else scheme.group_size
        products = choose_products(self.device, self.facts.dtype, bits, group_size)
        model = self.decoder(source, PackedLinears(bits, products, Scratch(self.facts.dtype, self.device)))
        _LOG.info("the layers' matrices take %d bytes; %s multiplies them", model.layer_bytes, products.name)
        source_name = "plain" if scheme is None else scheme.summary
        return LoadedDecoder(
            model, self.facts, WeightReport(source_name, config.weight_format.value, self._measure(config, model))
        )

    def _measure(self, config: WorkerConfig, packed: FusedDecoder) -> LogitError | None:
        """Against plain weights in the same number type, or a quantized checkpoint's in float32."""
        if not config.measure_weight_error:
            return None
        is_quantized = isinstance(self.checkpoint, QuantizedCheckpoint)
        dtype = torch.float32 if is_quantized else self.facts.dtype
        needed, free = num_weights(self.shape) * dtype.itemsize, free_memory(config.device)
        if needed > free:
            message = "the error of the weights is not measured: the reference takes %d bytes of %d that are free"
            _LOG.warning(message, needed, free)
            return None
        weights = (
            self.checkpoint.in_dtype(dtype) if isinstance(self.checkpoint, QuantizedCheckpoint) else self.checkpoint
        )
        reference = self.decoder(weights, plain_linear, dtype)
        first = self.model_config.bos_token_id or 0
        error = measure_packed_error(reference, packed, first, self.shape.vocabulary, dtype, self.device)
        del reference
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # so that it counts as free when the pool is sized
        return error
