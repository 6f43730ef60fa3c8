"""From the tensors of one quantized layer, as a file format packs them, to a `CodedMatrix`.

Must not know: where tensors come from, models, kernels.
"""

from collections.abc import Callable, Mapping

import torch

from engine_service.worker.quantized.coded_matrix import CodedMatrix, unpack
from engine_service.worker.quantized.scheme import Layout, Scheme

Parts = Mapping[str, torch.Tensor]
"""A layer's tensors by the last part of their names, such as "qweight"."""

# The part that makes a layer a quantized one, then all that belong to it.
PARTS: Mapping[Layout, tuple[str, ...]] = {
    Layout.GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    Layout.AWQ: ("qweight", "qzeros", "scales"),
    Layout.PACKED: ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    Layout.INTEGERS: ("weight_scale", "weight", "weight_zero_point"),
}
# AWQ's order of eight neighbouring columns in a word, lowest bits first, and where each column then lies.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_PLACES = tuple(_AWQ_ORDER.index(column) for column in range(8))


def read_matrix(parts: Parts, scheme: Scheme) -> CodedMatrix:
    """ValueError, with the numbers, for tensors that do not fit each other."""
    return _READERS[scheme.layout](parts, scheme)


def _gptq(parts: Parts, scheme: Scheme) -> CodedMatrix:
    """qweight [inputs / pack, outputs], qzeros [groups, outputs / pack], scales [groups, outputs], g_idx [inputs]."""
    words = _words(parts, "qweight")
    pack = 32 // scheme.bits
    inputs, outputs = words.shape[0] * pack, words.shape[1]
    size = _check_groups(scheme, inputs)
    groups = -(-inputs // size)
    if outputs % pack:
        raise ValueError(f"qweight has {outputs} outputs, which zeros packed {pack} in a word cannot be of")
    _check(parts, "scales", (groups, outputs))
    _check(parts, "qzeros", (groups, outputs // pack))
    zeros = unpack(_words(parts, "qzeros"), scheme.bits, 1).float() + scheme.zero_offset
    return CodedMatrix(
        codes=unpack(words, scheme.bits, 0).T.contiguous(),
        scales=parts["scales"].float().T.contiguous(),
        zeros=zeros.T.contiguous(),
        group_size=size,
        group_of=_group_index(parts, "g_idx", inputs, groups, size),
    )


def _awq(parts: Parts, scheme: Scheme) -> CodedMatrix:
    """qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]."""
    words = _words(parts, "qweight")
    inputs, outputs = words.shape[0], words.shape[1] * 8
    size = _check_groups(scheme, inputs)
    groups = -(-inputs // size)
    _check(parts, "scales", (groups, outputs))
    _check(parts, "qzeros", (groups, outputs // 8))
    return CodedMatrix(
        codes=_awq_unpack(words).T.contiguous(),
        scales=parts["scales"].float().T.contiguous(),
        zeros=_awq_unpack(_words(parts, "qzeros")).float().T.contiguous(),
        group_size=size,
    )


def _awq_unpack(words: torch.Tensor) -> torch.Tensor:
    spread = unpack(words, 4, 1)
    return spread.view(len(spread), -1, 8)[..., list(_AWQ_PLACES)].reshape(spread.shape)


def _packed(parts: Parts, scheme: Scheme) -> CodedMatrix:
    """weight_packed [outputs, inputs / pack rounded up], weight_scale [outputs, groups], weight_shape [2]; zeros
    [outputs / pack rounded up, groups], packed along outputs. Codes and zeros are stored as unsigned numbers."""
    words = _words(parts, "weight_packed")
    pack = 32 // scheme.bits
    outputs, inputs = _shape(parts)
    _check(parts, "weight_packed", (outputs, -(-inputs // pack)))
    size = _check_groups(scheme, inputs)
    groups = -(-inputs // size)
    _check(parts, "weight_scale", (outputs, groups))
    if scheme.is_symmetric:
        zeros = torch.full((outputs, groups), float(2 ** (scheme.bits - 1)))
    else:
        _check(parts, "weight_zero_point", (-(-outputs // pack), groups))
        zeros = unpack(_words(parts, "weight_zero_point"), scheme.bits, 0)[:outputs].float()
    return CodedMatrix(
        codes=unpack(words, scheme.bits, 1)[:, :inputs].contiguous(),
        scales=parts["weight_scale"].float(),
        zeros=zeros,
        group_size=size,
        group_of=_group_index(parts, "weight_g_idx", inputs, groups, size),
    )


def _integers(parts: Parts, scheme: Scheme) -> CodedMatrix:
    """weight int8 [outputs, inputs], weight_scale [outputs, groups], zeros int8 of the same shape."""
    weight = _part(parts, "weight")
    if weight.dtype is not torch.int8 or weight.dim() != 2:
        raise ValueError(f"weight has to be a matrix of int8, not {_describe(weight)}")
    outputs, inputs = weight.shape
    size = _check_groups(scheme, inputs)
    groups = -(-inputs // size)
    _check(parts, "weight_scale", (outputs, groups))
    zeros = torch.zeros(outputs, groups)
    if not scheme.is_symmetric:
        _check(parts, "weight_zero_point", (outputs, groups))
        zeros = parts["weight_zero_point"].float()
    # Codes are unsigned here, so codes and zeros move together.
    codes = weight.view(torch.uint8) ^ 128
    return CodedMatrix(codes, parts["weight_scale"].float(), zeros + 128.0, size)


_READERS: Mapping[Layout, Callable[[Parts, Scheme], CodedMatrix]] = {
    Layout.GPTQ: _gptq,
    Layout.AWQ: _awq,
    Layout.PACKED: _packed,
    Layout.INTEGERS: _integers,
}


def _part(parts: Parts, name: str) -> torch.Tensor:
    if name not in parts:
        raise ValueError(f"{name} is missing")
    return parts[name]


def _words(parts: Parts, name: str) -> torch.Tensor:
    words = _part(parts, name)
    if words.dtype is not torch.int32 or words.dim() != 2 or not words.numel():
        raise ValueError(f"{name} has to be a matrix of int32, not {_describe(words)}")
    return words


def _check(parts: Parts, name: str, shape: tuple[int, ...]) -> None:
    found = _part(parts, name)
    if tuple(found.shape) != shape:
        raise ValueError(f"{name} has to be {' x '.join(map(str, shape))}, not {_describe(found)}")


def _describe(tensor: torch.Tensor) -> str:
    return f"{' x '.join(map(str, tensor.shape)) or 'a number'} of {str(tensor.dtype).removeprefix('torch.')}"


def _shape(parts: Parts) -> tuple[int, int]:
    given = _part(parts, "weight_shape").flatten().tolist()
    if len(given) != 2 or min(given) < 1:
        raise ValueError(f"weight_shape has to be two positive numbers, not {given!s:.40}")
    return int(given[0]), int(given[1])


def _check_groups(scheme: Scheme, inputs: int) -> int:
    """Inputs of a group."""
    return inputs if scheme.group_size is None else scheme.group_size


def _group_index(parts: Parts, name: str, inputs: int, groups: int, size: int) -> torch.Tensor | None:
    """None where the index, if there is one, says that groups are neighbours."""
    if name not in parts:
        return None
    _check(parts, name, (inputs,))
    index = parts[name].long()
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= groups:
        raise ValueError(f"{name} names groups {low} to {high}, but there are {groups}")
    return None if torch.equal(index, torch.arange(inputs) // size) else index
