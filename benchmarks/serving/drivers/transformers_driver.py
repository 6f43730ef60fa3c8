"""transformers' continuous batching as a driver: `python -m benchmarks.serving.drivers.transformers_driver FOLDER`.

Must not know: the harness beyond the driver protocol.
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.serving.drivers.closed_run import Job, Progress
from benchmarks.serving.drivers.protocol import Channel, serve_steps

_NO_END = -1
_WAIT_S = 60.0


class TransformersEngine:
    """StepEngine over a ContinuousBatchingManager, whose own thread computes."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._keys: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._next_id = 0

    def add(self, job: Job) -> None:
        name = f"bench-{self._next_id}"
        self._next_id += 1
        self._keys[name], self._seen[name] = job.key, 0
        self._manager.add_request(
            list(job.token_ids),
            request_id=name,
            max_new_tokens=job.max_tokens,
            streaming=True,
            eos_token_id=_NO_END,
        )

    def step(self) -> Iterable[Progress]:
        output = self._manager.get_result(timeout=_WAIT_S)
        if output is None:
            raise RuntimeError(f"nothing was generated in {_WAIT_S:.0f} s")
        name = output.request_id
        if name not in self._keys:
            return []
        new = len(output.generated_tokens) - self._seen[name]
        self._seen[name] += new
        progress = Progress(self._keys[name], new, output.is_finished(), output.error)
        if output.is_finished():
            del self._keys[name], self._seen[name]
        return [progress]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument(
        "--cache-blocks", type=int, default=128, help="of 256 tokens; its own choice is half the memory"
    )
    parser.add_argument("--batch-tokens", type=int, default=512)
    options = parser.parse_args()
    channel = Channel.of_process()
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(
        options.folder, dtype=torch.bfloat16, attn_implementation=options.attention
    ).eval()
    config = GenerationConfig(do_sample=False, eos_token_id=_NO_END, max_new_tokens=64)
    batching = ContinuousBatchingConfig(num_blocks=options.cache_blocks, max_batch_tokens=options.batch_tokens)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    manager.start()
    try:
        serve_steps(TransformersEngine(manager), channel, f"transformers {transformers.__version__}")
    finally:
        manager.stop(block=False)


if __name__ == "__main__":
    main()
