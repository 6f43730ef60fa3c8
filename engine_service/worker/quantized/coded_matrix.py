"""A quantized matrix as codes with scales and zeros: the one form that every file format is unpacked into.

Must not know: file formats, models, kernels.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """weight[o, i] = scales[o, g] * (codes[o, i] - zeros[o, g]), where g is the group of input i.

    `codes` uint8 [outputs, inputs]; `scales` and `zeros` float32 [outputs, groups]; `group_of` int64 [inputs], or None
    where groups are neighbouring inputs, equally many each but for the last group.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int
    group_of: torch.Tensor | None = None

    @property
    def groups(self) -> torch.Tensor:
        """int64 [inputs]: the group of each input."""
        if self.group_of is not None:
            return self.group_of
        return torch.arange(self.codes.shape[1]) // self.group_size

    def dequantised(self) -> torch.Tensor:
        """float32 [outputs, inputs]."""
        groups = self.groups
        weight = self.codes.float()
        return weight.sub_(self.zeros[:, groups]).mul_(self.scales[:, groups])


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 [rows, columns] -> uint8 with 32 / bits times as many along `dim`; the lowest bits come first."""
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    spread = ((words.unsqueeze(-1) >> shifts) & (2**bits - 1)).to(torch.uint8)
    rows, columns = words.shape
    if dim == 1:
        return spread.reshape(rows, columns * per_word)
    return spread.transpose(1, 2).reshape(rows * per_word, columns)
