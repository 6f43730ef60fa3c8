"""Edits the logits of rows before a token is chosen: exclusions and biases first, then penalties.

Must not know: requests, plans, how a token is drawn.

For a token that was seen c times in the completion: logit + bias; then, if it was seen in prompt or completion,
divided by the repetition penalty when positive, multiplied by it otherwise; then minus c * frequency penalty;
then minus the presence penalty if c > 0. All in float32, each operation rounded once.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine_service.worker.row_rules import ANY_TOKEN, BadWords
from engine_service.worker.sampling_rows import LogitEdits, RuledRow, SamplingRows, TokenMasks
from engine_service.worker.transfer import DirectTransfer, Upload

_NO_TOKEN = -2  # before the first token of the completion; equals no token and not ANY_TOKEN
_MINUS_INFINITY = float("-inf")
IntArray = npt.NDArray[np.int64]


class LogitEditor:
    """Its only memory are counts, one for each token of as many rows as are edited at once, made when first used,
    and what is added to eight logits for each byte of a mask, [256, 8]."""

    def __init__(self, vocab_size: int, device: torch.device, upload: Upload | None = None) -> None:
        """`upload` brings arrays to the device; None: as plain copies."""
        self._vocab_size = vocab_size
        self._upload = upload or DirectTransfer(device).upload
        self._device = device
        self._counts = torch.zeros(0, device=device)
        bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
        self._offsets_of_byte = torch.from_numpy(np.where(bits, 0.0, _MINUS_INFINITY).astype(np.float32)).to(device)

    def edit(self, logits: torch.Tensor, places: IntArray, rows: SamplingRows) -> None:
        """In place, float32 [N, vocabulary], the rows at the rising `places` among all rows of the step."""
        if rows.masks is not None:
            self._mask(logits, places, rows.masks)
        if rows.edits is not None:
            ruled = _numbered(places, rows.edits)
            self._exclude(logits, ruled, rows.edits.tokens)
        if rows.suppressed is not None:
            self._suppress(logits, places, rows.suppressed, rows.masks)
        if rows.edits is not None:
            self._repetition(logits, ruled, rows.edits.tokens)
            self._presence_and_frequency(logits, ruled, rows.edits.tokens)

    def _mask(self, logits: torch.Tensor, places: IntArray, masks: TokenMasks) -> None:
        here, numbers = _find(places, masks.places)
        if len(here) == 0:
            return
        words = self._upload(masks.bits.numpy()[here])
        # Adding what a table has for each byte takes a twentieth of the time of shifting bits and filling.
        octets = words.view(torch.uint8).flatten().int()
        offsets = self._offsets_of_byte.index_select(0, octets).view(len(here), -1)[:, : self._vocab_size]
        logits.index_add_(0, self._upload(numbers), offsets)

    def _exclude(self, logits: torch.Tensor, ruled: list[tuple[int, RuledRow]], tokens: torch.Tensor) -> None:
        for number, row in ruled:
            if row.rules.offsets is not None:
                logits[number] += row.rules.offsets
            if row.rules.bad_words is not None:
                _end_bad_words(logits[number], row.rules.bad_words, _tail(row, row.rules.bad_words, tokens))

    def _suppress(self, logits: torch.Tensor, places: IntArray, suppressed: IntArray, masks: TokenMasks | None) -> None:
        """Where a mask has left a row nothing but suppressed tokens, they stay."""
        here, numbers = _find(places, suppressed[0])
        if len(here) == 0:
            return
        masked = () if masks is None else np.intersect1d(suppressed[0][here], masks.places)
        kept = [(number, logits[number].clone()) for number in np.searchsorted(places, masked).tolist()]
        pairs = self._upload(np.stack([numbers, suppressed[1][here]]))
        logits[pairs[0], pairs[1]] = _MINUS_INFINITY
        for number, before in kept:
            is_empty = logits[number].max() == _MINUS_INFINITY
            logits[number] = torch.where(is_empty, before, logits[number])

    def _repetition(self, logits: torch.Tensor, ruled: list[tuple[int, RuledRow]], tokens: torch.Tensor) -> None:
        chosen = [(number, row) for number, row in ruled if row.rules.repetition != 1.0]
        if not chosen:
            return
        seen, owners = self._seen(chosen, tokens, skip_prompt=False)
        penalty = self._spread([row.rules.repetition for _, row in chosen], owners)
        flat = logits.view(-1)
        values = flat.index_select(0, seen)
        # A token seen twice is written twice, with the same number.
        flat.index_copy_(0, seen, torch.where(values > 0, values / penalty, values * penalty))

    def _presence_and_frequency(
        self, logits: torch.Tensor, ruled: list[tuple[int, RuledRow]], tokens: torch.Tensor
    ) -> None:
        chosen = [(number, row) for number, row in ruled if row.rules.counts_completion]
        if not chosen:
            return
        seen, owners = self._seen(chosen, tokens, skip_prompt=True)
        counts = self._count(logits.numel(), seen)
        frequency = self._spread([row.rules.frequency for _, row in chosen], owners)
        presence = self._spread([row.rules.presence for _, row in chosen], owners)
        flat = logits.view(-1)
        flat.index_copy_(0, seen, flat.index_select(0, seen) - counts * frequency - presence)

    def _seen(
        self, chosen: Sequence[tuple[int, RuledRow]], tokens: torch.Tensor, *, skip_prompt: bool
    ) -> tuple[torch.Tensor, IntArray]:
        """Where the chosen rows' tokens stand in the flattened logits, and whose each is (its place in `chosen`)."""
        skipped = np.array([row.rules.prompt_length if skip_prompt else 0 for _, row in chosen], dtype=np.int64)
        begins = np.array([row.begin for _, row in chosen], dtype=np.int64) + skipped
        lengths = np.array([row.length for _, row in chosen], dtype=np.int64) - skipped
        owners = np.repeat(np.arange(len(chosen)), lengths)
        within = np.arange(len(owners)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        bases = np.array([number for number, _ in chosen], dtype=np.int64) * self._vocab_size
        index = self._upload(begins[owners] + within)
        return tokens.index_select(0, index).long() + self._upload(bases[owners]), owners

    def _spread(self, values: Sequence[float], owners: IntArray) -> torch.Tensor:
        return self._upload(np.array(values, dtype=np.float32)[owners])

    def _count(self, size: int, seen: torch.Tensor) -> torch.Tensor:
        """How often each of `seen` is in it, float32; the counts are zero before and after."""
        if len(self._counts) < size:
            self._counts = torch.zeros(size, device=self._device)
        self._counts.index_add_(0, seen, torch.ones(1, device=self._device).expand(len(seen)))
        counts = self._counts.index_select(0, seen)
        self._counts.index_fill_(0, seen, 0.0)
        return counts


def _numbered(places: IntArray, edits: LogitEdits) -> list[tuple[int, RuledRow]]:
    """The ruled rows that are among `places`, each with its number there."""
    here, numbers = _find(places, np.array([row.place for row in edits.rows], dtype=np.int64))
    return [(number, edits.rows[place]) for number, place in zip(numbers.tolist(), here.tolist(), strict=True)]


def _find(places: IntArray, wanted: IntArray) -> tuple[IntArray, IntArray]:
    """Which of `wanted` are among the rising `places` (their indices), and at which number each is."""
    numbers = np.searchsorted(places, wanted)
    found = np.flatnonzero(places[np.minimum(numbers, len(places) - 1)] == wanted)
    return found, numbers[found]


def _tail(row: RuledRow, words: BadWords, tokens: torch.Tensor) -> torch.Tensor:
    """The last tokens of the completion, as many as the longest bad word has before its last one; int32 [L]."""
    width = words.before.shape[1]
    count = min(width, row.length - row.rules.prompt_length)
    end = row.begin + row.length
    return torch.cat([tokens.new_full((width - count,), _NO_TOKEN), tokens[end - count : end]])


def _end_bad_words(logits: torch.Tensor, words: BadWords, tail: torch.Tensor) -> None:
    """Excludes the last token of each word whose others are the tail."""
    complete = ((words.before == tail) | (words.before == ANY_TOKEN)).all(dim=1)
    logits.index_add_(0, words.last, torch.where(complete, _MINUS_INFINITY, 0.0))
