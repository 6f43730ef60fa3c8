"""Draws one token per row from the logits: vectorized, and each row as if it were alone.

Must not know: requests, plans, seeds (it gets one uniform number per row).

The rule for a row, exactly: tokens are ordered by logit, equal logits by lower id. Weights are
`exp((logit - largest) / temperature)` in float32. `top_k` keeps the first k tokens; `top_p` then keeps each
token before which less than top_p of the kept weight lies; `min_p` then keeps weights >= min_p (the largest
weight is 1). Among the kept tokens in the order of their ids, the token drawn is the first whose cumulated
weight exceeds uniform * total. So a temperature near 0, top_k 1 and a tiny top_p all equal greedy, and
nothing depends on which of the equivalent ways below is taken for speed. A backend's `RowDraw` takes the rows whose
logits are the model's own under a mask; its exp may differ in the last bit, so a backend has one or never has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine_service.worker.logit_editor import LogitEditor
from engine_service.worker.logits import Peaks, find_peaks, peaks_at
from engine_service.worker.nucleus import keep_nucleus
from engine_service.worker.row_draw import RowDraw
from engine_service.worker.sampled import Sampled
from engine_service.worker.sampling_rows import SamplingRows
from engine_service.worker.transfer import DirectTransfer, Upload

Marks = npt.NDArray[np.bool_]

_SLICE_ROWS = 32  # bounds the float32 workspace, and keeps it in the cache
_GROUP = 256  # weights are summed in groups, and only the winning group is cumulated token by token
_NO_WEIGHT_BELOW = -87.0  # exp of less is no normal float32
_BELOW_ONE = 1.0 - 2.0**-50
_SHORT_LISTS = ((40, 64), (200, 256), (900, 1024))  # (largest top_k, candidates for it)


@dataclass(frozen=True, slots=True)
class _Settings:
    """A slice of `SamplingRows` on the device, each [R, 1]."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor


class Sampler:
    """Holds only a workspace of float32 weights [_SLICE_ROWS, vocabulary rounded up], and that of its editor."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        row_draw: RowDraw | None = None,
        upload: Upload | None = None,
    ) -> None:
        """`upload` brings settings to the device; None: as plain copies."""
        self._row_draw = row_draw
        self._vocab_size = vocab_size
        self._upload = upload or DirectTransfer(device).upload
        padded = -(-vocab_size // _GROUP) * _GROUP
        self._workspace = torch.zeros(_SLICE_ROWS, padded, dtype=torch.float32, device=device)
        self._editor = LogitEditor(vocab_size, device, self._upload)

    def sample(self, logits: torch.Tensor, rows: SamplingRows, best: torch.Tensor | None = None) -> Sampled:
        """One token for each row of the model's logits [R, vocabulary], which stay as they are.

        `best` is that of `StepLogits`: where the backend knows it, nobody has to look for it.
        """
        peaks = find_peaks(logits) if best is None else peaks_at(logits, best)
        if not rows.is_edited:
            token_ids = self._choose(logits, peaks, rows, np.True_)
            return Sampled(token_ids.masked_fill(~peaks.sound, 0), peaks.sound)
        copied = rows.edited & ~self._by_kernel(logits, rows)
        token_ids = self._choose(logits, peaks, rows, ~copied)
        has_choice = token_ids >= 0
        for index in _slices(copied):
            place = self._upload(index)
            chosen, is_left = self._choose_edited(logits.index_select(0, place).float(), index, rows)
            token_ids = token_ids.index_copy(0, place, chosen)
            has_choice.index_copy_(0, place, is_left)
        return Sampled(token_ids.masked_fill(~(peaks.sound & has_choice), 0), peaks.sound, has_choice)

    def _choose_edited(
        self, logits: torch.Tensor, index: npt.NDArray[np.int64], rows: SamplingRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For a copy of some rows' logits: their tokens, and whether any was left."""
        self._editor.edit(logits, index, rows)
        peaks = find_peaks(logits)
        chosen = self._choose(logits, peaks, rows.settings_of(index), np.True_)
        return chosen, peaks.values > float("-inf")

    def _by_kernel(self, logits: torch.Tensor, rows: SamplingRows) -> Marks:
        """The rows that the backend's kernel draws from these logits, masks included; by each row's settings alone."""
        if self._row_draw is None or not self._row_draw.takes(logits):
            return np.zeros(len(logits), dtype=np.bool_)
        return ~rows.ruled & (rows.masked | ~rows.greedy)

    def _choose(self, logits: torch.Tensor, peaks: Peaks, rows: SamplingRows, wanted: Marks | np.bool_) -> torch.Tensor:
        """Token ids [R] of the wanted rows, -1 where a mask leaves none; those of the others mean nothing."""
        token_ids = peaks.token_ids
        by_kernel = self._by_kernel(logits, rows) & wanted
        if self._row_draw is not None and by_kernel.any():
            index = np.flatnonzero(by_kernel)
            token_ids = token_ids.index_copy(0, torch.from_numpy(index), self._row_draw.draw(logits, index, rows))
        drawn_rows = ~rows.greedy & wanted & ~by_kernel
        if drawn_rows.any():
            ranked = drawn_rows & (rows.top_k > 0) & (rows.top_k < self._vocab_size)
            for chosen, draw in ((drawn_rows & ~ranked, self._draw_by_weight), (ranked, self._draw_by_rank)):
                for index in _slices(chosen):
                    place = self._upload(index)
                    drawn = draw(_rows_of(logits, index, place), peaks.values[place], rows, index)
                    token_ids = token_ids.index_copy(0, place, drawn)
        return token_ids

    def _draw_by_weight(
        self, logits: torch.Tensor, largest: torch.Tensor, rows: SamplingRows, index: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Rows without top_k: no order of all tokens is needed."""
        settings = self._settings(rows, index)
        weights = self._weights(logits, largest, settings.temperature, are_edited=rows.are_edited)
        nucleus = self._upload(np.flatnonzero(rows.top_p[index] < 1.0))
        if len(nucleus) and not bool(torch.isfinite(largest).all()):
            weights.nan_to_num_(nan=0.0)  # an unsound row, or one without a choice, must not break its neighbours
        if len(nucleus) == len(index):
            keep_nucleus(weights, settings.top_p)
        elif len(nucleus):
            kept = weights.index_select(0, nucleus)
            keep_nucleus(kept, settings.top_p[nucleus])
            weights.index_copy_(0, nucleus, kept)
        if (rows.min_p[index] > 0.0).any():
            # A float mask: multiplying by booleans takes three times as long.
            weights.mul_(weights.clone().ge_(settings.min_p))
        return _draw_by_groups(weights, settings.uniforms).clamp_(max=self._vocab_size - 1)

    def _draw_by_rank(
        self, logits: torch.Tensor, largest: torch.Tensor, rows: SamplingRows, index: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Rows with top_k: from the best candidates, from all tokens where those were too few."""
        settings = self._settings(rows, index)
        candidates = self._num_candidates(rows.top_k[index])
        drawn, enough = _draw_from_top(logits, largest, settings, candidates)
        if not bool(enough.all()):
            short = (~enough).nonzero().squeeze(1)
            rest = _Settings(*(getattr(settings, name)[short] for name in _Settings.__slots__))
            again, _ = _draw_from_top(logits[short], largest[short], rest, self._vocab_size)
            drawn = drawn.index_copy(0, short, again)
        return drawn

    def _settings(self, rows: SamplingRows, index: npt.NDArray[np.int64]) -> _Settings:
        def column(values: npt.NDArray) -> torch.Tensor:
            return self._upload(values[index]).unsqueeze(1)

        return _Settings(
            temperature=column(rows.temperature),
            top_k=column(np.minimum(rows.top_k, self._vocab_size)),
            top_p=column(rows.top_p),
            min_p=column(rows.min_p),
            uniforms=column(rows.uniforms),
        )

    def _weights(
        self, logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, *, are_edited: bool
    ) -> torch.Tensor:
        """Weights [R, padded vocabulary] in the workspace; the padding has weight 0."""
        weights = self._workspace[: logits.shape[0]]
        real = weights[:, : self._vocab_size]
        torch.sub(logits, largest.float().unsqueeze(1), out=real)
        real.div_(temperature)
        if are_edited:
            # Most tokens of a masked row are -inf, and `exp` of what underflows takes twenty times as long.
            counts = real.clone().ge_(_NO_WEIGHT_BELOW)
            real.clamp_(min=_NO_WEIGHT_BELOW).exp_().mul_(counts)
        else:
            real.exp_()
        return weights

    def _num_candidates(self, top_k: npt.NDArray[np.int64]) -> int:
        """How many of the best tokens to fetch so that the list is nearly always long enough."""
        wanted = 0
        for k in top_k.tolist():
            fitting = (size for limit, size in _SHORT_LISTS if k <= limit)
            wanted = max(wanted, next(fitting, self._vocab_size))
        return min(wanted, self._vocab_size)


def _slices(chosen: npt.NDArray[np.bool_]) -> Iterator[npt.NDArray[np.int64]]:
    """The chosen rows, a workspace full at a time."""
    index = np.flatnonzero(chosen)
    for begin in range(0, len(index), _SLICE_ROWS):
        yield index[begin : begin + _SLICE_ROWS]


def _rows_of(logits: torch.Tensor, index: npt.NDArray[np.int64], place: torch.Tensor) -> torch.Tensor:
    """The rows of an ascending index; neighbouring rows, the usual case, without a copy."""
    first, last = int(index[0]), int(index[-1]) + 1
    return logits[first:last] if last - first == len(index) else logits.index_select(0, place)


def _draw_by_groups(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First index whose cumulated weight exceeds uniform * total, [R]; weights [R, groups * _GROUP].

    Sums in groups, finds the group, then cumulates only inside it: one read of the weights, no copy.
    """
    grouped = weights.unflatten(1, (-1, _GROUP))
    ends = grouped.sum(-1, dtype=torch.float64).cumsum_(-1)
    target = uniforms * ends[:, -1:]
    group = torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
    before = torch.where(group > 0, ends.gather(1, (group - 1).clamp_(min=0)), 0.0)
    inside = grouped.gather(1, group.unsqueeze(2).expand(-1, 1, _GROUP)).squeeze(1).double().cumsum_(-1)
    # The group's sum and its cumulation may differ in the last bit: stay below the last weight that counts.
    rest = torch.minimum(target - before, inside[:, -1:] * _BELOW_ONE)
    return (group * _GROUP + torch.searchsorted(inside, rest, right=True)).squeeze(1)


def _draw_from_top(
    logits: torch.Tensor,
    largest: torch.Tensor,
    settings: _Settings,
    candidates: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the best `candidates` tokens -> ids [R], and whether they were enough to be exact [R]."""
    values, ids, trusted = _ordered_candidates(logits, candidates)
    weights = values.float().sub_(largest.float().unsqueeze(1)).div_(settings.temperature).exp_().double()
    rank = torch.arange(candidates, device=logits.device).unsqueeze(0)
    within_k = rank < settings.top_k
    ends = weights.cumsum(-1)
    k_mass = ends.gather(1, (settings.top_k - 1).clamp(max=candidates - 1))
    bound = settings.top_p * k_mass
    nucleus = within_k & ((ends - weights < bound) | (settings.top_p >= 1.0) | (rank == 0))
    enough = nucleus.sum(-1) <= trusted
    if candidates < logits.shape[1]:
        enough &= settings.top_k.squeeze(1) <= trusted
    kept = weights * (nucleus & (weights >= settings.min_p))
    by_id, order = ids.sort(dim=-1)
    cumulated = kept.gather(1, order).cumsum_(-1)
    target = settings.uniforms * cumulated[:, -1:]
    place = torch.searchsorted(cumulated, target, right=True).clamp_(max=candidates - 1)
    return by_id.gather(1, place).squeeze(1), enough


def _ordered_candidates(logits: torch.Tensor, candidates: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and ids [R, candidates] by falling logit and rising id, and how many are certain [R].

    `topk` chooses freely among logits equal to its last one, so only those above it are certain; but where that is
    -inf, as in a row whose mask leaves few tokens, whatever else there is has no weight either.
    """
    if candidates == logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, ids, torch.full((logits.shape[0],), candidates, device=logits.device)
    values, ids = logits.topk(candidates)
    trusted = (values > values[:, -1:]).sum(-1).masked_fill_(values[:, -1] == float("-inf"), candidates)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order), trusted
