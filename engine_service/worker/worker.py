"""Executes plans on one device and returns results: the owner of model, KV pool and token buffers.

Must not know: the scheduler, the network, text.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from engine_service.core.outcome import PositionLogprobs
from engine_service.core.plan import Chunk, Failure, Plan, PromptLogprobs, Result
from engine_service.grammar.row_grammars import RowGrammars
from engine_service.worker.backend import ModelRunner, StepLogits
from engine_service.worker.config import WorkerInfo
from engine_service.worker.input_batch import InputBatch, StepInput
from engine_service.worker.logits import find_peaks
from engine_service.worker.logprobs import LogprobRows, logprob_rows
from engine_service.worker.lora.adapter import Adapter, LinearShapes
from engine_service.worker.lora.adapter_files import read_adapter
from engine_service.worker.ranks import OtherRanks
from engine_service.worker.sampled import Sampled
from engine_service.worker.sampler import Sampler
from engine_service.worker.sampling_rows import TokenMasks
from engine_service.worker.scored_pieces import ScoredPiece, cut
from engine_service.worker.transfer import Fetched, SampledLists, Transfer
from engine_service.worker.verification import DraftRows, Verified, draft_rows, verify

MAX_PLANS_IN_FLIGHT = 2
_NOT_FINITE = "the model's logits were not finite"
_NOTHING_LEFT = (
    "no token is left to choose: the allowed and banned tokens, bad words and structured output of the request "
    "exclude all of them"
)


@dataclass(frozen=True, slots=True)
class AdapterRules:
    """What adapters must fit: the model's linear layers, and the largest rank."""

    shapes: LinearShapes
    max_rank: int


@dataclass(frozen=True, slots=True)
class _Scored:
    """Log probabilities of prompt tokens at `start`, `start + 1`, ..., and whether the logits of each were sound."""

    request_id: int
    start: int
    rows: LogprobRows
    sound: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Launched:
    """A plan that was given to the device; what it gives may still be computed there.

    `sampled` is of the requests in `request_ids`, `logprobs` of those among them that have their number in
    `with_logprobs`. `drafts`: the rows among them that verify a draft. `off_grammar`: the requests that cannot follow
    their grammar, and why.
    """

    step: int
    request_ids: tuple[int, ...] = ()
    sampled: Fetched | None = None
    with_logprobs: tuple[int, ...] = ()
    logprobs: LogprobRows | None = None
    scored: tuple[_Scored, ...] = ()
    off_grammar: dict[int, str] = field(default_factory=dict)
    drafts: tuple[DraftRows, ...] = ()


class Worker:
    """Runs plans in the order they are submitted; not to be used from two threads at once.

    A second plan may be submitted before the result of the first is read: it finds the first one's tokens
    in the worker's own buffers.
    """

    def __init__(
        self,
        info: WorkerInfo,
        runner: ModelRunner,
        batch: InputBatch,
        sampler: Sampler,
        grammars: RowGrammars,
        ranks: OtherRanks,
        transfer: Transfer,
        adapter_rules: AdapterRules | None = None,
    ) -> None:
        """Without `adapter_rules` no adapters are served."""
        self.info = info
        self._adapter_rules = adapter_rules
        self._runner = runner
        self._batch = batch
        self._sampler = sampler
        self._grammars = grammars
        self._ranks = ranks
        self._transfer = transfer
        self._launched: deque[_Launched] = deque()

    @property
    def runs_ahead(self) -> bool:
        """Whether `submit` returns before the device has computed: then an overlapped loop needs no thread."""
        return self._transfer.runs_ahead

    def submit(self, plan: Plan) -> None:
        """Start a step. On a CPU it is complete when this returns."""
        if len(self._launched) >= MAX_PLANS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_PLANS_IN_FLIGHT} plans are in flight; read a result first")
        try:
            with torch.inference_mode():
                self._execute(plan)
        except RuntimeError as error:
            raise self._ranks.explain(error) from error

    def result(self) -> Result:
        """The result of the oldest submitted plan; waits for the device."""
        launched = self._launched.popleft()
        failures = {part.request_id: _NOT_FINITE for part in launched.scored if not bool(part.sound.all())}
        tokens: list[tuple[int, int]] = []
        verified = Verified()
        if launched.sampled is not None:
            sampled = launched.sampled()
            bad = _bad_rows(sampled)
            verified = verify(launched.drafts, sampled.token_ids, bad)
            failures |= {launched.request_ids[row]: bad[row] for row in bad if row not in verified.void}
            tokens = list(zip(launched.request_ids, sampled.token_ids, strict=True))
            if launched.drafts:
                others = verified.before | verified.void
                tokens = [pair for row, pair in enumerate(tokens) if row not in others]
                self._move_grammars(verified, dict(tokens), launched.drafts)
        failures |= launched.off_grammar
        clients = launched.off_grammar.keys()
        return Result(
            launched.step,
            tuple(pair for pair in tokens if pair[0] not in failures) if failures else tuple(tokens),
            tuple(
                Failure(name, message, name in clients or message is _NOTHING_LEFT)
                for name, message in failures.items()
            ),
            _logprobs(launched, failures, verified.void),
            tuple(
                PromptLogprobs(part.request_id, part.start, part.rows.entries())
                for part in launched.scored
                if part.request_id not in failures
            ),
            tuple(part for part in verified.accepted if part[0] not in failures),
        )

    def read_adapter(self, folder: Path) -> Adapter:
        """The adapter in a PEFT folder. ValueError, without the path, for one that cannot be served. In any thread."""
        if self._adapter_rules is None:
            raise ValueError("this engine serves no adapters")
        return read_adapter(folder, self._adapter_rules.shapes, self._adapter_rules.max_rank)

    def install_adapter(self, number: int, adapter: Adapter) -> None:
        """Requests may have the adapter from now on, by this number, which none has now; 1 or more. MemoryError where
        the device has no room for it; nothing of it is kept then."""
        try:
            with torch.inference_mode():
                self._runner.install_adapter(number, adapter)
        except (RuntimeError, MemoryError) as error:
            # What torch and the kernels raise where memory ends. A device that fails otherwise fails in the next step.
            self._runner.drop_adapter(number)
            raise MemoryError(f"adapter {number} could not be installed") from error

    def drop_adapter(self, number: int) -> None:
        """No request has the adapter any more."""
        self._runner.drop_adapter(number)

    def _move_grammars(self, verified: Verified, last: dict[int, int], drafts: tuple[DraftRows, ...]) -> None:
        accepted = dict(verified.accepted)
        for rows in drafts:
            name = rows.request_id
            self._grammars.verified(name, (*accepted.get(name, ()), last[name]))

    def close(self) -> None:
        """Forget what is in flight and free what the backend holds."""
        self._launched.clear()
        self._ranks.close()
        self._runner.close()

    def _execute(self, plan: Plan) -> None:
        self._ranks.start(plan)
        self._transfer.begin_step()
        self._batch.take(plan)
        self._grammars.take(plan)
        if plan.copies:
            self._runner.copy_blocks(plan.copies)
        pieces, chunks = self._cut(plan)
        scored = tuple(part for piece in pieces if (part := self._score(piece)) is not None)
        self._launched.append(self._launch(plan.step, chunks, scored))

    def _cut(self, plan: Plan) -> tuple[list[ScoredPiece], tuple[Chunk, ...]]:
        if not self._batch.has_scored_prompts:
            return [], plan.chunks
        return cut(plan.chunks, self._batch.scored_prompt)

    def _score(self, piece: ScoredPiece) -> _Scored | None:
        """Compute a piece of a prompt; None when none of its positions is scored."""
        step, following = self._batch.piece_input(piece)
        output = self._runner.run(step, best_only=False)
        count = len(following)
        if count == 0:
            return None
        assert output.logits is not None
        rows = torch.arange(count, device=output.logits.device)
        logprobs = logprob_rows(output.logits, rows, following, np.full(count, piece.wanted))
        sound = find_peaks(output.logits).sound if output.best is None else output.best >= 0
        return _Scored(piece.chunk.request_id, piece.first_scored + 1, logprobs, sound)

    def _launch(self, number: int, chunks: tuple[Chunk, ...], scored: tuple[_Scored, ...]) -> _Launched:
        """Forward pass and sampling; no tokens when no chunk reaches its request's last token."""
        if not chunks:
            return _Launched(number, scored=scored)
        step = self._batch.step_input(chunks)
        wanted = step.num_logprobs
        ruled = self._grammars.places(step.request_ids)
        best_only = step.sampling.is_plain_greedy and wanted is None and not ruled
        output = self._runner.run(step, best_only=best_only)
        if not step.request_ids:
            return _Launched(number, scored=scored)
        # The pass is under way: a device computes while the masks are made here.
        drafts = draft_rows(chunks)
        step = self._masked(step, ruled, drafts) if ruled else step
        sampled = self._sample(output, step, best_only)
        self._ranks.store(sampled.token_ids)
        self._batch.store(step, sampled.token_ids)
        if ruled:
            drafting = {rows.request_id for rows in drafts}
            self._grammars.sampled([pair for pair in ruled if pair[1] not in drafting], sampled.token_ids.tolist)
        off_grammar = self._grammars.failures(step.request_ids)
        fetched = self._transfer.fetch(sampled)
        if wanted is None:
            return _Launched(number, step.request_ids, fetched, (), None, scored, off_grammar, drafts)
        assert output.logits is not None
        index = np.flatnonzero(wanted >= 0)
        rows = self._transfer.upload(index)
        logprobs = logprob_rows(output.logits, rows, sampled.token_ids[rows], wanted[index])
        numbers = tuple(index.tolist())
        return _Launched(number, step.request_ids, fetched, numbers, logprobs, scored, off_grammar, drafts)

    def _masked(self, step: StepInput, ruled: list[tuple[int, int]], drafts: tuple[DraftRows, ...]) -> StepInput:
        """The step with the masks of the rows that have a grammar."""
        places, bits = self._grammars.masks(ruled, {rows.request_id: rows.draft for rows in drafts})
        masks = TokenMasks(places, torch.from_numpy(bits)) if len(places) else None
        return replace(step, sampling=replace(step.sampling, masks=masks))

    def _sample(self, output: StepLogits, step: StepInput, best_only: bool) -> Sampled:
        if best_only and output.best is not None:
            return Sampled(output.best.clamp(min=0), output.best >= 0)
        assert output.logits is not None
        return self._sampler.sample(output.logits, step.sampling, output.best)


def _bad_rows(sampled: SampledLists) -> dict[int, str]:
    """The rows that got no token, and why. A message stands for its reason: it is compared by identity."""
    sound = sampled.sound
    has_choice = sound if sampled.has_choice is None else sampled.has_choice
    return {
        row: _NOTHING_LEFT if is_sound else _NOT_FINITE
        for row, (is_sound, is_left) in enumerate(zip(sound, has_choice, strict=True))
        if not (is_sound and is_left)
    }


def _logprobs(
    launched: _Launched, failures: dict[int, str], void: frozenset[int]
) -> tuple[tuple[int, PositionLogprobs], ...]:
    if launched.logprobs is None:
        return ()
    names, rows = launched.request_ids, launched.with_logprobs
    entries = zip(rows, launched.logprobs.entries(), strict=True)
    return tuple((names[row], entry) for row, entry in entries if row not in void and names[row] not in failures)
