"""The requests a worker holds, and the flattened input of a step made from them.

Must not know: the model, the scheduler, how a token is drawn.

Everything is kept by row: one row per request in arrays of a fixed size. The token ids lie on the device,
so that a token just sampled is input of the next step before the host has seen it. Per step the host
handles N chunks and, in numpy, T tokens; never the context.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from engine_service.core.plan import Chunk, NewRequest, Plan
from engine_service.worker.attention import BatchLayout
from engine_service.worker.row_settings import RowSettings
from engine_service.worker.sampling_rows import SamplingRows
from engine_service.worker.scored_pieces import ScoredPiece, ScoredPrompt
from engine_service.worker.transfer import DirectTransfer, Upload

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The sizes the arrays are made for."""

    max_num_requests: int
    max_model_len: int
    block_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step, ready to run: T tokens, of which R rows give logits and sample.

    `input_ids`, `positions` int64 [T]; `sample_rows` int64 [R] are batch rows in plan order;
    `token_places` int64 [R] say where in the token buffer each sampled token goes. `request_ids`: whose each row is; a
    draft's rows are neighbours. `num_logprobs` int64 [R]: how many most likely tokens to report with a row's log
    probability, -1 for none at all; None: for no row.
    `adapters` int32 [T], on the host: the number of each token's adapter, 0: none; None: of no token.
    """

    layout: BatchLayout
    input_ids: torch.Tensor
    positions: torch.Tensor
    sample_rows: torch.Tensor
    token_places: torch.Tensor
    sampling: SamplingRows
    request_ids: tuple[int, ...]
    num_logprobs: IntArray | None = None
    adapters: npt.NDArray[np.int32] | None = None


class InputBatch:
    """The state of all running requests; `take` moves it by one plan."""

    def __init__(
        self,
        limits: BatchLimits,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        upload: Upload | None = None,
    ) -> None:
        """`upload` brings a step's arrays to the device; None: as plain copies."""
        rows = limits.max_num_requests
        self._limits = limits
        self._to_device = upload or DirectTransfer(device).upload
        self._row_of: dict[int, int] = {}
        self._free_rows = list(range(rows - 1, -1, -1))
        # One place more than a request may compute: the last sampled token is stored but never fed.
        self._row_length = limits.max_model_len + 1
        self._tokens = torch.zeros(rows * self._row_length, dtype=torch.int32, device=device)
        self._blocks = np.zeros((rows, -(-limits.max_model_len // limits.block_size)), dtype=np.int32)
        self._settings = RowSettings(rows, limits.vocab_size, frozenset(eos_token_ids), device)
        # Only rows that ask for it have an entry: the others pay nothing.
        self._scored: dict[int, ScoredPrompt] = {}
        self._adapters: dict[int, int] = {}

    @property
    def num_requests(self) -> int:
        return len(self._row_of)

    def take(self, plan: Plan) -> None:
        """Forget, take in and extend requests as the plan says."""
        for request_id in plan.dropped:
            self._drop(request_id)
        for request in plan.new:
            self._add(request)
        for chunk in plan.chunks:
            if chunk.new_block_ids:
                first = -(-chunk.start // self._limits.block_size)
                self._set_blocks(self._row_of[chunk.request_id], first, chunk.new_block_ids)
            if chunk.draft:
                self._write_draft(chunk)

    @property
    def has_scored_prompts(self) -> bool:
        return bool(self._scored)

    def scored_prompt(self, request_id: int) -> ScoredPrompt | None:
        """What a request still wants to know of its prompt, if anything."""
        return self._scored.get(self._row_of[request_id])

    def step_input(self, chunks: tuple[Chunk, ...]) -> StepInput:
        """The input of a step of these chunks, one or more."""
        count = len(chunks)
        rows = np.fromiter((self._row_of[chunk.request_id] for chunk in chunks), np.int64, count)
        starts = np.fromiter((chunk.start for chunk in chunks), np.int64, count)
        lengths = np.fromiter((chunk.length for chunk in chunks), np.int64, count)
        query_start = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(lengths, out=query_start[1:])
        token_rows = np.repeat(rows, lengths)
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)
        ends = starts + lengths
        token_index = self._to_device(token_rows * self._row_length + positions)
        sampling = _sampling_places(chunks, query_start)
        sampling_rows, following = token_rows[sampling], positions[sampling] + 1
        samplers = [chunk for chunk in chunks if chunk.samples for _ in range(1 + len(chunk.draft))]
        return StepInput(
            layout=self._layout(rows, token_rows, positions, query_start, ends),
            input_ids=self._tokens.index_select(0, token_index).long(),
            positions=self._to_device(positions),
            sample_rows=self._to_device(sampling),
            token_places=self._to_device(sampling_rows * self._row_length + following),
            sampling=self._settings.gather(samplers, sampling_rows, following, self._tokens, self._row_length),
            request_ids=tuple([chunk.request_id for chunk in samplers]),
            num_logprobs=self._settings.num_logprobs(sampling_rows),
            adapters=self._adapters_of(rows, lengths),
        )

    def piece_input(self, piece: ScoredPiece) -> tuple[StepInput, torch.Tensor]:
        """A step of this piece alone, with logits at its scored positions, and the tokens after those, int64."""
        chunk = piece.chunk
        first, end = piece.first_scored - chunk.start, chunk.length
        begin = self._row_of[chunk.request_id] * self._row_length + chunk.start + 1
        step = replace(self.step_input((chunk,)), sample_rows=self._to_device(np.arange(first, end)))
        return step, self._tokens[begin + first : begin + end].long()

    def store(self, step: StepInput, token_ids: torch.Tensor) -> None:
        """Append the sampled tokens, int64 [R], to their requests, on the device."""
        self._tokens.index_copy_(0, step.token_places, token_ids.int())

    def _drop(self, request_id: int) -> None:
        """A request that was never sent here (dropped while it waited) is no error."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._settings.forget(row)
            for kept in (self._scored, self._adapters):
                kept.pop(row, None)
            self._free_rows.append(row)

    def _add(self, request: NewRequest) -> None:
        if request.request_id in self._row_of:
            raise RuntimeError(f"plan sends request {request.request_id} twice")
        row = self._free_rows.pop()
        self._row_of[request.request_id] = row
        begin = row * self._row_length
        ids = np.array(request.token_ids, dtype=np.int32)
        self._tokens[begin : begin + len(ids)] = self._to_device(ids)
        self._set_blocks(row, 0, request.block_ids)
        if request.adapter:
            self._adapters[row] = request.adapter
        self._settings.set(row, request)
        self._set_scored(row, request)

    def _set_scored(self, row: int, request: NewRequest) -> None:
        sampling = request.sampling
        first = max(1, request.known_prompt_logprobs)  # nothing comes before the first prompt token
        if sampling.prompt_logprobs is not None and first < request.prompt_length:
            self._scored[row] = ScoredPrompt(first, request.prompt_length, sampling.prompt_logprobs)

    def _set_blocks(self, row: int, first: int, block_ids: tuple[int, ...]) -> None:
        self._blocks[row, first : first + len(block_ids)] = block_ids

    def _write_draft(self, chunk: Chunk) -> None:
        """Guessed tokens stand where the right ones will: the samples of the step replace them all."""
        begin = self._row_of[chunk.request_id] * self._row_length + chunk.start + 1
        self._tokens[begin : begin + len(chunk.draft)] = self._to_device(np.array(chunk.draft, dtype=np.int32))

    def _layout(
        self,
        rows: IntArray,
        token_rows: IntArray,
        positions: IntArray,
        query_start: IntArray,
        seq_lens: IntArray,
    ) -> BatchLayout:
        size = self._limits.block_size
        slots = self._blocks[token_rows, positions // size].astype(np.int64) * size + positions % size
        width = -(-int(seq_lens.max()) // size)
        query_lens = np.diff(query_start)
        return BatchLayout(
            slot_mapping=self._to_device(slots),
            query_start=self._to_device(query_start.astype(np.int32)),
            seq_lens=self._to_device(seq_lens.astype(np.int32)),
            block_tables=self._to_device(self._blocks[rows, :width]),
            query_lens_list=query_lens.tolist(),
            seq_lens_list=seq_lens.tolist(),
        )

    def _adapters_of(self, rows: IntArray, lengths: IntArray) -> npt.NDArray[np.int32] | None:
        if not self._adapters:
            return None
        numbers = np.array([self._adapters.get(row, 0) for row in rows.tolist()], dtype=np.int32)
        return np.repeat(numbers, lengths) if numbers.any() else None


def _sampling_places(chunks: tuple[Chunk, ...], query_start: IntArray) -> IntArray:
    """Places in the flattened step whose tokens sample: the last of a chunk that does, and those of its draft."""
    count = len(chunks)
    samples = np.fromiter((chunk.samples for chunk in chunks), np.bool_, count)
    last = query_start[1:][samples] - 1
    drafted = [len(chunk.draft) for chunk in chunks if chunk.samples]
    if not any(drafted):
        return last
    numbers = np.array(drafted) + 1
    within = np.arange(numbers.sum()) - np.repeat(np.cumsum(numbers), numbers)
    return np.repeat(last + 1, numbers) + within
