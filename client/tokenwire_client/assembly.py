"""Puts the messages of one stream together: deltas as they come, the completion at the end.

Must not know: calls, waiting, cancelling.
"""

from tokenwire.common.v1 import outcome_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client.errors import ErrorCode, IncompleteStream, Internal
from tokenwire_client.types import Completion, Delta, FinishReason, Usage

StreamResponse = pb.GenerateResponse | pb.ChatResponse

_REASONS = {
    outcome_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    outcome_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    outcome_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    outcome_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


class Assembly:
    """State of one stream. `started` turns true with the first message, `completion` is set by `finish`."""

    def __init__(self) -> None:
        self.started = False
        self.completion: Completion | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._terminal: pb.Completion | None = None

    def add(self, response: StreamResponse) -> Delta | None:
        """The news of a message, None when it has none. Raises Internal when it follows the terminal one."""
        self.started = True
        if self._terminal is not None:
            raise Internal(ErrorCode.INTERNAL, "the stream went on after its terminal message")
        if response.HasField("completion"):
            self._terminal = response.completion
        if not response.text and not response.token_ids:
            return None
        delta = Delta(response.text, tuple(response.token_ids))
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        return delta

    def finish(self) -> Completion:
        """At the end of a stream whose status is OK. Raises IncompleteStream without a terminal message."""
        if self._terminal is None:
            tokens = len(self._token_ids)
            raise IncompleteStream(
                ErrorCode.INCOMPLETE_STREAM,
                f"the stream ended after {tokens} tokens without its terminal message",
            )
        self.completion = self._completion(self._terminal)
        return self.completion

    def _completion(self, last: pb.Completion) -> Completion:
        if last.finish_reason not in _REASONS:
            raise Internal(
                ErrorCode.INTERNAL, f"the terminal message has no known finish reason ({last.finish_reason})"
            )
        return Completion(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            finish_reason=_REASONS[last.finish_reason],
            usage=Usage(last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens),
            stop_string=last.stop_string if last.HasField("stop_string") else None,
            stop_token_id=last.stop_token_id if last.HasField("stop_token_id") else None,
            seed=last.seed,
            request_id=last.request_id,
        )
