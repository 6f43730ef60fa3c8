"""The models of the check: a random one of Llama-3-8B's shape, made on the device, or one of a folder.

Both attend by our interface and, for comparison, by transformers' own attention, over the same weights.
Must not know: workers, timing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from engine_service.worker.backend import ModelFacts
from engine_service.worker.cuda.fused_loader import fused_decoder
from engine_service.worker.cuda.pieces import compiled_pieces, plain_pieces, torch_compiler
from engine_service.worker.kernels.decoder_shape import Unsupported, decoder_shape
from engine_service.worker.model_loader import serve_model
from engine_service.worker.paged_model import ATTENTION_NAME, StepModel, register_attention

_SEED = 1
_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """`bare` is the transformers model, `model` what serves: a fused decoder of its weights where there is one."""

    name: str
    bare: Any
    model: StepModel
    facts: ModelFacts

    @property
    def weight_bytes(self) -> int:
        """Of all matrices that a decode step reads; of the embedding it reads a few rows, unless it is the head too."""
        total = sum(int(parameter.nbytes) for parameter in self.bare.parameters())
        is_tied = bool(self.bare.config.tie_word_embeddings)
        return total if is_tied else total - int(self.bare.get_input_embeddings().weight.nbytes)

    @contextmanager
    def as_transformers_has_it(self) -> Iterator[Any]:
        """The bare model with its own attention."""
        self.bare.set_attn_implementation("sdpa")
        try:
            yield self.bare
        finally:
            self.bare.set_attn_implementation(ATTENTION_NAME)


def random_llama(device: torch.device, dtype: torch.dtype, *, tiny: bool, compiled: bool) -> CheckedModel:
    """Weights drawn on the device: neither a file nor the host's memory has to hold them."""
    config = LlamaConfig(**(_TINY if tiny else _LLAMA_3_8B), dtype=dtype)
    register_attention()
    config._attn_implementation = ATTENTION_NAME
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 4 * _SPREAD if tiny else _SPREAD, generator=generator)
    return _checked("tiny random" if tiny else "random, of Llama-3-8B's shape", model, device, compiled=compiled)


def of_folder(folder: Path, device: torch.device, *, compiled: bool) -> CheckedModel:
    """A checkpoint in its own dtype."""
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation=ATTENTION_NAME, local_files_only=True
    )
    return _checked(folder.name, model, device, compiled=compiled)


def _checked(name: str, bare: Any, device: torch.device, *, compiled: bool) -> CheckedModel:
    served = serve_model(bare, device, ())
    shape = decoder_shape(bare.config)
    if isinstance(shape, Unsupported):
        return CheckedModel(name, bare, served.paged, served.facts)
    pieces = compiled_pieces(torch_compiler) if compiled else plain_pieces()
    decoder = fused_decoder(bare.state_dict(), bare.config, shape, served.facts, device, pieces)
    return CheckedModel(name, bare, decoder, served.facts)


_LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}
_TINY: dict[str, Any] = _LLAMA_3_8B | {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
