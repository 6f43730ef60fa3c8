"""What speculation is worth in CPU time of one thread: for machines that are never quiet.

`python -m benchmarks.engine.speculation_cpu [--rounds N] [--concurrency 1 8] [--questions N]`. Scheduler and worker run
in this thread without services or sockets, with drafts and without in turns; time is what the thread computed, so that
neighbours that wait for the same cores count little. Must not know: the services.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence

from transformers import AutoTokenizer

from benchmarks.serving.quoting import Question, inventing, quoting
from engine_service.core.request import Request
from engine_service.core.sampling import SamplingParams
from engine_service.core.scheduler import Scheduler, SchedulerConfig
from engine_service.worker.build import build_worker
from engine_service.worker.config import WorkerConfig
from engine_service.worker.worker import Worker
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder

_BLOCKS, _BLOCK_SIZE, _LENGTH, _BUDGET = 2000, 16, 2048, 512


def _scheduler(worker: Worker, most: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            block_size=_BLOCK_SIZE,
            num_blocks=_BLOCKS,
            step_token_budget=_BUDGET,
            prefill_chunk_size=_BUDGET,
            max_num_requests=32,
            max_waiting_requests=1000,
            max_waiting_tokens=1_000_000,
            max_model_len=_LENGTH,
            eos_token_ids=frozenset(worker.info.eos_token_ids),
            prefix_cache=False,
            prefill_per_decode=worker.info.prefill_per_decode,
            max_draft_tokens=most,
        )
    )


class _Engine:
    """A scheduler over the one worker; both of them are idle between runs."""

    def __init__(self, worker: Worker, most_drafted: int) -> None:
        self._worker = worker
        self.scheduler = _scheduler(worker, most_drafted)

    def run(self, requests: Sequence[Request], concurrency: int) -> tuple[list[list[int]], float]:
        """The texts by request id, and seconds of this thread."""
        begin = time.thread_time()
        waiting, live = deque(requests), 0
        texts: dict[int, list[int]] = {item.request_id: [] for item in requests}
        while waiting or self.scheduler.has_work:
            while waiting and live < concurrency:
                assert self.scheduler.submit(waiting.popleft()) is None
                live += 1
            self._step()
            for news in self.scheduler.take_news():
                texts[news.request_id].extend(news.token_ids)
                live -= news.finish is not None
        return list(texts.values()), time.thread_time() - begin

    def _step(self) -> None:
        begin = time.thread_time()
        plan = self.scheduler.plan(0.0)
        if plan is not None:
            self._worker.submit(plan)
            self.scheduler.apply(self._worker.result())
            self.scheduler.observe_step(time.thread_time() - begin, plan.num_tokens)


def _requests(questions: Sequence[Question], tokenizer: object, first_id: int) -> list[Request]:
    def ids(question: Question) -> list[int]:
        message = [{"role": "user", "content": question.text}]
        found: list[int] = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)  # type: ignore[attr-defined]
        return found

    return [
        Request(
            first_id + place,
            ids(each),
            SamplingParams(each.max_tokens, seed=place, temperature=each.temperature),
            arrival=0.0,
        )
        for place, each in enumerate(questions)
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--questions", type=int, default=4, help="of each workload, for each concurrent request")
    parser.add_argument("--max-draft-tokens", type=int, default=16)
    options = parser.parse_args(arguments)
    folder = resolve_model_folder(DEFAULT_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = WorkerConfig(
        folder, num_blocks=_BLOCKS, block_size=_BLOCK_SIZE, max_model_len=_LENGTH, max_num_requests=32, threads=1
    )
    worker = build_worker(config)
    engines = [_Engine(worker, most) for most in (0, options.max_draft_tokens)]
    next_id = 0
    for number in range(options.rounds):
        for concurrency in options.concurrency:
            for name, make in (("quoting", quoting), ("inventing", inventing)):
                questions = [make(1000 * number + place) for place in range(options.questions * concurrency)]
                found: dict[int, tuple[list[list[int]], float]] = {}
                before = engines[1].scheduler.stats()
                for which in (0, 1) if number % 2 == 0 else (1, 0):
                    found[which] = engines[which].run(_requests(questions, tokenizer, next_id), concurrency)
                    next_id += len(questions)
                after = engines[1].scheduler.stats()
                tokens = sum(map(len, found[0][0]))
                same = sum(one == other for one, other in zip(found[0][0], found[1][0], strict=True))
                drafted, accepted = (
                    getattr(after, each) - getattr(before, each) for each in ("drafted_tokens", "accepted_tokens")
                )
                print(
                    f"{name:10} c={concurrency:<3} off {tokens / found[0][1]:6.1f}  prompt-lookup "
                    f"{tokens / found[1][1]:6.1f} tokens/CPU s  ratio {found[0][1] / found[1][1]:.3f}  "
                    f"same text {same} of {len(questions)}  drafted {drafted:,}, right {accepted:,} of {tokens:,}",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
