"""Executes plans on one device and returns results: the owner of model, KV pool and token buffers.

Must not know: the scheduler, the network, text.
"""

from collections import deque
from dataclasses import dataclass

import torch

from engine_service.core.plan import Failure, Plan, Result
from engine_service.worker.backend import ModelRunner, StepLogits
from engine_service.worker.backend_registry import resolve_backend
from engine_service.worker.config import WorkerConfig, WorkerInfo
from engine_service.worker.input_batch import BatchLimits, InputBatch, StepInput
from engine_service.worker.memory import free_memory, size_pool
from engine_service.worker.sampler import Sampled, Sampler

MAX_PLANS_IN_FLIGHT = 2
_NOT_FINITE = "the model's logits were not finite"


@dataclass(frozen=True, slots=True)
class _Launched:
    """A plan that was given to the device; `sampled` may still be computed there."""

    step: int
    request_ids: tuple[int, ...]
    sampled: Sampled | None


class Worker:
    """Runs plans in the order they are submitted; not to be used from two threads at once.

    A second plan may be submitted before the result of the first is read: it finds the first one's tokens
    in the worker's own buffers.
    """

    def __init__(
        self,
        info: WorkerInfo,
        runner: ModelRunner,
        batch: InputBatch,
        sampler: Sampler,
    ) -> None:
        self.info = info
        self._runner = runner
        self._batch = batch
        self._sampler = sampler
        self._launched: deque[_Launched] = deque()

    def submit(self, plan: Plan) -> None:
        """Start a step. On a CPU it is complete when this returns."""
        if len(self._launched) >= MAX_PLANS_IN_FLIGHT:
            raise RuntimeError(f"{MAX_PLANS_IN_FLIGHT} plans are in flight; read a result first")
        with torch.inference_mode():
            step = self._batch.advance(plan)
            sampled = None if step is None else self._run(step)
        request_ids = () if step is None else step.request_ids
        self._launched.append(_Launched(plan.step, request_ids, sampled))

    def result(self) -> Result:
        """The result of the oldest submitted plan; waits for the device."""
        launched = self._launched.popleft()
        if launched.sampled is None:
            return Result(launched.step, ())
        tokens = zip(
            launched.request_ids,
            launched.sampled.token_ids.tolist(),
            launched.sampled.sound.tolist(),
            strict=True,
        )
        sampled, failures = [], []
        for request_id, token_id, sound in tokens:
            if sound:
                sampled.append((request_id, token_id))
            else:
                failures.append(Failure(request_id, _NOT_FINITE))
        return Result(launched.step, tuple(sampled), tuple(failures))

    def close(self) -> None:
        """Forget what is in flight and free what the backend holds."""
        self._launched.clear()
        self._runner.close()

    def _run(self, step: StepInput) -> Sampled | None:
        """Forward pass and sampling; None when no chunk reaches its request's last token."""
        best_only = step.sampling.is_plain_greedy
        output = self._runner.run(step, best_only=best_only)
        if not step.request_ids:
            return None
        sampled = self._sample(output, step, best_only)
        self._batch.store(step, sampled)
        return sampled

    def _sample(self, output: StepLogits, step: StepInput, best_only: bool) -> Sampled:
        if best_only and output.best is not None:
            return Sampled(output.best.clamp(min=0), output.best >= 0)
        assert output.logits is not None
        return self._sampler.sample(output.logits, step.sampling)


def build_worker(config: WorkerConfig) -> Worker:
    """Load the model, size and allocate the KV pool. ValueError, with numbers, for what cannot work."""
    loaded = resolve_backend(config.backend, config.device).load(config)
    facts = loaded.facts
    block_size = config.block_size or loaded.default_block_size
    block_bytes = loaded.block_bytes(block_size)
    size = size_pool(config, facts.max_model_len, block_size, block_bytes, free_memory(config.device))
    info = WorkerInfo(
        vocab_size=facts.vocab_size,
        max_model_len=size.max_model_len,
        eos_token_ids=facts.eos_token_ids,
        architecture=facts.architecture,
        dtype=str(facts.dtype).removeprefix("torch."),
        backend=loaded.name,
        block_size=block_size,
        num_blocks=size.num_blocks,
        kv_bytes_per_block=block_bytes,
        prefill_per_decode=loaded.prefill_per_decode,
    )
    limits = BatchLimits(config.max_num_requests, size.max_model_len, block_size, facts.vocab_size)
    batch = InputBatch(limits, facts.eos_token_ids, loaded.device)
    runner = loaded.build(block_size, size.num_blocks, size.max_model_len)
    return Worker(info, runner, batch, Sampler(facts.vocab_size, loaded.device))
