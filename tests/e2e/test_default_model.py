"""Acceptance: 32 concurrent greedy requests on the default model in fp32 give exactly the text of each alone."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e.conftest import Reference, mixed_prompts
from tests.fixtures.stack import running_stack
from tokenwire_client import AsyncClient, Completion, FinishReason, Message, Sampling

# The first test also confirms 32 completions with transformers: a minute on a busy machine.
pytestmark = pytest.mark.timeout(600)

# All prompts enter as fast as the pool takes them, so that it is full before the first request ends.
SMALL_POOL = ("--block-size", "16", "--num-blocks", "64", "--prefill-chunk-size", "64", "--prefill-per-decode", "0")
SMALL_POOL_LENGTH = ("--max-model-len", "1000")


@pytest.mark.parametrize(
    ("flags", "preempts"),
    [
        pytest.param((), False, id="defaults"),
        pytest.param(("--no-prefix-cache",), False, id="no prefix cache", marks=pytest.mark.slow),
        pytest.param((*SMALL_POOL, *SMALL_POOL_LENGTH), True, id="64 blocks of 16, chunks of 64"),
        pytest.param(
            (*SMALL_POOL, *SMALL_POOL_LENGTH, "--no-prefix-cache"),
            True,
            id="small pool, no prefix cache",
            marks=pytest.mark.slow,
        ),
        pytest.param((*SMALL_POOL, *SMALL_POOL_LENGTH, "--overlap"), True, id="small pool, overlapped"),
    ],
)
async def test_32_concurrent_requests_equal_transformers(
    reference: Reference, default_folder: Path, tmp_path: Path, flags: tuple[str, ...], preempts: bool
) -> None:
    engine_flags = ("--dtype", "float32", *flags)
    async with (
        running_stack(default_folder, tmp_path, engine_flags=engine_flags) as stack,
        AsyncClient(stack.target) as client,
    ):
        cases = mixed_prompts(32)
        completions = await asyncio.gather(*(_greedy(client, *case) for case in cases))
        load = await stack.until_idle(2.0)
        metrics = await stack.metrics(stack.engine)
        assert (metrics["tokenwire_engine_preemptions_total"] > 0) == preempts
        assert load.free_blocks + load.cached_blocks == load.total_blocks
        assert stack.errors_logged() == []
    for (prompt, max_tokens), completion in zip(cases, completions, strict=True):
        expected = reference.confirm(prompt, max_tokens, tuple(completion.token_ids))
        assert completion.text == expected.text
        assert completion.usage.prompt_tokens == expected.prompt_tokens


async def _greedy(client: AsyncClient, prompt: str, max_tokens: int) -> Completion:
    return await client.generate(prompt, Sampling(temperature=0.0, max_tokens=max_tokens)).result()


async def test_bf16_text_does_not_depend_on_the_batch(default_folder: Path, tmp_path: Path) -> None:
    """The CPU kernels add in a fixed order: alone, among 15 others, chunked and preempted, every token is the same."""
    prompts = mixed_prompts(16)
    async with running_stack(default_folder, tmp_path / "alone") as stack, AsyncClient(stack.target) as client:
        alone = [await _text(client, prompt, tokens) for prompt, tokens in prompts]
    async with (
        running_stack(default_folder, tmp_path / "batched", engine_flags=(*SMALL_POOL, "--overlap")) as stack,
        AsyncClient(stack.target) as client,
    ):
        batched = await asyncio.gather(*(_text(client, prompt, tokens) for prompt, tokens in prompts))
        assert (await stack.load()).preemptions_total > 0
    assert list(batched) == alone


async def _text(client: AsyncClient, prompt: str, max_tokens: int) -> tuple[int, ...]:
    sampling = Sampling(temperature=0.8, seed=max_tokens, max_tokens=3 * max_tokens, ignore_eos=True)
    return (await client.generate(prompt, sampling).result()).token_ids


async def test_the_capital_of_france(default_folder: Path, tmp_path: Path) -> None:
    """The main job in bf16, as `make run` does it."""
    question = [Message("user", "What is the capital of France? Answer briefly.")]
    async with running_stack(default_folder, tmp_path) as stack, AsyncClient(stack.target) as client:
        stream = client.chat(question, Sampling(temperature=0.0, max_tokens=64))
        deltas = [delta.text async for delta in stream]
        assert "".join(deltas) == "The capital of France is Paris."
        assert len(deltas) > 3
        assert stream.completion is not None
        assert stream.completion.finish_reason is FinishReason.STOP
