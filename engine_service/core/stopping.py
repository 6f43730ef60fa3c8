"""When a request has generated enough.

Must not know: text and stop strings, deadlines, queues, torch.
"""

from engine_service.core.outcome import FinishReason
from engine_service.core.request import Request


def finish_reason(request: Request, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Judges the request by its last token, which has just been sampled. None: it goes on.

    A stop token counts as soon as `min_tokens` others were generated before it; the worker does not sample
    one earlier, unless a grammar leaves nothing else: then it counts too. A stop token that is also the last
    token allowed is a stop.
    """
    sampling = request.sampling
    length = len(request.token_ids)
    token = request.token_ids[-1]
    is_stop = token in sampling.stop_token_ids or (token in eos_token_ids and not sampling.ignore_eos)
    may_stop = length - request.prompt_length > sampling.min_tokens or sampling.structured_output is not None
    if is_stop and may_stop:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= request.length_limit else None
