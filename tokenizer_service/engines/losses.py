"""Why an engine that had a request does not finish it: what the sink is told, and the names that metrics use.

Must not know: engines, what is done about it.
"""

from tokenizer_service.engines.refusal import Refusal, RefusalCode

LOST = Refusal(RefusalCode.UNAVAILABLE, "the connection to the engine was lost", retry_after_s=1.0)
HUNG = Refusal(RefusalCode.UNAVAILABLE, "the engine stopped answering", retry_after_s=1.0)


def is_full(refusal: Refusal) -> bool:
    """A queue that is full now: the engine says when to try again. A slow reader, say, is told no such time."""
    return refusal.code is RefusalCode.RESOURCE_EXHAUSTED and refusal.retry_after_s is not None


def reason_of(refusal: Refusal) -> str:
    """`lost`, `hang`, `full`, or `ended`: the engine gave the request up, since it stops or its process died."""
    if refusal is LOST:
        return "lost"
    if refusal is HUNG:
        return "hang"
    return "full" if is_full(refusal) else "ended"


def is_failure(refusal: Refusal) -> bool:
    """Whether it speaks against the engine: not a client's mistake, a passed deadline, a cancel or a full queue."""
    return refusal.code in (RefusalCode.UNAVAILABLE, RefusalCode.INTERNAL, RefusalCode.UNKNOWN, RefusalCode.DATA_LOSS)
