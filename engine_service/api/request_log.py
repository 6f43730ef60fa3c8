"""The log's lines about requests that have ended: one for each sample, and another for one that took too long.

Must not know: the engine, protobuf, gRPC calls. The lines hold no token and no text.
"""

from typing import Any

import structlog

from engine_service.api.live_request import LiveRequest
from engine_service.core.outcome import Finish
from engine_service.loop.messages import RequestTiming
from service_runtime.slow_requests import SlowRequests


class RequestLog:
    """`slow` says which requests took too long."""

    def __init__(self, slow: SlowRequests) -> None:
        self._slow = slow
        self._log = structlog.get_logger()

    def ended(self, live: LiveRequest, finish: Finish, timing: RequestTiming | None, seconds: float) -> None:
        """A sample has ended, `seconds` after it was submitted. `timing`: unset if the engine told none."""
        submission = live.submission
        fields: dict[str, Any] = {
            "request_id": submission.name,
            "sample": live.index,
            "reason": finish.reason.value,
            "code": finish.error.code.value if finish.error else None,
            "prompt_tokens": finish.prompt_tokens,
            "completion_tokens": finish.completion_tokens,
            "cached_tokens": finish.cached_tokens,
            "seconds": round(seconds, 6),
            "queue_s": _rounded(timing.queue_s if timing else None),
            "prefill_s": _rounded(timing.prefill_s if timing else None),
            "decode_s": _rounded(timing.decode_s if timing else None),
            "preemptions": timing.preemptions if timing else None,
            **submission.trace.log_fields,
        }
        self._log.info("request finished", **fields)
        if self._slow.is_slow(fields["seconds"]):
            self._slow.tell(lambda: fields)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
