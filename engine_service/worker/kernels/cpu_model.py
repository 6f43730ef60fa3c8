"""A Llama-family model that runs whole in C++ on the CPU: weights, KV pool and threads behind one call a step.

Must not know: requests, plans, sampling, where weights come from.
"""

import ctypes
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.decoder_shape import DecoderShape, Unsupported, decoder_shape, rotary_tables
from engine_service.worker.kernels.fused_adapter import FusedUpdate
from engine_service.worker.kernels.fused_codes import FusedCodes, fuse_codes, head_codes
from engine_service.worker.kernels.fused_weights import fuse_matrices, fuse_vectors, padded_head
from engine_service.worker.kernels.library import (
    CodesStruct,
    DecoderConfigStruct,
    DecoderStepStruct,
    NumberType,
    ThreadTeam,
    int_pairs,
)
from engine_service.worker.kernels.step_batch import StepBatch, StepOutput, batch_struct, check
from engine_service.worker.kernels.weight_formats import format_number, weight_format_refusal
from engine_service.worker.quantized.checkpoint import QuantizedCheckpoint

STAGES = ("embed", "norm", "qkv", "rotary", "attention", "output", "gate_up", "down", "head")
GROUP_SLOTS = 16


class _Part(IntEnum):
    """Part of decoder.hpp."""

    EMBEDDING = 0
    COSINE = 1
    SINE = 2
    FINAL_NORM = 3
    HEAD = 4
    INPUT_NORM = 5
    QKV = 6
    QKV_BIAS = 7
    QUERY_NORM = 8
    KEY_NORM = 9
    OUTPUT = 10
    OUTPUT_BIAS = 11
    POST_NORM = 12
    GATE_UP = 13
    DOWN = 14


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool: `block_size` tokens a block, a multiple of 16. ValueError for sizes that cannot be."""

    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        if self.num_blocks < 1:
            raise ValueError(f"a KV pool needs at least 1 block, not {self.num_blocks}")
        if self.block_size < GROUP_SLOTS or self.block_size % GROUP_SLOTS:
            raise ValueError(f"block_size must be a multiple of {GROUP_SLOTS}, not {self.block_size}")


class CpuModel:
    """Owns packed weights and the KV pool. One step at a time; the thread team must outlive it."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        shape: DecoderShape,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pool: PoolSize,
        dtype: torch.dtype,
        team: ThreadTeam,
        weight_format: WeightFormat = WeightFormat.PLAIN,
    ) -> None:
        """Packs `weights` layer by layer, so a lazy mapping never holds the model twice; `rotary` are the
        tables of `rotary_tables`, whose length bounds the positions. KeyError for a missing weight."""
        self.shape = shape
        self.dtype = dtype
        self._team = team
        self._library = team.library
        config = _config_struct(shape, pool, len(rotary[0]), weight_format)
        number = NumberType.of(dtype)
        self._handle = self._library.create("decoder_create", ctypes.byref(config), number, team.handle)
        self._end = weakref.finalize(self, self._library.call, "decoder_destroy", self._handle)
        embedding = weights["model.embed_tokens.weight"].to(dtype).contiguous()
        # The decoder reads these three in place.
        self._kept = (embedding, *rotary)
        self._format = weight_format
        is_plain = weight_format is WeightFormat.PLAIN
        codes = weights if isinstance(weights, QuantizedCheckpoint) and not is_plain else None
        self._set_globals(weights, dtype)
        self._set_head(weights, dtype, codes)
        for layer in range(shape.layers):
            self._set_layer(weights, layer, dtype, codes)
        self._logits = torch.empty(0, shape.vocabulary)
        self._best = torch.empty(0, dtype=torch.int64)

    def _set_globals(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        embedding, cosine, sine = self._kept
        self._set(0, _Part.EMBEDDING, embedding)
        self._set(0, _Part.COSINE, cosine)
        self._set(0, _Part.SINE, sine)
        self._set(0, _Part.FINAL_NORM, weights["model.norm.weight"].float())

    def _set_head(
        self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, codes: QuantizedCheckpoint | None
    ) -> None:
        """Its own codes where there are some and the format is for heads, too."""
        if self.shape.tied_head:
            self._set(0, _Part.HEAD, self._kept[0])
            return
        matrix = None if codes is None else head_codes(codes, self._format)
        if matrix is None:
            self._set(0, _Part.HEAD, weights["lm_head.weight"].to(dtype).contiguous())
        else:
            self._set_codes(0, _Part.HEAD, matrix)

    def _set_layer(
        self,
        weights: Mapping[str, torch.Tensor],
        layer: int,
        dtype: torch.dtype,
        codes: QuantizedCheckpoint | None,
    ) -> None:
        """Matrices are those of `codes`, if there are any, else those of `weights`."""
        vectors = fuse_vectors(weights, layer, self.shape)
        matrices = {} if codes is not None else fuse_matrices(weights, layer, self.shape, dtype)
        for name, tensor in (vectors | matrices).items():
            self._set(layer, _Part[name.upper()], tensor)
        if codes is not None:
            for name, matrix in fuse_codes(codes, layer, self.shape, self._format).items():
                self._set_codes(layer, _Part[name.upper()], matrix)
        self._library.call("decoder_window", self._open_handle, layer, self.shape.windows[layer] or 0)

    def _set(self, layer: int, part: _Part, tensor: torch.Tensor) -> None:
        rows, columns = tensor.shape if tensor.dim() == 2 else (1, tensor.numel())
        try:
            self._library.checked("decoder_set", self._open_handle, layer, part, tensor.data_ptr(), rows, columns)
        except ValueError as error:
            shape = " x ".join(map(str, tensor.shape))
            raise ValueError(f"weights of {part.name.lower()} ({shape}, layer {layer}) do not fit: {error}") from error

    def _set_codes(self, layer: int, part: _Part, matrix: FusedCodes) -> None:
        codes = codes_struct(*matrix.parts)
        try:
            self._library.checked("decoder_set_codes", self._open_handle, layer, part, ctypes.byref(codes))
        except ValueError as error:
            shape = f"{codes.outputs} x {codes.inputs}"
            raise ValueError(f"codes of {part.name.lower()} ({shape}, layer {layer}) do not fit: {error}") from error

    def step(self, batch: StepBatch, *, want_logits: bool = True) -> StepOutput:
        """Computes the batch's tokens and writes their KV. Without `want_logits` only `best` is filled."""
        sampled = batch.sample_rows.numel()
        if sampled > len(self._logits):
            self._logits = torch.empty(sampled, self.shape.vocabulary)
            self._best = torch.empty(sampled, dtype=torch.int64)
        check(batch)
        step = DecoderStepStruct(
            batch=batch_struct(batch.slot_mapping, batch.block_tables, batch.query_start, batch.seq_lens),
            input_ids=batch.input_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            sampled=sampled,
            sample_rows=batch.sample_rows.data_ptr(),
            logits=self._logits.data_ptr() if want_logits else None,
            best=self._best.data_ptr(),
            adapters=None if batch.adapters is None else batch.adapters.ctypes.data,
        )
        self._library.checked("decoder_step", self._open_handle, ctypes.byref(step))
        return StepOutput(self._logits[: sampled if want_logits else 0], self._best[:sampled])

    def install_adapter(self, number: int, updates: Iterable[FusedUpdate]) -> None:
        """Packs the updates of an adapter with a new number, 1 or more; steps may name it from now on."""
        for layer, part, down, up in updates:
            sizes = (down.data_ptr(), *down.shape, up.data_ptr(), up.shape[0])
            self._library.checked("decoder_set_adapter", self._open_handle, number, layer, part, *sizes)

    def drop_adapter(self, number: int) -> None:
        """Frees an adapter that no step will name any more."""
        self._library.call("decoder_drop_adapter", self._open_handle, number)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of all adapters."""
        return int(self._library.call("decoder_adapter_bytes", self._open_handle))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole KV blocks of every layer: (source, destination), no destination being a source."""
        self._library.call("decoder_copy_blocks", self._open_handle, len(pairs), int_pairs(pairs))

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights, the embedding table not counted."""
        return int(self._library.call("decoder_weight_bytes", self._open_handle))

    @property
    def kv_bytes(self) -> int:
        return int(self._library.call("decoder_kv_bytes", self._open_handle))

    def take_times(self, *, enabled: bool) -> dict[str, float]:
        """Seconds of each stage since the last call, and whether to measure from now on."""
        seconds = (ctypes.c_double * len(STAGES))()
        self._library.call("decoder_times", self._open_handle, enabled, seconds)
        return dict(zip(STAGES, seconds, strict=True))

    @property
    def _open_handle(self) -> int:
        if not self._end.alive:
            raise RuntimeError("the model is closed")
        return self._handle

    def close(self) -> None:
        """Frees weights and KV; a later call of any method is an error."""
        self._end()


def build_cpu_model(
    weights: Mapping[str, torch.Tensor],
    config: Any,
    pool: PoolSize,
    dtype: torch.dtype,
    max_positions: int,
    team: ThreadTeam,
    weight_format: WeightFormat = WeightFormat.PLAIN,
) -> CpuModel | Unsupported:
    """The fused model of a transformers configuration, or why there is none."""
    shape = decoder_shape(config)
    if isinstance(shape, Unsupported):
        return shape
    reason = weight_format_refusal(shape, dtype, weight_format)
    if reason is not None:
        return Unsupported(reason)
    return CpuModel(weights, shape, rotary_tables(config, max_positions), pool, dtype, team, weight_format)


def kv_bytes_per_block(shape: DecoderShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers in this layout."""
    return 2 * shape.layers * shape.kv_heads * padded_head(shape.head_size) * block_size * dtype.itemsize


def codes_struct(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> CodesStruct:
    """A view of contiguous tensors (see FusedCodes), which must stay alive while it is used."""
    outputs, inputs = codes.shape
    pointers = (codes.data_ptr(), scales.data_ptr(), zeros.data_ptr())
    return CodesStruct(*pointers, outputs, inputs, inputs // scales.shape[1])


def _config_struct(
    shape: DecoderShape, pool: PoolSize, positions: int, weight_format: WeightFormat
) -> DecoderConfigStruct:
    return DecoderConfigStruct(
        layers=shape.layers,
        hidden=shape.hidden,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        intermediate=shape.intermediate,
        vocabulary=shape.vocabulary,
        positions=positions,
        num_blocks=pool.num_blocks,
        block_size=pool.block_size,
        epsilon=shape.epsilon,
        scale=shape.head_size**-0.5,
        format=format_number(weight_format),
    )
