"""Two real engines behind one tokenizer service: prefixes find their holder, engines come and go under streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fixtures.checkpoints import succ_continuation
from tests.fixtures.stack import ServiceProcess, until, until_serving
from tokenwire_client import AsyncClient, Sampling
from tokenwire_client.operator import Operator

PREFIX = 96
ENGINE_FLAGS = ("--num-blocks", "256", "--block-size", "16", "--max-model-len", "2048", "--threads", "1")


@dataclass(frozen=True, slots=True)
class Pair:
    """`engines` are the addresses; `operator` is where the tokenizer service listens for operators."""

    engines: tuple[str, ...]
    target: str
    operator: str


@asynccontextmanager
async def pair(model: Path, logs: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        engines = [
            ServiceProcess("engine_service", logs / f"engine-{number}.log", "--model", str(model), *ENGINE_FLAGS)
            for number in range(2)
        ]
        for engine in engines:
            stack.push_async_callback(engine.close)
        addresses = [f"127.0.0.1:{await engine.port()}" for engine in engines]
        flags = [part for address in addresses for part in ("--engine", address)]
        flags += ["--model", str(model), "--http-port", "0", "--operator-port", "0"]
        tokenizer = ServiceProcess("tokenizer_service", logs / "tokenizer.log", *flags)
        stack.push_async_callback(tokenizer.close)
        target = f"127.0.0.1:{await tokenizer.port()}"
        await until_serving(target, [*engines, tokenizer])
        await until(lambda: len(tokenizer.events("engine_connected")) == 2, 30)
        yield Pair(tuple(addresses), target, f"127.0.0.1:{await tokenizer.port('operator_port')}")


def prompt(prefix: int, number: int) -> list[int]:
    """SUCC looks at the last token only, so that any prefix will do."""
    return [1000 + (prefix * 977 + place * 31) % 7000 for place in range(PREFIX)] + [9000 + number] * 5


@pytest.mark.slow  # three processes start
async def test_prefixes_stay_together_and_engines_change_under_streams(succ_folder: Path, tmp_path: Path) -> None:
    greedy = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    async with pair(succ_folder, tmp_path) as made, AsyncClient(made.target) as client:
        for number in range(3):
            for prefix in range(4):
                answer = await client.generate(prompt(prefix, number), greedy).result()
                assert list(answer.token_ids) == succ_continuation(9000 + number, 4)
                assert answer.usage.cached_tokens == (0 if number == 0 else PREFIX)
        with Operator(made.operator) as operator:
            first, second = made.engines
            long = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)
            streams = [asyncio.create_task(client.generate([1000 + 10 * n], long).result()) for n in range(6)]

            async def all_run() -> bool:
                return sum(each.live_requests for each in await asyncio.to_thread(operator.engines)) == 6

            await until(all_run, 30)
            await asyncio.to_thread(operator.remove_engine, first)
            answers = [await client.generate(prompt(9, number), greedy).result() for number in range(2)]
            await asyncio.to_thread(operator.add_engine, first)
            answers += [await client.generate(prompt(8, number), greedy).result() for number in range(2)]
            assert [answer.usage.completion_tokens for answer in answers] == [4] * 4
            done = await asyncio.gather(*streams)
            assert [answer.usage.completion_tokens for answer in done] == [400] * 6
            engines = {each.address: each for each in await asyncio.to_thread(operator.engines)}
            assert {engines[each].live_requests for each in (first, second)} == {0}
            assert (engines[first].sources, engines[second].sources) == (("operator",), ("static",))
