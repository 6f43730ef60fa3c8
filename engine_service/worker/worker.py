"""Executes plans on one device and returns results: the owner of model, KV pool and token buffers.

Must not know: the scheduler, the network, text.
"""

import os
from collections import deque
from dataclasses import dataclass

import torch

from engine_service.core.plan import Failure, Plan, Result
from engine_service.worker.attention import AttentionBackend, KvGeometry
from engine_service.worker.attention_registry import resolve_attention
from engine_service.worker.config import Device, WorkerConfig, WorkerInfo
from engine_service.worker.input_batch import BatchLimits, InputBatch, StepInput
from engine_service.worker.memory import free_memory, size_pool
from engine_service.worker.model_loader import load_model
from engine_service.worker.paged_model import PagedModel, StepContext
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
        model: PagedModel,
        backend: AttentionBackend,
        batch: InputBatch,
        sampler: Sampler,
    ) -> None:
        self.info = info
        self._model = model
        self._backend = backend
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
        """Forget what is in flight. Memory goes when the worker does."""
        self._launched.clear()

    def _run(self, step: StepInput) -> Sampled | None:
        """Forward pass and sampling; None when no chunk reaches its request's last token."""
        context = StepContext(self._backend, step.layout)
        logits = self._model.forward(step.input_ids, step.positions, step.sample_rows, context)
        if not step.request_ids:
            return None
        sampled = self._sampler.sample(logits, step.sampling)
        self._batch.store(step, sampled)
        return sampled


def build_worker(config: WorkerConfig) -> Worker:
    """Load the model, size and allocate the KV pool. ValueError, with numbers, for what cannot work."""
    _set_threads(config.threads)
    device = _torch_device(config.device)
    loaded = load_model(config.model_folder, config.dtype, device, config.max_model_len)
    name, kind = resolve_attention(config.attention_backend, config.device)
    block_size = config.block_size or kind.default_block_size
    geometry = KvGeometry(loaded.model.layers, block_size, loaded.dtype, device)
    kind.check(geometry)
    block_bytes = kind.block_bytes(geometry)
    size = size_pool(config, loaded.max_model_len, block_size, block_bytes, free_memory(config.device))
    info = WorkerInfo(
        vocab_size=loaded.vocab_size,
        max_model_len=size.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        architecture=loaded.architecture,
        dtype=str(loaded.dtype).removeprefix("torch."),
        attention_backend=name,
        block_size=block_size,
        num_blocks=size.num_blocks,
        kv_bytes_per_block=block_bytes,
    )
    limits = BatchLimits(config.max_num_requests, size.max_model_len, block_size, loaded.vocab_size)
    batch = InputBatch(limits, loaded.eos_token_ids, device)
    sampler = Sampler(loaded.vocab_size, device)
    return Worker(info, loaded.model, kind.build(geometry, size.num_blocks), batch, sampler)


def _torch_device(device: Device) -> torch.device:
    if device is Device.CUDA and not torch.cuda.is_available():
        raise ValueError("device is cuda, but this torch finds no CUDA device")
    return torch.device(device.value)


def _set_threads(threads: int) -> None:
    """0: as many as the cores this process may use."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
