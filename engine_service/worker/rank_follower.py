"""A rank other than 0: executes the plans it is sent with its share of the model, and samples nothing.

Must not know: logits, grammars, the scheduler, how it was started.
"""

from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from engine_service.core.plan import Plan
from engine_service.worker.backend import ModelRunner
from engine_service.worker.backend_registry import resolve_backend
from engine_service.worker.build import build_batch
from engine_service.worker.config import WorkerConfig
from engine_service.worker.input_batch import InputBatch
from engine_service.worker.memory import free_memory
from engine_service.worker.rank_group import RankGroup, RankSeat
from engine_service.worker.ranks import RankPool
from engine_service.worker.scored_pieces import cut


class Follower:
    """Makes the same forward passes as rank 0's worker, in the same order: each is a collective."""

    def __init__(self, runner: ModelRunner, batch: InputBatch, group: RankGroup) -> None:
        self._runner = runner
        self._batch = batch
        self._group = group

    def execute(self, plan: Plan) -> None:
        """The tokens that were sampled come from rank 0: they are the input of the next step."""
        with torch.inference_mode():
            self._batch.take(plan)
            if plan.copies:
                self._runner.copy_blocks(plan.copies)
            pieces, chunks = cut(plan.chunks, self._batch.scored_prompt)
            for piece in pieces:
                self._runner.run(self._batch.piece_input(piece)[0], best_only=False)
            if not chunks:
                return
            step = self._batch.step_input(chunks)
            self._runner.run(step, best_only=False)
            if step.request_ids:
                self._batch.store(step, self._group.receive(len(step.request_ids)))


def follow(connection: Connection, on_ready: Callable[[], None]) -> None:
    """Takes a seat, loads its share, says so, and executes plans until rank 0 closes the connection."""
    seat, config = connection.recv()
    assert isinstance(seat, RankSeat)
    assert isinstance(config, WorkerConfig)
    group = RankGroup(seat, config.device)
    loaded = resolve_backend(config.backend, config.device, config.tensor_parallel_size).load(config)
    group.smallest(free_memory(config.device))
    pool = connection.recv()
    assert isinstance(pool, RankPool)
    runner = loaded.build(pool.block_size, pool.num_blocks, pool.max_model_len)
    follower = Follower(runner, build_batch(config, loaded, pool, loaded.transfer().upload), group)
    on_ready()
    while (plan := _next_plan(connection)) is not None:
        follower.execute(plan)
    group.leave()


def _next_plan(connection: Connection) -> Plan | None:
    try:
        plan = connection.recv()
    except EOFError:
        return None
    assert isinstance(plan, Plan)
    return plan
