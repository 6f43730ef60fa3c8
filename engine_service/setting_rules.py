"""Which settings of the engine service fit together. Each rule raises ValueError with the flags and the numbers.

Must not know: torch, gRPC, how the settings are used.
"""

from itertools import combinations
from typing import TYPE_CHECKING

from engine_service.lora_options import named_adapters

if TYPE_CHECKING:
    from engine_service.config import EngineSettings


def check_together(settings: "EngineSettings") -> None:
    """All rules, in a fixed order: the first that is broken is told."""
    _check_step(settings)
    _check_cache(settings)
    _check_waiting(settings)
    _check_features(settings)
    _check_adapters(settings)
    _check_step_dumps(settings)
    settings.tls  # noqa: B018 (raises)
    _check_ports(settings)


def _check_step(settings: "EngineSettings") -> None:
    chunk, requests, budget = settings.prefill_chunk_size, settings.max_num_requests, settings.step_token_budget
    if chunk is not None and chunk > budget:
        raise ValueError(f"--prefill-chunk-size {chunk:,} exceeds --step-token-budget {budget:,}")
    if requests is not None and requests > budget:
        raise ValueError(
            f"--max-num-requests {requests:,} exceeds --step-token-budget {budget:,}: each running request needs one "
            "token of a step"
        )


def _check_cache(settings: "EngineSettings") -> None:
    sizes = {
        "--num-blocks": settings.num_blocks,
        "--kv-cache-memory": settings.kv_cache_memory,
        "--kv-cache-fraction": settings.kv_cache_fraction,
    }
    given = [flag for flag, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} contradict each other: give one size of the KV cache")


def _check_waiting(settings: "EngineSettings") -> None:
    if settings.max_model_len is not None and settings.max_model_len > settings.max_waiting_tokens:
        raise ValueError(
            f"--max-waiting-tokens {settings.max_waiting_tokens:,} is below --max-model-len "
            f"{settings.max_model_len:,}: the longest prompts could never wait for their turn"
        )


def _check_features(settings: "EngineSettings") -> None:
    if settings.speculation == "prompt-lookup" and settings.overlap:
        raise ValueError(
            f"--speculation {settings.speculation} and --overlap contradict each other: a guess follows the last "
            "token, which is not known yet when the next step is planned ahead"
        )
    if settings.batch_invariant and settings.cuda_graph_requests < (settings.max_num_requests or 0):
        raise ValueError(
            f"--batch-invariant needs graphs for all requests, but --cuda-graph-requests "
            f"{settings.cuda_graph_requests:,} is below --max-num-requests {settings.max_num_requests:,}"
        )
    if settings.simulate is not None and settings.tensor_parallel_size > 1:
        raise ValueError(
            f"--simulate computes nothing that --tensor-parallel-size {settings.tensor_parallel_size} could share"
        )


def _check_adapters(settings: "EngineSettings") -> None:
    if settings.model_name in dict(named_adapters(settings.lora)):
        raise ValueError(f"--lora names {settings.model_name!r}, which is the model itself")
    if settings.lora_dir is not None and not settings.lora_dir.is_dir():
        raise ValueError(f"--lora-dir: {settings.lora_dir} is not a folder")
    if settings.allow_lora_rpc and settings.lora_dir is None:
        raise ValueError("--allow-lora-rpc needs --lora-dir, the folder to load from")
    if not settings.lora and settings.lora_dir is None:
        return
    if settings.tensor_parallel_size > 1:
        raise ValueError(f"LoRA adapters cannot be shared by --tensor-parallel-size {settings.tensor_parallel_size}")
    if settings.simulate is not None:
        raise ValueError("--simulate computes nothing that LoRA adapters could change")


def _check_step_dumps(settings: "EngineSettings") -> None:
    folder = settings.step_dump_folder
    if settings.step_recorder_steps == 0 and (settings.allow_step_dump_rpc or folder is not None):
        flag = "--allow-step-dump-rpc" if settings.allow_step_dump_rpc else "--step-dump-folder"
        raise ValueError(f"--step-recorder-steps 0 keeps nothing that {flag} could give")
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--step-dump-folder: {folder} is not a folder")


def _check_ports(settings: "EngineSettings") -> None:
    listeners = {
        "--port": (settings.host, settings.port),
        "--metrics-port": (settings.metrics_host, settings.metrics_port),
        "--vllm-compat-port": (settings.vllm_compat_host, settings.vllm_compat_port),
    }
    for (flag, place), (other_flag, other) in combinations(listeners.items(), 2):
        if place == other and place[1]:
            raise ValueError(f"{flag} and {other_flag} are both {place[1]}")
