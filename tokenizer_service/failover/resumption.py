"""What has come of a request so far, sample by sample, and the submission that goes on from there.

Must not know: engines, why a request goes on elsewhere.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tokenizer_service.engines.messages import (
    EngineFinish,
    FinishReason,
    TokenSubmission,
    Usage,
    sample_seed,
)
from tokenizer_service.engines.refusal import Refusal


@dataclass(slots=True)
class SampleSoFar:
    """One sample: its tokens, and how many of the prompt's were cached when it was first admitted.

    `is_resumed`: an engine after the first has some of the tokens from us. `is_open`: its last word has not come.
    `is_cancelled`: nobody wants it any more.
    """

    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    cached_tokens: int = 0
    is_resumed: bool = False
    is_open: bool = True
    is_cancelled: bool = False

    def usage(self, prompt_tokens: int) -> Usage:
        return Usage(prompt_tokens, len(self.token_ids), self.cached_tokens)

    def finish(self, finish: EngineFinish) -> EngineFinish:
        """The engine's last word with what was cached at the first admission, which another engine may have made."""
        self.is_open = False
        if not self.is_resumed:
            return finish
        return replace(finish, usage=replace(finish.usage, cached_tokens=self.cached_tokens))

    def aborted(self, prompt_tokens: int, refusal: Refusal) -> EngineFinish:
        """A last word in place of the engine's."""
        self.is_open = False
        return EngineFinish(FinishReason.ABORT, self.usage(prompt_tokens), refusal=refusal)


def rest_of(submission: TokenSubmission, samples: Sequence[SampleSoFar], places: Sequence[int]) -> TokenSubmission:
    """What is left to do of the samples at `places`: all of them if none has begun, else one."""
    if len(places) == len(samples) and not any(sample.token_ids for sample in samples):
        return submission
    (place,) = places
    seed, tokens = submission.sampling.seed, samples[place].token_ids
    sampling = replace(
        submission.sampling,
        n=1,
        seed=None if seed is None else sample_seed(seed, place),
        # It was told with the first token of the first sample.
        prompt_logprobs=None if place or tokens else submission.sampling.prompt_logprobs,
    )
    samples[place].is_resumed = len(tokens) > 0
    return replace(submission, sampling=sampling, resumed_token_ids=tokens)


def is_of_resumption(refusal: Refusal) -> bool:
    """Whether an engine does not take the tokens so far: no mistake of the client's, who never saw them as such."""
    return any(violation.field.startswith("resumed_token_ids") for violation in refusal.violations)


def groups_of(samples: Sequence[SampleSoFar], places: Sequence[int]) -> list[tuple[int, ...]]:
    """The open ones among `places` in the groups in which they can be submitted."""
    wanted = [place for place in places if samples[place].is_open and not samples[place].is_cancelled]
    if len(wanted) == len(samples) and not any(sample.token_ids for sample in samples):
        return [tuple(wanted)]
    return [(place,) for place in wanted]
