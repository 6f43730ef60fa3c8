"""Builds the engine: worker, scheduler and loop of one engine process, and what it says of itself.

Together with `__main__` and `engine_main` the only place that builds objects; the only one that imports torch. Must
not know: gRPC, sessions, how its process is run.
"""

import os
import secrets
import time
from dataclasses import asdict
from pathlib import Path

import structlog

from engine_service.build_adapters import build_adapters
from engine_service.config import DEFAULT_CPU_KV_CACHE_BYTES, DEFAULT_DEVICE_KV_CACHE_FRACTION, DeviceChoice
from engine_service.core.admission import EngineLimits, servable_model_len
from engine_service.core.sampling import NEUTRAL_DEFAULTS, SamplingDefaults
from engine_service.core.scheduler import Scheduler, SchedulerConfig
from engine_service.core.weight_report import WeightReport
from engine_service.engine_config import EngineConfig, ModelConfig
from engine_service.generation_config import read_sampling_defaults
from engine_service.grammar.compiler import GrammarCompiler
from engine_service.grammar.limits import GrammarLimits
from engine_service.grammar.vocabulary import NoVocabulary
from engine_service.loop.engine_loop import EngineLoop
from engine_service.loop.grammar_desk import GrammarDesk
from engine_service.loop.mailbox import EngineMailbox
from engine_service.loop.messages import AdapterNews, EngineInfo, EngineReady, StartTimes
from engine_service.loop.step_recorder import StepRecorder
from engine_service.loop.warm_up import warm_up
from engine_service.loop.worker_protocol import Worker as LoopWorker
from engine_service.simulated.build import build_simulated_worker
from engine_service.worker.config import CudaOptions, Device, ModelDtype, WeightFormat, WorkerConfig, WorkerInfo
from engine_service.worker.ranks import OtherRanks
from service_runtime.model_files import (
    tokenizer_fingerprint,
    weights_fingerprint,
)

_RANK_MODULE = "engine_service.rank_main"
# In this time a step that fails on a lost rank says so itself.
_LOST_RANK_SECONDS = 3.0


def build_engine(
    config: EngineConfig, folder: Path, mailbox: EngineMailbox, recorder: StepRecorder | None = None
) -> tuple[EngineLoop, EngineReady]:
    """Loads the model in `folder` and builds the engine around it. Raises ValueError with a plain message."""
    scheduling = config.scheduling
    began = time.monotonic()
    worker, info = _build_worker(config, folder)
    loaded = time.monotonic()
    limits = _limits(info, is_length_fixed=config.model.max_model_len is not None)
    warm_up(
        worker,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_model_len=limits.max_model_len,
        step_token_budget=scheduling.step_token_budget,
    )
    times = StartTimes(loaded - began, time.monotonic() - loaded)
    scheduler = Scheduler(_scheduler_config(config, info, limits))
    adapters = build_adapters(config.lora, worker, mailbox)
    loop = EngineLoop(
        scheduler,
        worker,
        mailbox,
        limits=limits,
        clock=time.monotonic,
        overlap=scheduling.overlap,
        grammars=None if config.model.simulate else _grammar_desk(folder, info, mailbox),
        adapters=adapters,
        checks_steps=scheduling.check_invariants,
        recorder=recorder,
    )
    told = adapters.news() if adapters is not None else AdapterNews()
    return loop, EngineReady(_engine_info(info, limits, folder, config), scheduler.stats(), times, told)


def _scheduler_config(config: EngineConfig, info: WorkerInfo, limits: EngineLimits) -> SchedulerConfig:
    """What the settings leave open is the worker's to say."""
    scheduling = config.scheduling
    measured, chosen = info.prefill_per_decode, scheduling.prefill_per_decode
    return SchedulerConfig(
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        step_token_budget=scheduling.step_token_budget,
        prefill_chunk_size=scheduling.prefill_chunk_size,
        max_num_requests=scheduling.max_num_requests,
        max_waiting_requests=scheduling.max_waiting_requests,
        max_waiting_tokens=scheduling.max_waiting_tokens,
        max_model_len=limits.max_model_len,
        eos_token_ids=limits.eos_token_ids,
        prefix_cache=config.cache.prefix_cache,
        prefill_per_decode=measured if chosen is None else chosen,
        max_draft_tokens=scheduling.draft_tokens(info.rows_are_independent),
    )


def _build_worker(config: EngineConfig, folder: Path) -> tuple[LoopWorker, WorkerInfo]:
    """Torch and the model are imported only where something is computed."""
    if config.model.simulate is not None:
        simulated = build_simulated_worker(_worker_config(config, folder), Path(config.model.simulate))
        return simulated.worker, simulated.info
    from engine_service.worker.build import build_worker
    from engine_service.worker.threaded import ThreadedWorker

    worker_config = _worker_config(config, folder)
    built = build_worker(worker_config, _start_ranks(worker_config, config))
    _report_weights(built.info.weights)
    needs_thread = config.scheduling.overlap and not built.runs_ahead
    return ThreadedWorker(built) if needs_thread else built, built.info


def _report_weights(weights: WeightReport | None) -> None:
    """One event for weights that are not simply the checkpoint's."""
    if weights is not None and (weights.error is not None or weights.source != "plain"):
        error = {} if weights.error is None else asdict(weights.error)
        structlog.get_logger().info("weights", source=weights.source, kept=weights.kept, **error)


def _start_ranks(worker: WorkerConfig, config: EngineConfig) -> OtherRanks | None:
    """None when the whole model is in this process."""
    if worker.tensor_parallel_size == 1:
        return None
    from engine_service.worker.rank_processes import RankProcesses, RankProgram

    program = RankProgram(_RANK_MODULE, os.environ, (config.log.level, config.log.log_format))
    ranks = RankProcesses(worker, program, _end_without_rank)
    structlog.get_logger().info("ranks started", pids=ranks.pids)
    return ranks


def _end_without_rank(reason: str) -> None:
    """Called on a thread of its own: the others may wait for ever, for the rank or for a command."""
    structlog.get_logger().error("rank lost", reason=reason)
    time.sleep(_LOST_RANK_SECONDS)
    os._exit(1)


def _grammar_desk(folder: Path, info: WorkerInfo, mailbox: EngineMailbox) -> GrammarDesk:
    limits = GrammarLimits()
    compiler = GrammarCompiler(folder, info.vocab_size, info.eos_token_ids, limits, _warn_no_grammars)
    return GrammarDesk(compiler, max_waiting=limits.max_waiting, wake=mailbox.wake)


def _warn_no_grammars(reason: NoVocabulary) -> None:
    structlog.get_logger().warning("structured output is off", reason=str(reason))


def _worker_config(config: EngineConfig, folder: Path) -> WorkerConfig:
    model, cache = config.model, config.cache
    device = _resolve_device(model)
    has_size = cache.num_blocks or cache.memory_bytes is not None or cache.memory_fraction
    default_memory = DEFAULT_CPU_KV_CACHE_BYTES if device is Device.CPU and not has_size else None
    return WorkerConfig(
        model_folder=folder,
        dtype=ModelDtype(model.dtype),
        device=device,
        backend=model.backend,
        weight_format=WeightFormat(model.weight_format),
        block_size=cache.block_size,
        kv_cache_memory=cache.memory_bytes if cache.memory_bytes is not None else default_memory,
        kv_cache_fraction=cache.memory_fraction or DEFAULT_DEVICE_KV_CACHE_FRACTION,
        num_blocks=cache.num_blocks,
        max_model_len=model.max_model_len,
        max_num_requests=config.scheduling.max_num_requests,
        step_token_budget=config.scheduling.step_token_budget,
        threads=model.threads,
        tensor_parallel_size=model.tensor_parallel_size,
        cuda=CudaOptions(model.cuda_graph_requests, model.batch_invariant, model.cuda_compile),
        max_loras=config.lora.max_resident,
        max_lora_rank=config.lora.max_rank,
        measure_weight_error=model.measure_weight_error,
    )


def _resolve_device(model: ModelConfig) -> Device:
    if model.simulate is not None:
        return Device.CPU
    if model.device is not DeviceChoice.AUTO:
        return Device(model.device.value)
    import torch

    return Device.CUDA if torch.cuda.is_available() else Device.CPU


def _limits(info: WorkerInfo, *, is_length_fixed: bool) -> EngineLimits:
    """A length that was left open is lowered to what the pool serves; a given one may be refused."""
    servable = servable_model_len(info.max_model_len, info.block_size, info.num_blocks)
    return EngineLimits(
        info.vocab_size,
        info.max_model_len if is_length_fixed else servable,
        frozenset(info.eos_token_ids),
        info.block_size,
        info.num_blocks,
    )


def _engine_info(info: WorkerInfo, limits: EngineLimits, folder: Path, config: EngineConfig) -> EngineInfo:
    return EngineInfo(
        pid=os.getpid(),
        epoch=secrets.token_hex(8),
        vocab_size=info.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=info.eos_token_ids,
        tokenizer_fingerprint=tokenizer_fingerprint(folder),
        weights_fingerprint=_weights_fingerprint(folder, config.model.weight_format),
        architecture=info.architecture,
        dtype=info.dtype,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_requests=config.scheduling.max_num_requests,
        default_sampling=_default_sampling(config, folder),
        model_folder=str(folder.resolve()),
        device=_resolve_device(config.model).value,
        backend=info.backend,
        weight_format=config.model.weight_format,
        tensor_parallel_size=config.model.tensor_parallel_size,
        kv_block_bytes=info.kv_bytes_per_block,
        max_waiting_requests=config.scheduling.max_waiting_requests,
        step_token_budget=config.scheduling.step_token_budget,
        weights=info.weights,
    )


def _weights_fingerprint(folder: Path, weight_format: str) -> str:
    """Weights that are kept otherwise give other tokens: such engines may not go on with each other's requests."""
    found = weights_fingerprint(folder)
    return found if not found or weight_format == "plain" else f"{found}-{weight_format}"


def _default_sampling(config: EngineConfig, folder: Path) -> SamplingDefaults:
    if config.model.default_sampling == "neutral":
        return NEUTRAL_DEFAULTS
    return read_sampling_defaults(folder, structlog.get_logger().warning)
