"""One small generation before the engine says that it is ready: a prefill and a decode, as the loop's plans run them.

What a first step loads, compiles or finds broken is found before a client waits for it. Must not know: the
scheduler (nothing of this is left in its counters or in the prefix index), torch.
"""

from engine_service.core.plan import Chunk, NewRequest, Plan, Result
from engine_service.core.sampling import SamplingParams
from engine_service.loop.worker_protocol import Worker

_PROMPT_TOKENS = 8
_REQUEST_ID = 0
"""The front's ids begin at 1."""


class NoAnswer(ValueError):
    """The worker computes, but gives no token."""


def warm_up(worker: Worker, *, block_size: int, num_blocks: int, max_model_len: int, step_token_budget: int) -> None:
    """Uses the first blocks of the pool, which must be free. Raises NoAnswer and what the worker raises."""
    slots = min(block_size * num_blocks, max_model_len - 1)  # the last token is never computed
    length = max(1, min(_PROMPT_TOKENS, slots - 1, step_token_budget))
    blocks = tuple(range(-(-min(slots, length + 1) // block_size)))
    sampling = SamplingParams(max_tokens=2, seed=0, temperature=0.0, ignore_eos=True)
    new = NewRequest(_REQUEST_ID, (0,) * length, length, blocks, sampling)
    _answer(worker, Plan(0, (Chunk(_REQUEST_ID, 0, length, (), True),), (new,)))
    if slots > length:
        _answer(worker, Plan(0, (Chunk(_REQUEST_ID, length, 1, (), True),)))
    _run(worker, Plan(0, (), (), (_REQUEST_ID,)))


def _answer(worker: Worker, plan: Plan) -> None:
    result = _run(worker, plan)
    if len(result.sampled) != 1:
        reason = result.failures[0].message if result.failures else "no token was sampled"
        raise NoAnswer(f"the model does not answer: {reason}")


def _run(worker: Worker, plan: Plan) -> Result:
    worker.submit(plan)
    return worker.result()
