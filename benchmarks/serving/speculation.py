"""What speculation is worth: tokens per second with drafts and without, interleaved, and whether the text is the same.

`python -m benchmarks.serving.speculation [--rounds N] [--concurrency 1 8]`. Two engines with the same model, one with
`--speculation prompt-lookup`, and a tokenizer service over each; only one of them has work at a time. Both are asked
the same questions, group by group (A B, B A, ...): answers that quote their prompt, and stories that have nothing to
quote. Must not know: how a guess is made.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.serving.machine import machine_facts
from benchmarks.serving.processes import GroupProcess
from benchmarks.serving.quoting import Question, inventing, quoting
from benchmarks.serving.services import start_services
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tokenwire_client import AsyncClient, Completion, Message, Sampling

WAYS = ("off", "prompt-lookup")
WORKLOADS: dict[str, Callable[[int], Question]] = {"quoting": quoting, "inventing": inventing}
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens per second of both ways over the same questions, and how many of the texts were the same."""

    workload: str
    concurrency: int
    off: float
    speculating: float
    same: int
    questions: int

    @property
    def ratio(self) -> float:
        return self.speculating / self.off


async def _ask(client: AsyncClient, question: Question, seed: int) -> Completion:
    sampling = Sampling(max_tokens=question.max_tokens, temperature=question.temperature, seed=seed)
    return await client.chat([Message("user", question.text)], sampling).result()


async def _group(client: AsyncClient, questions: Sequence[Question], seed: int) -> tuple[float, list[Completion]]:
    """Asked at the same time; seconds until the last answer was complete."""
    begin = time.perf_counter()
    answers = await asyncio.gather(*(_ask(client, each, seed + place) for place, each in enumerate(questions)))
    return time.perf_counter() - begin, answers


async def _round(
    clients: dict[str, AsyncClient], workload: str, concurrency: int, groups: int, first_seed: int
) -> Round:
    seconds, tokens = dict.fromkeys(WAYS, 0.0), dict.fromkeys(WAYS, 0)
    same = 0
    for number in range(groups):
        seed = first_seed + number * concurrency
        questions = [WORKLOADS[workload](seed + place) for place in range(concurrency)]
        answers: dict[str, list[Completion]] = {}
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            took, answers[way] = await _group(clients[way], questions, seed)
            seconds[way] += took
            tokens[way] += sum(len(answer.token_ids) for answer in answers[way])
        pairs = zip(*answers.values(), strict=True)
        same += sum(one.token_ids == other.token_ids for one, other in pairs)
    off, speculating = (tokens[way] / seconds[way] for way in WAYS)
    return Round(workload, concurrency, round(off, 1), round(speculating, 1), same, groups * concurrency)


async def run(options: argparse.Namespace, logs: Path) -> list[Round]:
    """The rounds, printed as they end."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    model = resolve_model_folder(DEFAULT_MODEL)
    deadline = time.monotonic() + _START_S
    rounds: list[Round] = []
    async with AsyncExitStack() as stack:

        def started(process: GroupProcess) -> None:
            stack.push_async_callback(process.stop)

        clients: dict[str, AsyncClient] = {}
        for way in WAYS:
            flags = ("--speculation", way, *options.engine_flags)
            services = await start_services(model, logs / way, flags, (), environment, deadline, started)
            clients[way] = await stack.enter_async_context(AsyncClient(services.tokenizer))
        for workload in WORKLOADS:
            await _round(clients, workload, 1, 2, 1)
        for number in range(options.rounds):
            for concurrency in options.concurrency:
                groups = -(-options.questions // concurrency)
                for workload in WORKLOADS:
                    seed = 1000 * (1 + number)
                    rounds.append(await _round(clients, workload, concurrency, groups, seed))
                    print(_line(rounds[-1]), flush=True)
    return rounds


def _line(round_: Round) -> str:
    return (
        f"{round_.workload:10} c={round_.concurrency:<3} off {round_.off:7.1f}  "
        f"prompt-lookup {round_.speculating:7.1f} tokens/s  "
        f"ratio {round_.ratio:.3f}  same text {round_.same} of {round_.questions}"
    )


def summary(rounds: Sequence[Round]) -> str:
    """The median ratio of each kind of round."""
    kinds = sorted({(each.workload, each.concurrency) for each in rounds}, reverse=True)
    lines = []
    for kind in kinds:
        ratios = [each.ratio for each in rounds if (each.workload, each.concurrency) == kind]
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        lines.append(f"{kind[0]:10} c={kind[1]:<3} median ratio {statistics.median(ratios):.3f} (by round: {listed})")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--questions", type=int, default=8, help="of each workload in a round")
    parser.add_argument("--engine-flags", nargs=argparse.REMAINDER, default=[], help="last; for both")
    parser.add_argument("--out", type=Path, help="JSON file for machine and rounds")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as logs:
        rounds = asyncio.run(run(options, Path(logs)))
    print(summary(rounds))
    if options.out is not None:
        facts = machine_facts(["speculation", *arguments], Path(__file__).parents[2])
        options.out.write_text(json.dumps({"machine": facts, "rounds": [asdict(each) for each in rounds]}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
