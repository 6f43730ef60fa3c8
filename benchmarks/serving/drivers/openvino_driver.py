"""OpenVINO GenAI's continuous batching as a driver: `python -m benchmarks.serving.drivers.openvino_driver FOLDER`.

Runs in an interpreter that has openvino-genai. Must not know: the harness beyond the driver protocol.
"""

import argparse
from collections.abc import Iterable
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

from benchmarks.serving.drivers.closed_run import Job, Progress
from benchmarks.serving.drivers.protocol import Channel, serve_steps

_PRECISIONS = {"bf16": "bf16", "f32": "f32", "f16": "f16", "u8": "u8"}


class OpenVinoEngine:
    """StepEngine over a ContinuousBatchingPipeline."""

    def __init__(self, pipeline: "openvino_genai.ContinuousBatchingPipeline") -> None:
        self._pipeline = pipeline
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}
        self._next_id = 0

    def add(self, job: Job) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = job.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([job.token_ids], dtype=np.int64))
        # Its own numbers: keys come again in the next run.
        self._handles[job.key] = self._pipeline.add_request(self._next_id, ids, config)
        self._left[job.key] = job.max_tokens
        self._next_id += 1

    def step(self) -> Iterable[Progress]:
        self._pipeline.step()
        return [progress for key in list(self._handles) if (progress := self._read(key)) is not None]

    def _read(self, key: int) -> Progress | None:
        handle = self._handles[key]
        tokens = 0
        while handle.can_read():
            tokens += sum(len(output.generated_ids) for output in handle.read().values())
        self._left[key] -= tokens
        is_running = handle.get_status() == openvino_genai.GenerationStatus.RUNNING
        if is_running:
            return Progress(key, tokens, finished=False) if tokens else None
        missing = self._left.pop(key)
        del self._handles[key]
        error = f"{missing} tokens are missing at its end" if missing else None
        return Progress(key, tokens, finished=True, error=error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="the model, converted by optimum-cli export openvino")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=_PRECISIONS, default="bf16", help="of the computation")
    parser.add_argument("--kv-precision", choices=_PRECISIONS, default="bf16")
    parser.add_argument("--cache-gib", type=int, default=1)
    parser.add_argument("--max-requests", type=int, default=64)
    options = parser.parse_args()
    channel = Channel.of_process()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options.cache_gib
    scheduler.max_num_seqs = options.max_requests
    scheduler.dynamic_split_fuse = True
    properties = {
        "INFERENCE_PRECISION_HINT": _PRECISIONS[options.precision],
        "KV_CACHE_PRECISION": _PRECISIONS[options.kv_precision],
        "INFERENCE_NUM_THREADS": options.threads,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(options.folder, scheduler, "CPU", properties)
    serve_steps(OpenVinoEngine(pipeline), channel, f"openvino-genai {openvino_genai.__version__}")


if __name__ == "__main__":
    main()
