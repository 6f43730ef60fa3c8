"""Rank 0's hold on the other ranks: starts their processes, sends them the plans, notices their death.

Must not know: what a rank computes, the scheduler.
"""

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from engine_service.core.plan import NewRequest, Plan
from engine_service.worker.backend_registry import resolve_backend
from engine_service.worker.checkpoint import UnsupportedModelError, read_config
from engine_service.worker.config import Device, WorkerConfig
from engine_service.worker.plain_config import read_plain_config
from engine_service.worker.rank_group import RankGroup, RankSeat
from engine_service.worker.ranks import RankLost, RankPool

_EXIT_SECONDS = 3.0
_DEATH_SECONDS = 2.0
OnLost = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """`python -m module N arguments...` in that environment; N is the descriptor of the connection to rank 0."""

    module: str
    environment: Mapping[str, str]
    arguments: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    connection: Connection


class RankProcesses:
    """Ranks 1 .. size - 1, as seen from rank 0. One thread computes; `on_lost` is called from another one."""

    def __init__(self, config: WorkerConfig, program: RankProgram, on_lost: OnLost) -> None:
        """Returns once every rank has joined the group. ValueError, with numbers, for what cannot be split."""
        _check(config)
        size = config.tensor_parallel_size
        self._on_lost = on_lost
        self._is_closing = False
        self._lost: str | None = None
        self._ranks: list[_Rank] = []
        self._has_lost = threading.Event()
        # Never closed: subgroups are made through it too, and torch opens it once more when it drops the group.
        rendezvous = os.memfd_create("tokenwire-ranks")
        try:
            for rank in range(1, size):
                self._ranks.append(_launch(program, RankSeat(rank, size, rendezvous), config))
            self._watch()
            self._group = self._join(RankSeat(0, size, rendezvous), config.device)
        except BaseException:
            self._end_processes()
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def smallest(self, number: int) -> int:
        return self._group.smallest(number)

    def allocate(self, pool: RankPool) -> None:
        self._send(pool)

    def start(self, plan: Plan) -> None:
        self._send(_without_grammars(plan))

    def store(self, token_ids: torch.Tensor) -> None:
        self._group.share(token_ids)

    def explain(self, error: RuntimeError) -> RuntimeError:
        """A lost peer shows in a collective a moment before its process is seen to have ended."""
        self._has_lost.wait(_DEATH_SECONDS)
        return error if self._lost is None else RankLost(self._lost)

    def close(self) -> None:
        """Returns when every rank has ended; one that does not in time is killed."""
        self._end_processes()
        self._group.leave()

    def _end_processes(self) -> None:
        self._is_closing = True
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            try:
                rank.process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()

    def _send(self, message: object) -> None:
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        for rank in self._ranks:
            try:
                rank.connection.send_bytes(body)
            except OSError as error:
                raise RankLost(f"tensor parallel rank {rank.number} does not read any more") from error

    def _watch(self) -> None:
        for rank in self._ranks:
            threading.Thread(target=self._await_end, args=(rank,), name=f"rank-{rank.number}", daemon=True).start()

    def _await_end(self, rank: _Rank) -> None:
        status = rank.process.wait()
        if not self._is_closing:
            self._lost = f"tensor parallel rank {rank.number} ended with status {status}"
            self._has_lost.set()
            self._on_lost(self._lost)

    def _join(self, seat: RankSeat, device: Device) -> RankGroup:
        try:
            return RankGroup(seat, device)
        except RuntimeError as error:
            raise self.explain(error) from error


def _launch(program: RankProgram, seat: RankSeat, config: WorkerConfig) -> _Rank:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        process = subprocess.Popen(  # noqa: S603 (our own program)
            [sys.executable, "-m", program.module, str(theirs.fileno()), *program.arguments],
            stdin=subprocess.DEVNULL,
            env={**program.environment, "LOCAL_RANK": str(seat.rank)},
            pass_fds=(theirs.fileno(), seat.rendezvous),
        )
        connection = Connection(ours.detach())
    connection.send((seat, config))
    return _Rank(seat.rank, process, connection)


def _without_grammars(plan: Plan) -> Plan:
    """Only rank 0 samples; a compiled grammar could not travel."""
    if all(request.sampling.structured_output is None for request in plan.new):
        return plan
    return replace(plan, new=tuple(_without_grammar(request) for request in plan.new))


def _without_grammar(request: NewRequest) -> NewRequest:
    return replace(request, sampling=replace(request.sampling, structured_output=None))


def _check(config: WorkerConfig) -> None:
    """ValueError, with the numbers, before any process is started."""
    size = config.tensor_parallel_size
    if sys.platform != "linux":
        raise ValueError(f"tensor_parallel_size {size} needs Linux; elsewhere it must be 1")
    resolve_backend(config.backend, config.device, size)
    config.require_plain_weights(f"the ranks of tensor_parallel_size {size} keep weights as they are")
    _check_devices(config.device, size)
    model = read_plain_config(config.model_folder) or read_config(config.model_folder).get_text_config(decoder=True)
    if not getattr(model, "base_model_tp_plan", True):
        raise UnsupportedModelError(
            f"transformers has no plan to split models of type {model.model_type}: "
            f"tensor_parallel_size must be 1, not {size}"
        )
    heads = {"attention heads": model.num_attention_heads, "key-value heads": model.num_key_value_heads}
    for name, count in heads.items():
        if count % size:
            raise ValueError(f"tensor_parallel_size {size} does not divide the model's {count} {name}")


def _check_devices(device: Device, size: int) -> None:
    if device is Device.CUDA and torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel_size {size} needs {size} CUDA devices, but there are {torch.cuda.device_count()}"
        )
    if device is Device.CPU and torch.accelerator.is_available():
        raise ValueError(
            f"tensor_parallel_size {size} on the CPU needs a process that sees no GPU: "
            "start it with CUDA_VISIBLE_DEVICES set to nothing"
        )
