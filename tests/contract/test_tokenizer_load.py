"""Many streams at once, and large answers beside small ones."""

import asyncio
import itertools

import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.tokenizer_app import collect, default_model, eventually, ids_request, running
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb


@pytest.mark.parametrize("count", [150, 600])
async def test_many_streams_on_one_channel_all_run_at_once(count: int) -> None:
    """B122: each receives its first token although none has ended, and only its own tokens."""
    release = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        (number,) = request.prompt
        await request.send([number])
        await release.wait()
        await request.play([number + 1, number + 2])

    async with running(default_model(), script) as service:
        prompts = list(range(1000, 1000 + 3 * count, 3))
        calls = [service.stub.Generate(ids_request([prompt]), timeout=60) for prompt in prompts]
        firsts = await asyncio.gather(*(anext(aiter(call)) for call in calls))
        assert [list(first.token_ids) for first in firsts] == [[prompt] for prompt in prompts]
        assert service.metric("active_requests") == count
        release.set()
        answers = await asyncio.gather(*(collect(call) for call in calls))
        assert [answer.token_ids for answer in answers] == [[prompt + 1, prompt + 2] for prompt in prompts]
        await eventually(lambda: service.metric("active_requests") == 0)


async def test_large_tokenize_answers_do_not_stall_a_stream() -> None:
    """B117: gaps of the stream stay under 500 ms while texts of a million tokens are tokenized."""
    tick = 0.02
    done = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        for token_id in itertools.cycle(range(1000, 2000)):
            await request.send([token_id])
            try:
                await asyncio.wait_for(done.wait(), tick)
                break
            except TimeoutError:
                continue
        await request.play([1000])

    async with running(default_model(), script) as service:
        stream = service.stub.Generate(ids_request([5]))
        loop = asyncio.get_running_loop()
        arrivals: list[float] = []

        async def read() -> None:
            async for _ in stream:
                arrivals.append(loop.time())

        reader = asyncio.create_task(read())
        text = "".join(f"{number} " for number in range(150_000))
        answers = await asyncio.gather(
            *(service.stub.Tokenize(pb.TokenizeRequest(text=text), timeout=60) for _ in range(2))
        )
        done.set()
        await reader
        assert all(len(answer.token_ids) > 900_000 for answer in answers)
        gaps = [after - before for before, after in itertools.pairwise(arrivals)]
        assert len(gaps) > 10
        assert max(gaps) < 0.5
