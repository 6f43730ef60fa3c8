"""How work on fixed tensors is recorded and done again: as a CUDA graph, or, where there is none, by running it again.

Must not know: what the work is.
"""

from collections.abc import Callable
from typing import Protocol

import torch

Outputs = tuple[torch.Tensor, ...]
Work = Callable[[], Outputs]


class Recorder(Protocol):
    """Records work that reads and writes the same memory each time."""

    def record(self, work: Work) -> Work:
        """Do it once; what is returned does it again. Its tensors are the same ones each time, overwritten."""
        ...


class RerunRecorder:
    """Runs the work itself again, into the tensors of the first time: a number that the work took from the host, or
    memory that nobody filled, shows here as it would in a graph."""

    def record(self, work: Work) -> Work:
        kept = tuple(tensor.clone() for tensor in work())

        def again() -> Outputs:
            for place, tensor in zip(kept, work(), strict=True):
                place.copy_(tensor)
            return kept

        return again


class CudaGraphRecorder:
    """CUDA graphs whose intermediate tensors share one pool of memory: record the largest work first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Work:
        # What a first run allocates or compiles must not be recorded.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            kept = work()

        def again() -> Outputs:
            graph.replay()
            return kept

        return again


def recorder_for(device: torch.device) -> Recorder:
    return CudaGraphRecorder(device) if device.type == "cuda" else RerunRecorder()
