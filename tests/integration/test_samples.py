"""Samples, log probabilities and penalties through both services: each sample is what it would be alone."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.fixtures.stack import Stack
from tests.integration.probes import FOREVER, assert_alive
from tokenwire_client import AsyncClient, Completion, FinishReason, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

# At this temperature the checkpoint's next token is nearly any, so samples differ from their first token on.
HOT = Sampling(temperature=30.0, max_tokens=12, seed=11)


@pytest_asyncio.fixture(loop_scope="module")
async def client(succ_stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(succ_stack.target, timeout=120) as client:
        yield client
    await succ_stack.until_idle()


def comparable(completion: Completion) -> Completion:
    """Without what names the request, and without what another request may have left in the cache."""
    usage = replace(completion.usage, cached_tokens=0)
    return replace(completion, request_id="", index=0, prompt_logprobs=(), usage=usage)


def random_sampling(dice: random.Random) -> Sampling:
    return Sampling(
        max_tokens=dice.randint(1, 12),
        temperature=dice.choice([0.0, 5.0, 30.0]),
        seed=dice.choice([dice.getrandbits(63), 2**63 - 2, -1]),
        top_k=dice.choice([None, 5, 500]),
        top_p=dice.choice([None, 0.9]),
        stop=dice.choice([(), ("e",), ("in", "a ", "er")]),
        include_stop_str_in_output=dice.choice([None, True]),
        skip_special_tokens=dice.choice([None, False]),
        repetition_penalty=dice.choice([None, 1.3]),
        frequency_penalty=dice.choice([None, 0.7]),
        presence_penalty=dice.choice([None, -0.5]),
        logit_bias=dice.choice([None, {1000: 20.0, 2: 3.0}]),
        banned_token_ids=dice.choice([(), (2, 1001)]),
        logprobs=dice.choice([None, 0, 3]),
        n=dice.randint(2, 5),
    )


async def check_samples(client: AsyncClient, prompt: list[int], sampling: Sampling) -> None:
    """Several samples at once are the single requests with the following seeds, to the last log probability."""
    together = await client.generate(prompt, sampling).results()
    assert sampling.n == len(together)
    alone = await asyncio.gather(
        *(client.generate(prompt, replace(sampling, n=None, seed=completion.seed)).result() for completion in together)
    )
    assert [comparable(completion) for completion in together] == [comparable(completion) for completion in alone]
    assert sampling.seed is not None
    seeds = [(sampling.seed + place + 2**63) % 2**64 - 2**63 for place in range(len(together))]
    assert [completion.seed for completion in together] == seeds


@pytest.mark.parametrize("seed", range(12))
async def test_each_sample_is_the_single_request_with_its_seed(client: AsyncClient, seed: int) -> None:
    dice = random.Random(seed)
    prompt = [dice.randint(100, 40_000) for _ in range(dice.choice([1, 15, 16, 17, 40]))]
    await check_samples(client, prompt, random_sampling(dice))


@pytest.mark.slow
async def test_hundreds_of_requests_at_once(client: AsyncClient) -> None:
    """Neighbours join and leave all the time; a sample does not notice."""
    dice = random.Random(1)
    places = asyncio.Semaphore(6)

    async def one(prompt: list[int], sampling: Sampling) -> None:
        async with places:
            await check_samples(client, prompt, sampling)

    prompts = [[dice.randint(100, 40_000) for _ in range(dice.randint(1, 40))] for _ in range(250)]
    await asyncio.gather(*(one(prompt, random_sampling(dice)) for prompt in prompts))


async def test_samples_differ_and_stop_by_themselves(client: AsyncClient) -> None:
    """B080."""
    sampling = replace(HOT, n=8, max_tokens=40, stop=["e"])
    completions = await client.generate([19556], sampling).results()
    assert len({completion.text for completion in completions}) > 1
    for completion in completions:
        assert "e" not in completion.text
        if completion.stop_string is not None:
            assert completion.finish_reason is FinishReason.STOP
            assert completion.usage.completion_tokens == len(completion.token_ids) <= 40
    assert len({len(completion.token_ids) for completion in completions}) > 1


async def test_the_bytes_of_the_tokens_are_the_text(client: AsyncClient) -> None:
    sampling = replace(HOT, n=4, max_tokens=30, logprobs=2, skip_special_tokens=False)
    for completion in await client.generate([19556], sampling).results():
        assert len(completion.logprobs) == len(completion.token_ids)
        own = [position.token for position in completion.logprobs if position.token is not None]
        assert [token.token_id for token in own] == list(completion.token_ids)
        joined = b"".join(token.token for token in own)
        assert joined.decode(errors="replace") == completion.text
        for position in completion.logprobs:
            assert [top.logprob for top in position.top] == sorted((t.logprob for t in position.top), reverse=True)
            assert position.rank >= 1
            assert position.token is not None
            assert position.token.logprob <= position.top[0].logprob


async def test_a_prompt_s_log_probabilities_are_the_same_cached_or_not(client: AsyncClient) -> None:
    prompt = list(range(1000, 1100))
    sampling = Sampling(temperature=0, max_tokens=2, prompt_logprobs=3)
    first, second = [await client.generate(prompt, sampling).result() for _ in range(2)]
    assert first.prompt_logprobs == second.prompt_logprobs
    assert [each.token and each.token.token_id for each in first.prompt_logprobs] == [None, *prompt[1:]]
    assert all(each.rank == 1 for each in first.prompt_logprobs[1:])  # each token is the successor of the last
    with_samples = await client.generate(prompt, replace(sampling, n=3)).results()
    assert with_samples[0].prompt_logprobs == first.prompt_logprobs
    assert [completion.prompt_logprobs for completion in with_samples[1:]] == [(), ()]


async def test_samples_whose_reader_leaves_free_their_blocks(client: AsyncClient, succ_stack: Stack) -> None:
    stream = client.generate(FOREVER, Sampling(temperature=0, ignore_eos=True, n=4))
    async for delta in stream:
        if delta.index == 3:
            break
    await succ_stack.until_idle()
    await assert_alive(client)


async def test_more_samples_than_the_engine_runs_at_once_take_turns(client: AsyncClient) -> None:
    completions = await client.generate([1000], Sampling(temperature=0, max_tokens=3, n=64)).results()
    assert [completion.token_ids for completion in completions] == [(1001, 1002, 1003)] * 64
    assert [completion.index for completion in completions] == list(range(64))
