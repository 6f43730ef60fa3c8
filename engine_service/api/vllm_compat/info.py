"""What a gateway is told of the model, the server and its load.

Must not know: gRPC calls, requests.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime

from smg_grpc_proto import vllm_engine_pb2 as vllm_pb2

from engine_service.api.vllm_compat.model_files import ModelFacts
from engine_service.core.sampling import NEUTRAL_DEFAULTS, SamplingDefaults
from engine_service.core.stats import EngineStats
from engine_service.loop.messages import EngineInfo

_RATE_SECONDS = 1.0


def model_info(info: EngineInfo, facts: ModelFacts, model_name: str) -> vllm_pb2.GetModelInfoResponse:
    """The folder is named as the tokenizer's path: a gateway on this machine reads it, another asks GetTokenizer."""
    message = vllm_pb2.GetModelInfoResponse(
        model_path=info.model_folder,
        tokenizer_path=info.model_folder,
        served_model_name=model_name,
        is_generation=True,
        max_context_length=info.max_model_len,
        max_req_input_len=info.max_model_len - 1,
        vocab_size=info.vocab_size,
        model_type=facts.model_type,
        architectures=facts.architectures or (info.architecture,),
        eos_token_ids=info.eos_token_ids,
        default_sampling_params_json=default_sampling_json(info.default_sampling),
    )
    if facts.bos_token_id is not None:
        message.bos_token_id = facts.bos_token_id
    if facts.pad_token_id is not None:
        message.pad_token_id = facts.pad_token_id
    return message


def default_sampling_json(defaults: SamplingDefaults) -> str:
    """The defaults that are not neutral, as JSON; "" when all are. The gateway fills them in."""
    neutral = asdict(NEUTRAL_DEFAULTS)
    special = {name: value for name, value in asdict(defaults).items() if value != neutral[name]}
    return json.dumps(special) if special else ""


def server_info(info: EngineInfo, active_requests: int, uptime_s: float) -> vllm_pb2.GetServerInfoResponse:
    return vllm_pb2.GetServerInfoResponse(
        active_requests=active_requests,
        uptime_seconds=uptime_s,
        server_type="tokenwire",
        data_parallel_size=1,
        block_size=info.block_size,
        model_dtype=info.dtype,
        max_num_seqs=info.max_num_requests,
    )


class LoadReporter:
    """Makes load reports; the rate of generation is that since the report before, a second ago or more.

    `clock` is in seconds.
    """

    def __init__(self, engine_version: str, clock: Callable[[], float]) -> None:
        self._version = engine_version
        self._clock = clock
        self._since = clock()
        self._generated = 0
        self._rate = 0.0

    def report(self, stats: EngineStats, info: EngineInfo, rank: int | None) -> vllm_pb2.GetLoadsResponse:
        """The load of rank 0, the only one; of another `rank` there is none."""
        loads = [self._load(stats, info)] if rank in (None, 0) else []
        return vllm_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._version,
            dp_rank_count=len(loads),
            loads=loads,
        )

    def _load(self, stats: EngineStats, info: EngineInfo) -> vllm_pb2.SchedulerLoad:
        # Blocks that only keep a prefix for later are free: an idle engine must not look full.
        return vllm_pb2.SchedulerLoad(
            num_running_reqs=stats.running,
            num_waiting_reqs=stats.waiting,
            num_total_reqs=stats.running + stats.waiting,
            num_used_tokens=stats.used_blocks * info.block_size,
            max_total_num_tokens=stats.total_blocks * info.block_size,
            token_usage=stats.used_blocks / stats.total_blocks,
            gen_throughput=self._generated_per_second(stats.generated_tokens),
            cache_hit_rate=stats.cached_tokens / stats.looked_up_tokens if stats.looked_up_tokens else 0.0,
            max_running_requests=info.max_num_requests,
            num_waiting_uncached_tokens=stats.waiting_tokens,
        )

    def _generated_per_second(self, generated: int) -> float:
        now = self._clock()
        if generated < self._generated:  # a fresh engine process
            self._since, self._generated, self._rate = now, generated, 0.0
        elif now - self._since >= _RATE_SECONDS:
            self._rate = (generated - self._generated) / (now - self._since)
            self._since, self._generated = now, generated
        return self._rate
