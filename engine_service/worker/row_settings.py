"""How each row of the batch is sampled: kept from a request's arrival on, gathered for the rows of a step.

Must not know: where a request's tokens and blocks lie, the model, the scheduler, how a token is drawn.
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from engine_service.core.plan import Chunk, NewRequest
from engine_service.core.token_rules import stop_tokens
from engine_service.worker.philox import uniforms
from engine_service.worker.row_rules import RowRules, make_row_rules
from engine_service.worker.sampling_rows import LogitEdits, RuledRow, SamplingRows

IntArray = npt.NDArray[np.int64]


class RowSettings:
    """One entry per row in arrays of a fixed size; what few rows have is kept for those alone."""

    def __init__(self, num_rows: int, vocab_size: int, eos_token_ids: frozenset[int], device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._device = device
        self._stop_ids: dict[int, IntArray] = {}
        self._seed = np.zeros(num_rows, dtype=np.int64)
        self._temperature = np.zeros(num_rows, dtype=np.float32)
        self._top_k = np.zeros(num_rows, dtype=np.int64)
        self._top_p = np.ones(num_rows, dtype=np.float64)
        self._min_p = np.zeros(num_rows, dtype=np.float32)
        # Only rows that ask for it have an entry: the others pay nothing.
        self._rules: dict[int, RowRules] = {}
        self._newest: tuple[object, RowRules | None] = ((), None)
        self._num_logprobs: dict[int, int] = {}

    def set(self, row: int, request: NewRequest) -> None:
        """The row is this request's from now on."""
        sampling = request.sampling
        self._seed[row] = sampling.seed
        self._temperature[row] = sampling.temperature
        self._top_k[row] = min(sampling.top_k, self._vocab_size)
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        stops = stop_tokens(sampling, self._eos)
        known = sorted(token for token in stops if 0 <= token < self._vocab_size)
        self._stop_ids[row] = np.array(known, dtype=np.int64)
        rules = self._rules_of(request)
        if rules is not None:
            self._rules[row] = rules
        if sampling.logprobs is not None:
            self._num_logprobs[row] = sampling.logprobs

    def forget(self, row: int) -> None:
        for kept in (self._stop_ids, self._rules, self._num_logprobs):
            kept.pop(row, None)

    def gather(
        self, samplers: Sequence[Chunk], rows: IntArray, positions: IntArray, tokens: torch.Tensor, row_length: int
    ) -> SamplingRows:
        """The settings of R sampling rows, int64 [R]; `samplers`: the chunk of each.

        `positions` int64 [R]: the places that the sampled tokens will have, of which their uniform numbers are.
        `tokens`: the token buffer, `row_length` places for each row.
        """
        temperature = self._temperature[rows]
        drawn = uniforms(self._seed[rows], positions) if temperature.any() else np.zeros(len(rows))
        pairs = [
            pair
            for place, (chunk, row) in enumerate(zip(samplers, rows.tolist(), strict=True))
            if not chunk.allow_stop
            for pair in product((place,), self._stop_ids[row].tolist())
        ]
        return SamplingRows(
            temperature=temperature,
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            uniforms=drawn,
            suppressed=np.array(pairs, dtype=np.int64).T.copy() if pairs else None,
            edits=self._edits(rows, positions, tokens, row_length) if self._rules else None,
        )

    def num_logprobs(self, rows: IntArray) -> IntArray | None:
        """How many likeliest tokens to report for each row, int64 [R], -1 for none at all; None: for no row."""
        if not self._num_logprobs:
            return None
        wanted = np.array([self._num_logprobs.get(row, -1) for row in rows.tolist()], dtype=np.int64)
        return wanted if (wanted >= 0).any() else None

    def _rules_of(self, request: NewRequest) -> RowRules | None:
        """Samples of one prompt have the same rules: those of a request are kept until one comes with others, because
        rules about a whole vocabulary take as long as a step."""
        sampling = request.sampling
        key = (
            request.prompt_length,
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.logit_bias,
            sampling.bad_words,
            sampling.banned_token_ids,
            sampling.allowed_token_ids,
        )
        if self._newest[0] != key:
            rules = make_row_rules(sampling, request.prompt_length, self._vocab_size, self._device)
            self._newest = (key, rules)
        return self._newest[1]

    def _edits(self, rows: IntArray, lengths: IntArray, tokens: torch.Tensor, row_length: int) -> LogitEdits | None:
        ruled = tuple(
            RuledRow(place, self._rules[row], row * row_length, length)
            for place, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True))
            if row in self._rules
        )
        return LogitEdits(ruled, tokens) if ruled else None
