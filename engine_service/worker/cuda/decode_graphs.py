"""Decode steps as recorded graphs, one for each padded number of requests.

Must not know: how a graph is recorded, which kernel attends, requests.
"""

from collections.abc import Callable, Sequence

import torch

from engine_service.worker.backend import StepLogits
from engine_service.worker.cuda.graph_capture import Recorder, Work
from engine_service.worker.cuda.graph_sizes import fitting_size
from engine_service.worker.cuda.static_step import StaticStep
from engine_service.worker.input_batch import StepInput

Decode = Callable[[int], tuple[torch.Tensor, ...]]
"""Runs the first so many rows of the static step -> logits [rows, vocabulary], best int64 [rows]."""


class DecodeGraphs:
    """Recorded when built, the largest first, so that the others live in the memory it needs."""

    def __init__(self, sizes: Sequence[int], static: StaticStep, decode: Decode, recorder: Recorder) -> None:
        self._sizes = sizes
        self._static = static
        self._graphs: dict[int, Work] = {}
        for size in reversed(sizes):
            self._graphs[size] = recorder.record(_bound(decode, size))

    def run(self, step: StepInput) -> StepLogits | None:
        """None for a step that no graph can take: more than decodes in it, or too many."""
        count = len(step.layout.query_lens_list)
        size = fitting_size(self._sizes, count)
        if size is None or len(step.input_ids) != count:
            return None
        self._static.fill(step, size)
        logits, best = self._graphs[size]()
        sampling = len(step.sample_rows)
        if sampling == count:
            return StepLogits(logits[:count], best[:count])
        # A prompt may end, but for its last token, in a chunk of one token.
        return StepLogits(logits.index_select(0, step.sample_rows), best.index_select(0, step.sample_rows))


def _bound(decode: Decode, size: int) -> Work:
    return lambda: decode(size)
