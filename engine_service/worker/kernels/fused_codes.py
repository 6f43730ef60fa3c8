"""A quantized checkpoint's matrices as a decoder that keeps few bits wants them: fused, codes as they are in the file.

Must not know: the C interface, file formats, how a step runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_service.worker.checkpoint import UnsupportedModelError
from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.decoder_shape import DecoderShape
from engine_service.worker.kernels.fused_weights import interleave, pad_rows, padded_head
from engine_service.worker.kernels.weight_formats import BITS, GROUP
from engine_service.worker.quantized.checkpoint import QuantizedCheckpoint
from engine_service.worker.quantized.coded_matrix import CodedMatrix
from engine_service.worker.quantized.scheme import Scheme

_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class FusedCodes:
    """weight = scales * (codes - zeros): codes uint8 [outputs, inputs]; scales, zeros float32 [outputs, groups],
    contiguous. Groups are 32 neighbouring inputs in four bits, a multiple of 32 in eight. Rows of padding have the
    scale 0."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes, self.scales, self.zeros


def codes_refusal(scheme: Scheme, shape: DecoderShape, weight_format: WeightFormat) -> str | None:
    """Why codes of that kind cannot be kept in the format as they are, or None."""
    if scheme.bits != BITS[weight_format]:
        return f"the checkpoint's weights have {scheme.bits} bits ({scheme.summary})"
    if scheme.group_size is not None and scheme.group_size % GROUP:
        return f"the checkpoint's group_size {scheme.group_size} is no multiple of {GROUP}"
    if padded_head(shape.head_size) != shape.head_size:
        return f"{weight_format.value} codes need heads of a multiple of {GROUP} numbers, not {shape.head_size}"
    return None


def fuse_codes(
    checkpoint: QuantizedCheckpoint, layer: int, shape: DecoderShape, weight_format: WeightFormat
) -> dict[str, FusedCodes]:
    """By the names of `fuse_matrices`. KeyError for a missing matrix; UnsupportedModelError, with the reason, for one
    whose codes do not fit."""
    attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
    heads = {"q": shape.query_heads, "k": shape.kv_heads, "v": shape.kv_heads}

    def read(name: str) -> FusedCodes:
        return _read(checkpoint, f"{name}_proj.weight", weight_format)

    qkv = [read(f"{attention}.{name}") for name in heads]
    counts = list(heads.values())
    gate_up = [read(f"{mlp}.{name}") for name in ("gate", "up")]
    return {
        "qkv": _join(lambda parts: torch.cat([pad_rows(*pair) for pair in zip(parts, counts, strict=True)]), qkv),
        "output": read(f"{attention}.o"),
        "gate_up": _join(lambda parts: interleave(*parts), gate_up),
        "down": read(f"{mlp}.down"),
    }


def head_codes(checkpoint: QuantizedCheckpoint, weight_format: WeightFormat) -> FusedCodes | None:
    """None where the head is not quantized, or the format leaves it plain."""
    if weight_format is not WeightFormat.INT8 or checkpoint.coded(_HEAD) is None:
        return None
    return _read(checkpoint, _HEAD, weight_format)


def _join(join: Callable[[list[torch.Tensor]], torch.Tensor], matrices: list[FusedCodes]) -> FusedCodes:
    """By a change of rows, of codes, scales and zeros alike."""
    return FusedCodes(*(join(list(parts)).contiguous() for parts in zip(*(m.parts for m in matrices), strict=True)))


def _read(checkpoint: QuantizedCheckpoint, name: str, weight_format: WeightFormat) -> FusedCodes:
    coded = checkpoint.coded(name)
    if coded is None:
        if name not in checkpoint:
            raise KeyError(name)
        raise _refusal(weight_format, f"{name} is not quantized in the checkpoint")
    if coded.group_of is not None:
        raise _refusal(weight_format, f"the groups of {name} are no neighbouring inputs (desc_act)")
    firsts = coded.groups[:: _group(coded, weight_format)]
    scales, zeros = (part[:, firsts].contiguous() for part in (coded.scales, coded.zeros))
    return FusedCodes(coded.codes.contiguous(), scales, zeros)


def _group(coded: CodedMatrix, weight_format: WeightFormat) -> int:
    """Inputs that will share a scale: the file's groups where the format holds them, else pieces of them."""
    inputs = coded.codes.shape[1]
    group = min(coded.group_size, inputs)
    return GROUP if weight_format is WeightFormat.INT4 or inputs % group else group


def _refusal(weight_format: WeightFormat, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"weight_format {weight_format.value} cannot be served: {reason}")
