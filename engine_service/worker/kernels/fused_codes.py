"""A quantized checkpoint's four-bit matrices as the decoder wants them: fused, codes as they are in the file.

Must not know: the C interface, file formats, how a step runs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine_service.worker.checkpoint import UnsupportedModelError
from engine_service.worker.kernels.decoder_shape import DecoderShape
from engine_service.worker.kernels.fused_weights import interleave, pad_rows, padded_head
from engine_service.worker.quantized.checkpoint import QuantizedCheckpoint
from engine_service.worker.quantized.scheme import Scheme

GROUP = 32


@dataclass(frozen=True, slots=True)
class FusedCodes:
    """weight = scales * (codes - zeros): codes uint8 [outputs, inputs], 0..15; scales, zeros float32 [outputs,
    inputs / 32], contiguous. Rows of padding have the scale 0."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes, self.scales, self.zeros


def codes_refusal(scheme: Scheme, shape: DecoderShape) -> str | None:
    """Why codes of that kind cannot be kept in four bits as they are, or None."""
    if scheme.bits != 4:
        return f"the checkpoint's weights have {scheme.bits} bits ({scheme.summary})"
    if scheme.group_size is not None and scheme.group_size % GROUP:
        return f"the checkpoint's group_size {scheme.group_size} is no multiple of {GROUP}"
    if padded_head(shape.head_size) != shape.head_size:
        return f"four-bit codes need heads of a multiple of {GROUP} numbers, not {shape.head_size}"
    return None


def fuse_codes(checkpoint: QuantizedCheckpoint, layer: int, shape: DecoderShape) -> dict[str, FusedCodes]:
    """By the names of `fuse_matrices`. KeyError for a missing matrix; UnsupportedModelError, with the reason, for one
    whose codes do not fit."""
    attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
    heads = {"q": shape.query_heads, "k": shape.kv_heads, "v": shape.kv_heads}
    qkv = [_read(checkpoint, f"{attention}.{name}_proj.weight") for name in heads]
    counts = list(heads.values())
    gate_up = [_read(checkpoint, f"{mlp}.{name}_proj.weight") for name in ("gate", "up")]
    return {
        "qkv": _join(lambda parts: torch.cat([pad_rows(*pair) for pair in zip(parts, counts, strict=True)]), qkv),
        "output": _read(checkpoint, f"{attention}.o_proj.weight"),
        "gate_up": _join(lambda parts: interleave(*parts), gate_up),
        "down": _read(checkpoint, f"{mlp}.down_proj.weight"),
    }


def _join(join: Callable[[list[torch.Tensor]], torch.Tensor], matrices: list[FusedCodes]) -> FusedCodes:
    """By a change of rows, of codes, scales and zeros alike."""
    return FusedCodes(*(join(list(parts)).contiguous() for parts in zip(*(m.parts for m in matrices), strict=True)))


def _read(checkpoint: QuantizedCheckpoint, name: str) -> FusedCodes:
    coded = checkpoint.coded(name)
    if coded is None:
        if name not in checkpoint:
            raise KeyError(name)
        raise UnsupportedModelError(f"weight_format int4 cannot be served: {name} is not quantized in the checkpoint")
    if coded.group_of is not None:
        raise UnsupportedModelError(
            f"weight_format int4 cannot be served: the groups of {name} are no neighbouring inputs (desc_act)"
        )
    firsts = coded.groups[::GROUP]
    scales, zeros = (part[:, firsts].contiguous() for part in (coded.scales, coded.zeros))
    return FusedCodes(coded.codes.contiguous(), scales, zeros)
