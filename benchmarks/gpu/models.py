"""The models of the check: a random one of Llama-3-8B's shape, made on the device, or one of a folder.

Both attend by our interface and, for comparison, by transformers' own attention, over the same weights.
Must not know: workers, timing.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.packed_matrices import PackedMatrices
from engine_service.worker.backend import ModelFacts
from engine_service.worker.config import WeightFormat
from engine_service.worker.cuda.fused_loader import fused_decoder, packed_linears
from engine_service.worker.cuda.pieces import Pieces, compiled_pieces, plain_pieces, torch_compiler
from engine_service.worker.kernels.decoder_shape import Unsupported, decoder_shape
from engine_service.worker.model_loader import serve_model
from engine_service.worker.paged_model import ATTENTION_NAME, StepModel, register_attention

_SEED = 1
_SPREAD = 0.02


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """`bare` is the transformers model, `model` what serves: a fused decoder of its weights where there is one.
    `packed`: the layers' matrices that it has in few bits."""

    name: str
    bare: Any
    model: StepModel
    facts: ModelFacts
    packed: PackedMatrices | None = None

    @property
    def num_weights(self) -> int:
        """In all matrices that a decode step reads; of the embedding it reads a few rows, unless it is the head too."""
        total = sum(int(parameter.numel()) for parameter in self.bare.parameters())
        is_tied = bool(self.bare.config.tie_word_embeddings)
        return total if is_tied else total - int(self.bare.get_input_embeddings().weight.numel())

    @property
    def weight_bytes(self) -> int:
        """What those take."""
        plain, item = self.num_weights, self.facts.dtype.itemsize
        return plain * item if self.packed is None else (plain - self.packed.num_weights) * item + self.packed.nbytes

    def exact(self) -> Any:
        """transformers' model in float32; packed weights as they are, not rounded to the model's number type."""
        copied = copy.deepcopy(self.bare).float()
        if self.packed is not None:
            self.packed.write(copied.state_dict())
        return copied

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


def packed(model: CheckedModel, weight_format: WeightFormat, device: torch.device, *, compiled: bool) -> CheckedModel:
    """The same model with the layers' weights in few bits. `model` itself can be used no more: transformers' weights
    become those that the codes mean."""
    shape = decoder_shape(model.bare.config)
    assert not isinstance(shape, Unsupported)
    make = packed_linears(weight_format, model.facts.dtype, device)
    matrices = PackedMatrices(make)
    weights = model.bare.state_dict()
    decoder = fused_decoder(weights, model.bare.config, shape, model.facts, device, _pieces(compiled), matrices)
    matrices.write(weights)
    name = f"{model.name}, {weight_format.value} by {make.products.name}"
    return CheckedModel(name, model.bare, decoder, model.facts, matrices)


def _pieces(compiled: bool) -> Pieces:
    return compiled_pieces(torch_compiler) if compiled else plain_pieces()


def _checked(name: str, bare: Any, device: torch.device, *, compiled: bool) -> CheckedModel:
    served = serve_model(bare, device, ())
    shape = decoder_shape(bare.config)
    if isinstance(shape, Unsupported):
        return CheckedModel(name, bare, served.paged, served.facts)
    decoder = fused_decoder(bare.state_dict(), bare.config, shape, served.facts, device, _pieces(compiled))
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
