"""From a local checkpoint folder to a model that is known to work with paged attention.

Must not know: hub ids, the KV pool, requests.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine_service.worker.backend import ModelFacts
from engine_service.worker.checkpoint import (
    UnsupportedModelError,
    max_positions,
    read_config,
    read_eos_token_ids,
    refuse_keys,
)
from engine_service.worker.config import ModelDtype
from engine_service.worker.paged_model import ATTENTION_NAME, PagedModel, StepModel, register_attention
from engine_service.worker.quantized.checkpoint import open_checkpoint
from engine_service.worker.quantized.scheme import read_scheme

_LOG = logging.getLogger(__name__)
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Their frequencies depend on the longest position of the whole batch: neighbours would change each other.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """A model as transformers writes it, attending through our interface, and the facts of its checkpoint."""

    paged: StepModel
    facts: ModelFacts


def load_model(
    folder: Path,
    dtype: ModelDtype,
    device: torch.device,
    max_model_len: int | None = None,
    tensor_parallel_size: int = 1,
) -> TransformersModel:
    """Load safetensors from `folder`. ValueError, with the reason, for a checkpoint that cannot be served.

    `max_model_len` is the limit asked for; it decides whether a rope that changes with length is usable.
    With a `tensor_parallel_size` this process is a rank of a torch.distributed group of that size, and gets its share.
    """
    config = read_config(folder)
    text_config = config.get_text_config(decoder=True)
    _refuse_unsupported(config, text_config, max_model_len)
    register_attention()
    transformers_logging.disable_progress_bar()
    model = _load_weights(folder, config, dtype, tensor_parallel_size)
    served = serve_model(model, device, read_eos_token_ids(folder, text_config))
    _check_heads(served.paged, text_config, tensor_parallel_size)
    _report_dtype(dtype, config, served.facts.dtype)
    return served


def serve_model(model: Any, device: torch.device, eos_token_ids: tuple[int, ...]) -> TransformersModel:
    """A transformers model made with the attention `ATTENTION_NAME`. ValueError for one that cannot be served."""
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError("a model with recurrent state cannot be served with a paged KV cache")
    model = model.to(device).eval().requires_grad_(False)
    text_config = model.config.get_text_config(decoder=True)
    with torch.inference_mode():
        paged = PagedModel(model, int(text_config.num_hidden_layers))
    _check_windows(paged, text_config)
    facts = ModelFacts(
        vocab_size=int(model.get_output_embeddings().weight.shape[0]),
        max_model_len=max_positions(text_config),
        eos_token_ids=eos_token_ids,
        architecture=type(model).__name__,
        dtype=model.dtype,
    )
    return TransformersModel(paged, facts)


def _load_weights(folder: Path, config: Any, dtype: ModelDtype, ranks: int) -> Any:
    """The bare transformers model on the CPU; refuses weights that do not fit the architecture."""
    loader, source = _weight_source(folder, config, dtype, ranks)
    try:
        model, report = loader.from_pretrained(
            **source,
            config=config,
            dtype=dtype.value,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported, and refused below
            **_share(ranks),
        )
    except ValueError as error:
        raise UnsupportedModelError(f"transformers cannot load this model: {error}") from error
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the model's weights cannot be read: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        refuse_keys(kind.removesuffix("_keys"), sorted(str(name) for name in report.get(kind) or ()))
    return model


def _weight_source(folder: Path, config: Any, dtype: ModelDtype, ranks: int) -> tuple[Any, dict[str, Any]]:
    """Who loads, and the folder, or what a quantized one holds, dequantised: for quantized ones transformers would ask
    for a package of each format."""
    scheme = read_scheme(folder)
    if scheme is None:
        return AutoModelForCausalLM, {"pretrained_model_name_or_path": folder}
    if ranks > 1:
        raise UnsupportedModelError(f"quantized weights ({scheme.summary}) are not split over {ranks} ranks")
    _LOG.warning("quantized weights (%s) are dequantised", scheme.summary)
    own = getattr(config, "dtype", None) or torch.float32
    checkpoint = open_checkpoint(folder, own if dtype is ModelDtype.AUTO else getattr(torch, dtype.value))
    for part in (config, config.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(f"transformers has no causal language model of type {config.model_type}")
    model_type = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return model_type, {"pretrained_model_name_or_path": None, "state_dict": dict(checkpoint)}


def _share(ranks: int) -> dict[str, Any]:
    """What makes transformers load one rank's share, split as its own plan for the model says."""
    if ranks == 1:
        return {}
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks)}


def _refuse_unsupported(config: Any, text_config: Any, max_model_len: int | None) -> None:
    """What the configuration already tells, before any weight is read."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("an encoder-decoder model cannot be served; only decoder-only models")
    other_layers = sorted(set(getattr(text_config, "layer_types", None) or ()) - _LAYER_TYPES)
    if other_layers:
        raise UnsupportedModelError(f"layers of type {', '.join(other_layers)} are not supported")
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError("layers that share the KV cache of another layer are not supported")
    _refuse_length_dependent_rope(text_config, max_model_len)


def _refuse_length_dependent_rope(text_config: Any, max_model_len: int | None) -> None:
    """Up to its original length such a rope is constant, so a lower `max_model_len` makes it usable."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind not in _LENGTH_DEPENDENT_ROPE:
        return
    original = rope.get("original_max_position_embeddings") or text_config.max_position_embeddings
    if max_model_len is None or max_model_len > original:
        raise UnsupportedModelError(
            f"rope of type {kind} changes with the length of the batch beyond {original:,} positions; "
            f"set max_model_len to at most {original:,}"
        )


def _check_windows(model: StepModel, text_config: Any) -> None:
    """A layer that the configuration calls sliding must have told its window to the attention function."""
    kinds = getattr(text_config, "layer_types", None) or ()
    for layer, (kind, shape) in enumerate(zip(kinds, model.layers, strict=False)):
        if kind == "sliding_attention" and shape.sliding_window is None:
            raise UnsupportedModelError(f"layer {layer} has a sliding window but does not say how long it is")


def _check_heads(model: StepModel, text_config: Any, ranks: int) -> None:
    """Query heads must lie on the rank of their KV head: both are split, or neither is."""
    if ranks == 1:
        return
    whole = (text_config.num_attention_heads, text_config.num_key_value_heads)
    for layer, shape in enumerate(model.layers):
        here = (shape.num_query_heads, shape.num_kv_heads)
        if here not in (whole, (whole[0] // ranks, whole[1] // ranks)):
            raise UnsupportedModelError(
                f"layer {layer} has {here[0]} query and {here[1]} key-value heads on each of {ranks} ranks, "
                f"which is no even share of {whole[0]} and {whole[1]}"
            )


def _report_dtype(asked: ModelDtype, config: Any, actual: torch.dtype) -> None:
    own = getattr(config, "dtype", None)
    if asked is not ModelDtype.AUTO and own is not None and own != actual:
        _LOG.warning("checkpoint is %s, served as %s because dtype was set", own, actual)
