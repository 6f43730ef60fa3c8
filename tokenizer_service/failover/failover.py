"""Carries requests over from an engine that cannot finish them to another one, so that their streams just go on.

Must not know: grpc, text, how a replica is chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tokenizer_service.engines.messages import ReplicaStream, TokenSink, TokenStream, TokenSubmission
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.failover.backoff import Backoff
from tokenizer_service.failover.carried_request import CarriedRequest
from tokenizer_service.failover.engine_ids import EngineIds
from tokenizer_service.failover.retry_budget import RetryBudget


@dataclass(frozen=True, slots=True)
class FailoverLimits:
    """Of one request, or of one sample once they part.

    `max_attempts`: further engines in a row that may fail it without a new token; in all, 4 times as many.
    `wait_s`: seconds without an engine that takes it.
    """

    max_attempts: int = 3
    wait_s: float = 30.0
    backoff: Backoff = field(default_factory=lambda: Backoff(0.05, 1.0))

    @property
    def max_attempts_in_all(self) -> int:
        return 4 * self.max_attempts


class FailoverObserver(Protocol):
    """Told for metrics. What is counted is a request, or a sample of it once they part."""

    def on_resumed(self, reason: str, num_tokens: int) -> None:
        """An engine took over what another one lost, and why; so many of its tokens were generated before."""

    def on_given_up(self, cause: str) -> None:
        """Nobody goes on with it: `attempts`, `budget`, `no_engine` or `other_model`."""


class Chooser(Protocol):
    """The router, as far as it is needed here."""

    def submit(
        self, submission: TokenSubmission, sink: TokenSink, avoid: frozenset[str] = frozenset()
    ) -> ReplicaStream | Refusal:
        """Hands a generation to a replica; to one that `avoid` names only if there is no other."""
        ...


@dataclass(frozen=True, slots=True)
class Failover:
    """`jitter` gives numbers in [0, 1). Everything happens on the event loop."""

    router: Chooser
    limits: FailoverLimits
    budget: RetryBudget
    ids: EngineIds
    observer: FailoverObserver
    jitter: Callable[[], float]

    def submit(self, submission: TokenSubmission, sink: TokenSink) -> TokenStream | Refusal:
        """Hands a generation to an engine, and to another when that one is lost.

        `sink` is told `on_lost` only when nobody goes on with it. Its seed must be set: without, nobody could.
        """
        assert submission.sampling.seed is not None
        self.budget.earn()
        request = CarriedRequest(self, submission, sink)
        return request.start() or request
