"""One request on its way over the engines: the tokens so far, and which engine has which of its samples.

Must not know: grpc, text, how a replica is chosen, other requests.
"""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from service_runtime.tracing import Attributes, trace_id_of
from tokenizer_service.engines.losses import is_full
from tokenizer_service.engines.messages import ReplicaStream, TokenNews, TokenSink, TokenSubmission
from tokenizer_service.engines.refusal import Refusal, RefusalCode, deadline_passed
from tokenizer_service.failover.carried_part import Part
from tokenizer_service.failover.resumption import SampleSoFar, groups_of, is_of_resumption, rest_of

if TYPE_CHECKING:
    from tokenizer_service.failover.failover import Failover

_log = structlog.get_logger()
_CANCELLED = Refusal(RefusalCode.CANCELLED, "the request was cancelled")
_OTHER_MODEL = Refusal(RefusalCode.UNAVAILABLE, "the engine was lost, and the others serve another model")
_CANNOT_GO_ON = Refusal(RefusalCode.UNAVAILABLE, "the engine was lost, and no other can go on with the request")


class CarriedRequest:
    """A TokenStream for the session; `start` it once."""

    def __init__(self, failover: "Failover", submission: TokenSubmission, sink: TokenSink) -> None:
        self._failover = failover
        self._submission = submission
        self._sink = sink
        self._samples = [SampleSoFar() for _ in range(submission.sampling.num_samples)]
        self._parts: set[Part] = set()
        self._weights = ""  # of the first engine
        self._is_over = False
        self._engines: list[str] = []

    @property
    def engines(self) -> tuple[str, ...]:
        return tuple(self._engines)

    def start(self) -> Refusal | None:
        """Hands the request to an engine, or says why there is none."""
        part = Part(self, tuple(range(len(self._samples))))
        stream = self._hand_over(part)
        if isinstance(stream, Refusal):
            return stream
        self._weights = stream.model.weights_fingerprint
        self._engines.append(stream.replica)
        self._parts.add(part)
        return None

    def replicas(self) -> tuple[str, ...]:
        return tuple(sorted({part.stream.replica for part in self._parts if part.stream is not None}))

    def cancel(self, index: int | None = None) -> None:
        for place, sample in enumerate(self._samples):
            sample.is_cancelled |= index is None or index == place
        for part in tuple(self._parts):
            if index is not None and index not in part.places:
                continue
            if part.stream is None:
                self._drop_cancelled(part)
            else:
                part.stream.cancel(None if index is None else part.places.index(index))

    def close(self) -> None:
        self._is_over = True
        for part in self._parts:
            part.end()
        self._parts.clear()

    def take(self, part: Part, news: TokenNews) -> None:
        """News of one of the part's samples."""
        place = part.places[news.index]
        sample = self._samples[place]
        if news.token_ids:
            if not sample.token_ids:
                sample.cached_tokens = news.cached_tokens
            sample.token_ids.extend(news.token_ids)
            if part.lost_at is not None:
                part.note_progress()
        if news.finish is not None:
            refusal = news.finish.refusal
            if refusal is not None and self._may_go_on(refusal) and not sample.is_cancelled:
                if news.token_ids:
                    self._sink.on_news(news._replace(index=place, finish=None))
                self.lost(part, refusal)
                return
            if refusal is not None and is_of_resumption(refusal):
                self._give_up(part, _CANNOT_GO_ON, "attempts")
                return
            news = news._replace(finish=sample.finish(news.finish))
        self._sink.on_news(news if place == news.index else news._replace(index=place))

    def lost(self, part: Part, refusal: Refusal) -> None:
        """The engine of this part will not finish it."""
        part.end()
        self._parts.discard(part)
        if self._is_over:
            return
        self._drop_cancelled(part)
        groups = groups_of(self._samples, part.places)
        if not groups:
            return
        if not self._may_go_on(refusal):
            self.close()
            self._sink.on_lost(refusal)
            return
        part.note_loss(refusal, asyncio.get_running_loop().time())
        if self._is_exhausted(part):
            self._give_up(part, refusal, "attempts")
            return
        for group in groups:
            heir = part.heir(group)
            self._parts.add(heir)
            # Where a queue is full, another engine is asked at once; those of a lost engine do not storm the others.
            self._schedule(heir, at_once=is_full(refusal))

    def _is_exhausted(self, part: Part) -> bool:
        limits = self._failover.limits
        return part.attempts > limits.max_attempts or part.losses > limits.max_attempts_in_all

    def _may_spend(self, part: Part) -> bool:
        """One that was begun and finds queues full keeps asking, at the pace of the backoff, on the same retry."""
        return (part.reason == "full" and self._has_begun(part)) or self._failover.budget.spend()

    def _has_begun(self, part: Part) -> bool:
        """Whether an engine had it and was lost: then it waits for room. A new request is refused at once."""
        return part.losses > 0 or self._has_tokens(part)

    def _has_tokens(self, part: Part) -> bool:
        return any(self._samples[place].token_ids for place in part.places)

    def _has_waited(self, part: Part) -> bool:
        now = asyncio.get_running_loop().time()
        return part.lost_at is not None and now - part.lost_at >= self._failover.limits.wait_s

    def _schedule(self, part: Part, *, at_once: bool) -> None:
        delay_s = 0.0
        if not at_once:
            delay_s = self._failover.limits.backoff.pause(part.polls, self._failover.jitter())
            part.polls += 1
        part.timer = asyncio.get_running_loop().call_later(delay_s, self._try, part)

    def _try(self, part: Part) -> None:
        """Looks for an engine for a part that waits; waits on when there is none."""
        part.timer = None
        deadline = self._submission.deadline
        if deadline is not None and asyncio.get_running_loop().time() >= deadline:
            self.close()
            self._sink.on_lost(deadline_passed())
            return
        stream = self._hand_over(part)
        if isinstance(stream, Refusal):
            if part.refusal is not None and _has_no_adapter(part.refusal) and not self._has_tokens(part):
                self._give_up(part, part.refusal, "no_engine")
            else:
                self._wait_on(part, stream)
        elif stream.replica in part.full:
            self._withdraw(part, stream)
            assert part.refusal is not None
            if not self._has_begun(part):
                self.close()
                self._sink.on_lost(part.refusal)
            else:
                part.full = frozenset()
                self._wait_on(part, part.refusal)
        elif stream.model.weights_fingerprint != self._weights:
            self._withdraw(part, stream)
            self._give_up(part, _OTHER_MODEL, "other_model")
        elif not self._may_spend(part):
            self._withdraw(part, stream)
            assert part.refusal is not None
            self._give_up(part, part.refusal, "budget")
        else:
            self._tell_resumed(part, stream)

    def _withdraw(self, part: Part, stream: ReplicaStream) -> None:
        """Takes the part back from an engine that has not been sent it yet."""
        part.is_over, part.stream = True, None
        stream.close()
        part.is_over = False

    def _hand_over(self, part: Part) -> ReplicaStream | Refusal:
        rest = rest_of(self._submission, self._samples, part.places)
        submission = replace(rest, request_id=self._failover.ids.new(rest.request_id))
        stream = self._failover.router.submit(submission, part, part.avoid | part.full)
        if not isinstance(stream, Refusal):
            part.stream = stream
        return stream

    def _wait_on(self, part: Part, refusal: Refusal) -> None:
        if self._has_waited(part):
            self._give_up(part, refusal, "no_engine")
        else:
            self._schedule(part, at_once=False)

    def _tell_resumed(self, part: Part, stream: ReplicaStream) -> None:
        tokens = sum(len(self._samples[place].token_ids) for place in part.places)
        self._failover.observer.on_resumed(part.reason, tokens)
        self._engines.append(stream.replica)
        _log.warning(
            "request_resumed",
            request_id=self._submission.request_id,
            samples=part.places,
            reason=part.reason,
            engine=stream.replica,
            lost_engines=sorted(part.avoid),
            full_engines=sorted(part.full),
            tokens=tokens,
            **trace_id_of(self._submission.span),
        )
        if part.waits_since is not None:
            now = asyncio.get_running_loop().time()
            facts: Attributes = {"tokenwire.loss": part.reason, "tokenwire.resumed_tokens": tokens}
            self._submission.span.stage("wait for engine", part.waits_since, now, facts)

    def _drop_cancelled(self, part: Part) -> None:
        """The last word to samples that nobody wants, in place of the engine that is gone."""
        for place in part.places:
            sample = self._samples[place]
            if sample.is_open and sample.is_cancelled:
                self._sink.on_news(TokenNews(place, (), sample.aborted(len(self._submission.token_ids), _CANCELLED)))
        if not any(self._samples[place].is_open for place in part.places):
            part.end()
            self._parts.discard(part)

    def _give_up(self, part: Part, refusal: Refusal, cause: str) -> None:
        self._failover.observer.on_given_up(cause)
        _log.warning(
            "request_not_resumed",
            request_id=self._submission.request_id,
            samples=part.places,
            reason=part.reason,
            cause=cause,
            tokens=sum(len(self._samples[place].token_ids) for place in part.places),
            **trace_id_of(self._submission.span),
        )
        self.close()
        self._sink.on_lost(refusal)

    def _may_go_on(self, refusal: Refusal) -> bool:
        """Whether another engine could serve what one did not."""
        return refusal.code is RefusalCode.UNAVAILABLE or is_full(refusal) or _has_no_adapter(refusal)


def _has_no_adapter(refusal: Refusal) -> bool:
    """That an engine has lost the adapter meanwhile is all that it does not find."""
    return refusal.code is RefusalCode.NOT_FOUND
