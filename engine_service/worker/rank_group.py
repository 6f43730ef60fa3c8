"""The torch.distributed group of the ranks that share a model: gloo on CPUs, NCCL on CUDA devices, one host.

Must not know: plans, processes, how a model is split.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from engine_service.worker.config import Device

# Loading a large model takes ranks unequally long. A step that hangs is ended sooner, by the front's watch.
_COLLECTIVE_TIMEOUT = timedelta(minutes=10)
_LIBRARIES = {Device.CPU: "gloo", Device.CUDA: "nccl"}


@dataclass(frozen=True, slots=True)
class RankSeat:
    """Which rank of how many. They find each other in an anonymous file that all have open as `rendezvous`:
    there is neither a port nor a path that others could come to."""

    rank: int
    size: int
    rendezvous: int


class RankGroup:
    """One rank's place in the group. Every method has to be called by all ranks, in the same order."""

    def __init__(self, seat: RankSeat, device: Device) -> None:
        """Returns once all ranks have come. RuntimeError if one does not."""
        # By default both listen on the address that the host's name has.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
        if device is Device.CUDA:
            torch.cuda.set_device(seat.rank)
        self._device = torch.device(device.value)
        dist.init_process_group(
            _LIBRARIES[device],
            store=dist.FileStore(f"/proc/self/fd/{seat.rendezvous}", seat.size),  # type: ignore[attr-defined]
            rank=seat.rank,
            world_size=seat.size,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=torch.device("cuda", seat.rank) if device is Device.CUDA else None,
        )

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        found = torch.tensor(number, dtype=torch.int64, device=self._device)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def share(self, token_ids: torch.Tensor) -> None:
        """Rank 0's part of `receive`."""
        dist.broadcast(token_ids.contiguous(), src=0)

    def receive(self, count: int) -> torch.Tensor:
        """Rank 0's tokens, int64 [count]; the host does not wait for them on a device that runs on its own."""
        token_ids = torch.empty(count, dtype=torch.int64, device=self._device)
        dist.broadcast(token_ids, src=0)
        return token_ids

    def leave(self) -> None:
        dist.destroy_process_group()
