"""The formats in which a decoder keeps its matrices, as the C interface counts them, and what each can hold.

Must not know: weights, file formats, how a step runs.
"""

import torch

from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.decoder_shape import DecoderShape

# Groups of inputs with a scale are a multiple of so many, and so are the inputs of a matrix in few bits.
GROUP = 32
_NUMBERS = {WeightFormat.PLAIN: 0, WeightFormat.INT4: 1, WeightFormat.INT8: 2}
BITS = {WeightFormat.INT4: 4, WeightFormat.INT8: 8}


def format_number(weight_format: WeightFormat) -> int:
    """Format of linear.hpp."""
    return _NUMBERS[weight_format]


def weight_format_refusal(shape: DecoderShape, dtype: torch.dtype, weight_format: WeightFormat) -> str | None:
    """Why this decoder cannot keep its weights so, or None. INT4 is for the layers' matrices, INT8 for the head too."""
    if weight_format is WeightFormat.PLAIN:
        return None
    if dtype is not torch.bfloat16:
        return f"{weight_format.value} weights need bfloat16, not {dtype}"
    if shape.hidden % GROUP or shape.intermediate % GROUP:
        sizes = f"{shape.hidden} and {shape.intermediate}"
        return f"{weight_format.value} weights need sizes that are multiples of {GROUP}, not {sizes}"
    return None
