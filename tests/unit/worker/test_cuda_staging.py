"""The staging ring on a device that copies late: it reads the host's memory only when a fence is waited for."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.worker.cuda.pinned import PinnedTransfer
from engine_service.worker.cuda.staging import StagingRing
from engine_service.worker.sampled import Sampled
from engine_service.worker.transfer import DirectTransfer


class LateDevice:
    """Copies are queued, and done at the last moment that is allowed."""

    def __init__(self) -> None:
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.done = 0

    def copy(self, staged: torch.Tensor) -> torch.Tensor:
        target = torch.full_like(staged, -1)
        self.queue.append((target, staged))
        return target

    def drain(self, end: int) -> None:
        for target, staged in self.queue[self.done : end]:
            target.copy_(staged)
        self.done = max(self.done, end)


class LateFence:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._behind = 0

    def record(self) -> None:
        self._behind = len(self._device.queue)

    def synchronize(self) -> None:
        self._device.drain(self._behind)


def ring_of(device: LateDevice, regions: int, size: int) -> StagingRing:
    memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(regions)]
    return StagingRing(memory, [LateFence(device) for _ in range(regions)], device.copy)


@settings(deadline=None)
@given(steps=st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=12), regions=st.integers(1, 4))
def test_nothing_is_overwritten_before_it_was_read(steps: list[list[int]], regions: int) -> None:
    device = LateDevice()
    ring = ring_of(device, regions, 4096)
    given_: list[tuple[np.ndarray, torch.Tensor]] = []
    for number, sizes in enumerate(steps):
        ring.next_region()
        for size in sizes:
            array = np.arange(size, dtype=np.int64) + 1000 * number
            tensor = ring.put(array)
            assert tensor is not None
            given_.append((array, tensor))
    device.drain(len(device.queue))
    for array, tensor in given_:
        assert tensor.numpy().tolist() == array.tolist()


def test_the_same_memory_is_used_again_and_only_after_a_wait() -> None:
    device = LateDevice()
    ring = ring_of(device, 2, 64)
    ring.next_region()
    ring.put(np.arange(8))
    first = device.queue[0][1].data_ptr()
    ring.next_region()
    ring.put(np.arange(8))
    assert device.done == 0, "a step is staged while the one before is still being copied"
    ring.next_region()
    assert device.done == 1
    ring.put(np.arange(8))
    assert device.queue[-1][1].data_ptr() == first


def test_types_stand_side_by_side_and_a_full_region_says_so() -> None:
    ring = ring_of(LateDevice(), 1, 192)
    assert ring.put(np.array([True])) is not None
    assert ring.put(np.arange(8, dtype=np.int64)) is not None
    tensor = ring.put(np.ones((4, 4), dtype=np.float32))
    assert tensor is not None
    assert tensor.shape == (4, 4)
    assert tensor.dtype == torch.float32
    assert ring.put(np.zeros(1)) is None


@pytest.mark.parametrize("has_choice", [True, False])
def test_tokens_of_steps_in_flight_are_kept_apart(has_choice: bool) -> None:
    transfer = PinnedTransfer(torch.device("cpu"), max_rows=4)
    direct = DirectTransfer(torch.device("cpu"))
    fetched, expected = [], []
    for step in range(2):
        transfer.begin_step()
        sampled = Sampled(
            torch.tensor([5, 0, 7]) + step,
            torch.tensor([True, False, True]),
            torch.tensor([True, True, False]) if has_choice else None,
        )
        fetched.append(transfer.fetch(sampled))
        expected.append(direct.fetch(sampled)())
        sampled.token_ids.zero_()
    assert [read() for read in fetched] == [
        expected[0].__class__([5, 0, 7], expected[0].sound, expected[0].has_choice),
        expected[1].__class__([6, 1, 8], expected[1].sound, expected[1].has_choice),
    ]


def test_an_array_larger_than_a_region_comes_over_too() -> None:
    transfer = PinnedTransfer(torch.device("cpu"), max_rows=1)
    transfer.begin_step()
    large = np.arange(1_000_000, dtype=np.int64)
    tensor = transfer.upload(large)
    large[0] = 7
    assert tensor[-1] == 999_999
