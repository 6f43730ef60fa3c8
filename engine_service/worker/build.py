"""Builds a worker: loads the model, sizes and allocates the KV pool, puts the parts together.

Must not know: the scheduler, the network, how a plan is executed.
"""

import time
from dataclasses import replace

from engine_service.grammar.row_grammars import RowGrammars
from engine_service.worker.backend import LoadedModel
from engine_service.worker.backend_registry import resolve_backend
from engine_service.worker.config import Device, WorkerConfig, WorkerInfo
from engine_service.worker.input_batch import BatchLimits, InputBatch
from engine_service.worker.memory import free_memory
from engine_service.worker.pool_size import size_pool
from engine_service.worker.ranks import NoOtherRanks, OtherRanks, RankPool
from engine_service.worker.sampler import Sampler
from engine_service.worker.transfer import Upload
from engine_service.worker.worker import AdapterRules, Worker


def build_worker(config: WorkerConfig, ranks: OtherRanks | None = None) -> Worker:
    """Load the model, size and allocate the KV pool. ValueError, with numbers, for what cannot work.

    With a `tensor_parallel_size` this is rank 0, and owns the other `ranks`.
    """
    others = ranks or NoOtherRanks()
    try:
        return _build(config, others)
    except BaseException as error:
        reason = others.explain(error) if isinstance(error, RuntimeError) else error
        others.close()
        raise reason from error


def build_batch(config: WorkerConfig, loaded: LoadedModel, pool: RankPool, upload: Upload) -> InputBatch:
    """The state of the requests, as every rank keeps it."""
    facts = loaded.facts
    limits = BatchLimits(config.max_num_requests, pool.max_model_len, pool.block_size, facts.vocab_size)
    return InputBatch(limits, facts.eos_token_ids, loaded.device, upload)


def _build(config: WorkerConfig, ranks: OtherRanks) -> Worker:
    backend = resolve_backend(config.backend, config.device, config.tensor_parallel_size)
    return assemble_worker(config, backend.load(config), ranks)


def assemble_worker(config: WorkerConfig, loaded: LoadedModel, ranks: OtherRanks) -> Worker:
    """A worker of a model that is loaded already; ValueError as `build_worker`."""
    facts = loaded.facts
    block_size = config.block_size or loaded.default_block_size
    block_bytes = loaded.block_bytes(block_size)
    size = size_pool(config, facts.max_model_len, block_size, block_bytes, _free_for_pool(config, loaded, ranks))
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
        rows_are_independent=loaded.rows_are_independent,
    )
    rules = AdapterRules(loaded.linear_shapes(), config.max_lora_rank) if config.max_loras else None
    pool = RankPool(block_size, size.num_blocks, size.max_model_len)
    ranks.allocate(pool)
    transfer = loaded.transfer()
    batch = build_batch(config, loaded, pool, transfer.upload)
    runner = loaded.build(block_size, size.num_blocks, size.max_model_len)
    sampler = Sampler(facts.vocab_size, loaded.device, loaded.row_draw, transfer.upload)
    grammars = RowGrammars(facts.vocab_size, facts.eos_token_ids, time.thread_time)
    info = replace(info, weights=runner.weights)
    return Worker(info, runner, batch, sampler, grammars, ranks, transfer, rules)


def _free_for_pool(config: WorkerConfig, loaded: LoadedModel, ranks: OtherRanks) -> int:
    """Bytes a rank has beside what its steps need: ranks on CPUs share the host's memory, each GPU has its own."""
    is_wanted = config.num_blocks is None and config.kv_cache_memory is None
    reserved = loaded.reserved_bytes(config.block_size or loaded.default_block_size) if is_wanted else 0
    free = ranks.smallest(free_memory(config.device))
    own = free // config.tensor_parallel_size if config.device is Device.CPU else free
    return max(0, own - reserved)
