"""What the integration tests ask a SUCC stack again and again."""

from tests.fixtures.checkpoints import SCRIPT_S1_TEXT
from tokenwire_client import AsyncClient, Completion, FinishReason, Sampling

GREEDY = Sampling(temperature=0.0)
# A chain 1001, 1002, ... that meets no script and no end of sequence for thousands of tokens.
FOREVER = [1000]


def forever(max_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=max_tokens)


def forever_ids(count: int) -> tuple[int, ...]:
    return tuple(range(1001, 1001 + count))


async def assert_alive(client: AsyncClient) -> Completion:
    """The probe after every hostile case: "Hello" plays script S1 exactly, within 5 s."""
    completion = await client.generate("Hello", GREEDY, timeout=5).result()
    assert completion.text == SCRIPT_S1_TEXT
    assert completion.finish_reason is FinishReason.STOP
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (1, 12)
    return completion
