"""Finds the nucleus of rows of weights (top_p) without sorting them.

Must not know: logits, temperatures, how a token is drawn.

The order is that of the sampler: by falling weight, equal ones by rising index. The leading bits of a float32 are a
bucket of its size, and larger numbers are in larger buckets. So whole buckets are inside or outside but for one,
in which the bound is crossed; only that one is sorted.
"""

import numpy as np
import torch

_KEY_SHIFT = 20  # leaves sign, exponent and 3 bits of the mantissa: a bucket spans 12.5 %
_BUCKETS = 1024  # for weights in [0, 1]


def keep_nucleus(weights: torch.Tensor, top_p: torch.Tensor) -> None:
    """Zeroes, in place, each weight before which top_p of its row's weight or more lies.

    `weights` float32 [R, columns] in [0, 1], contiguous, the largest of each row positive; `top_p` float64 [R, 1] in
    (0, 1): 1 keeps all and needs no bound, which rounding would make cut off weights near 0.
    """
    keys = weights.view(torch.int32) >> _KEY_SHIFT
    ends = _bucket_sums(weights, keys).flip(1).cumsum_(1)
    bound = top_p * ends[:, -1:]
    crossed = torch.searchsorted(ends, bound).clamp_(max=_BUCKETS - 1)  # from the largest bucket down
    before = torch.where(crossed > 0, ends.gather(1, (crossed - 1).clamp_(min=0)), 0.0)
    crossed_key = (_BUCKETS - 1 - crossed).int()
    inside = _flat_nonzero(keys == crossed_key)
    rows, flat = inside // weights.shape[1], weights.view(-1)
    kept = _kept_in_bucket(flat[inside], rows, before, bound)
    smallest = (crossed_key << _KEY_SHIFT).view(torch.float32)
    # A float mask: multiplying by booleans takes three times as long.
    weights.mul_(weights.clone().ge_(smallest))
    flat[inside] = kept


def _flat_nonzero(mask: torch.Tensor) -> torch.Tensor:
    """Places in the flattened mask, int64."""
    if mask.device.type == "cpu":  # numpy takes less than half of torch's time
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.flatten().nonzero().squeeze(1)


def _bucket_sums(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Float64 [R, buckets]."""
    count = len(weights)
    offsets = torch.arange(count, dtype=torch.int32, device=weights.device).unsqueeze(1) * _BUCKETS
    flat = torch.bincount((keys + offsets).flatten(), weights.flatten().double(), count * _BUCKETS)
    return flat.view(count, _BUCKETS)


def _kept_in_bucket(
    values: torch.Tensor, rows: torch.Tensor, before: torch.Tensor, bound: torch.Tensor
) -> torch.Tensor:
    """`values` [N], those of each of the `rows` together and by rising index, with 0 for what the bound cuts off.

    `before` [R, 1]: weight of the larger buckets.
    """
    count = len(before)
    lengths = torch.bincount(rows, minlength=count)
    place = torch.arange(len(rows), device=rows.device) - (lengths.cumsum(0) - lengths)[rows]
    padded = values.new_zeros(count, int(lengths.max()))
    padded[rows, place] = values
    ordered, order = padded.sort(dim=1, descending=True, stable=True)
    ordered = ordered.double()
    is_kept = before + ordered.cumsum(1) - ordered < bound
    by_index = torch.zeros_like(is_kept).scatter_(1, order, is_kept)
    return values * by_index[rows, place]
