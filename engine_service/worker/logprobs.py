"""Log probabilities of tokens that are there and of the most likely ones, by the model's own logits.

Must not know: requests, plans, how a token was chosen.

Of a row: log_softmax in float32. Tokens are ordered by it, equal ones by lower id; the rank of a token is one
more than the number of tokens above it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_service.core.outcome import PositionLogprobs

_SLICE_ROWS = 32  # bounds the float32 workspace
# More than are wanted, so that the order among equal ones at the end of the list is nearly always certain.
_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Of W rows, on the device: float32 `chosen` [W], int64 `ranks` [W], and the most likely tokens, the best first:
    `top_ids` int64 and `top` float32 [W, n]. `wanted` int64 [W]: so many of them were asked for."""

    token_ids: torch.Tensor
    chosen: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor
    wanted: npt.NDArray[np.int64]

    def entries(self) -> tuple[PositionLogprobs, ...]:
        """One for each row; waits for the device."""
        columns = (self.token_ids, self.chosen, self.ranks, self.top_ids, self.top)
        return tuple(
            PositionLogprobs((token, chosen), rank, tuple(zip(ids[:wanted], top[:wanted], strict=True)))
            for token, chosen, rank, ids, top, wanted in zip(
                *(column.tolist() for column in columns), self.wanted.tolist(), strict=True
            )
        )


def logprob_rows(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, wanted: npt.NDArray[np.int64]
) -> LogprobRows:
    """For the W >= 1 `rows` of logits [R, vocabulary]: `token_ids` int64 [W] are there, `wanted` [W] most likely ones
    are reported (more than the vocabulary has: all)."""
    wanted = np.minimum(wanted, logits.shape[1])
    width = int(wanted.max())
    parts = [
        _slice(logits.index_select(0, rows[part]), token_ids[part], width)
        for part in (slice(begin, begin + _SLICE_ROWS) for begin in range(0, len(wanted), _SLICE_ROWS))
    ]
    chosen, ranks, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return LogprobRows(token_ids, chosen, ranks, top_ids, top, wanted)


def _slice(
    logits: torch.Tensor, token_ids: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    if width == 0:
        ranks = _count_above(logprobs, chosen) + 1
        return chosen.squeeze(1), ranks, token_ids.new_empty(len(token_ids), 0), logprobs[:, :0]
    values, ids = logprobs.topk(min(width + _CANDIDATES, logprobs.shape[1]))
    ranks = _ranks(logprobs, chosen, values)
    top_ids, top = _most_likely(logprobs, values, ids, width)
    return chosen.squeeze(1), ranks, top_ids, top


def _ranks(logprobs: torch.Tensor, chosen: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Int64 [R]. All that is above a candidate is a candidate; only for a less likely token every one is looked at."""
    ranks = (values > chosen).sum(dim=-1) + 1
    is_less_likely = chosen.squeeze(1) < values[:, -1]
    if bool(is_less_likely.any()):
        rest = is_less_likely.nonzero().squeeze(1)
        ranks[rest] = _count_above(logprobs[rest], chosen[rest]) + 1
    return ranks


def _count_above(logprobs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Int64 [R]. Counted in float32, exact below 2**24: adding booleans takes four times as long."""
    return logprobs.clone().gt_(chosen).sum(dim=-1).long()


def _most_likely(
    logprobs: torch.Tensor, values: torch.Tensor, ids: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and values of the `width` largest of each row, by falling value and rising id, from topk's candidates."""
    # topk chooses freely among values equal to its last one.
    is_certain = (values[:, width - 1] > values[:, -1]) | (values.shape[1] == logprobs.shape[1])
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    values, ids = values[:, :width].clone(), ids.gather(1, order)[:, :width].clone()
    if not bool(is_certain.all()):
        rest = (~is_certain).nonzero().squeeze(1)
        sorted_values, sorted_ids = logprobs[rest].sort(dim=-1, descending=True, stable=True)
        values[rest], ids[rest] = sorted_values[:, :width], sorted_ids[:, :width]
    return ids, values
