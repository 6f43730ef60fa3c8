"""Runs a transformers model over the flattened batch of a step, with our attention in every layer.

Must not know: requests, plans, where weights come from, how KV is laid out.

The batch is one super-sequence [1, T] with explicit positions. What attention needs (the step's context)
travels through the model's keyword arguments down to the attention function: there is no module state.
"""

from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch
from transformers import AttentionInterface

from engine_service.worker.attention import AttentionBackend, LayerShape, StepT
from engine_service.worker.checkpoint import UnsupportedModelError
from engine_service.worker.lora.adapter import LinearShape
from engine_service.worker.lora.linear_hooks import AdapterRows, LinearHooks, find_linears

ATTENTION_NAME = "tokenwire_paged"

# Keyword arguments of the models' attention calls that change nothing in our kind of forward pass.
_HARMLESS = frozenset({"position_ids", "use_cache", "cache", "past_key_values", "cache_position", "output_attentions"})


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer of the model asks for: query [1, heads, T, key dim], key and value with KV heads."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    sliding_window: int | None
    softcap: float | None


class AttentionContext(Protocol):
    """What the attention function finds in the keyword arguments of the forward pass."""

    def attention(self, call: AttentionCall) -> torch.Tensor:
        """Attention output [1, T, heads, value dim]."""
        ...


class StepContext(Generic[StepT]):
    """The context of a real step, which the backend has prepared: KV into the pool, then attention over the pool."""

    def __init__(self, backend: AttentionBackend[StepT], step: StepT) -> None:
        self._backend = backend
        self._step = step

    def attention(self, call: AttentionCall) -> torch.Tensor:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (call.query, call.key, call.value))
        self._backend.write_kv(call.layer, key, value, self._step)
        return self._backend.attend(call.layer, query, self._step).unsqueeze(0)


class LayerProbe:
    """A context that attends nothing and notes the shape of every layer that asks."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attention(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.layers:
            raise UnsupportedModelError(f"layer {call.layer} attends more than once in a forward pass")
        _, heads, tokens, key_dim = call.query.shape
        shape = LayerShape(
            num_query_heads=heads,
            num_kv_heads=call.key.shape[1],
            key_dim=key_dim,
            value_dim=call.value.shape[-1],
            scale=call.scale,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
        )
        self.layers[call.layer] = shape
        return call.query.new_zeros(1, tokens, heads, shape.value_dim)


class StepModel(Protocol):
    """A model without its KV pool."""

    @property
    def layers(self) -> tuple[LayerShape, ...]: ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: AttentionContext,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """Logits [R, vocabulary] at the batch rows `rows`; int64 ids [T], positions [T], rows [R]."""
        ...

    @property
    def adapters(self) -> LinearHooks: ...

    def find_linears(self) -> dict[str, LinearShape]:
        """The layers that an adapter may change."""
        ...


class PagedModel:
    """The model of a worker, ready to run. `layers` are in the order of the layer numbers."""

    def __init__(self, model: Any, num_layers: int) -> None:
        self._model = model
        self.adapters = LinearHooks(model)
        self.layers = self._probe(num_layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: AttentionContext,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        """Logits [R, vocabulary] at the batch rows `rows`; int64 ids [T], positions [T], rows [R].

        `adapters` are of the batch rows; None: no row has one.
        """
        with self.adapters.step(adapters, input_ids.device):
            output = self._model(
                input_ids=input_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=rows,
                attention_context=context,
            )
        return output.logits[0]

    def find_linears(self) -> dict[str, LinearShape]:
        """The layers that an adapter may change."""
        two = torch.arange(2, device=self._model.get_input_embeddings().weight.device)
        with torch.inference_mode():
            return find_linears(
                self._model, lambda: self.forward(torch.zeros_like(two), two, two[1:], LayerProbe()), len(two)
            )

    def _probe(self, num_layers: int) -> tuple[LayerShape, ...]:
        """Run two tokens through and see that each layer calls our attention, once, in a form we honour."""
        device = self._model.get_input_embeddings().weight.device
        probe = LayerProbe()
        two = torch.arange(2, device=device)
        logits = self.forward(torch.zeros_like(two), two, two[1:], probe)
        if sorted(probe.layers) != list(range(num_layers)):
            raise UnsupportedModelError(
                f"{len(probe.layers)} of {num_layers} layers use plain attention; all of them must"
            )
        if logits.shape[0] != 1:
            raise UnsupportedModelError("the model cannot restrict its logits to some rows (logits_to_keep)")
        return tuple(probe.layers[layer] for layer in range(num_layers))


def register_attention() -> None:
    """Make our attention known to transformers under `ATTENTION_NAME`; may be called again.

    No mask function is registered on purpose: transformers then builds no mask at all.
    """
    AttentionInterface.register(ATTENTION_NAME, _attention_function)


def _matters(name: str, given: object) -> bool:
    """Whether an extra argument of an attention call could change its outcome (unset and False cannot)."""
    return name not in _HARMLESS and given is not None and given is not False


def _attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    attention_context: AttentionContext | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The signature that transformers' models call; refuses whatever we would have to ignore."""
    if attention_context is None:
        raise UnsupportedModelError("the model does not pass keyword arguments on to its attention")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedModelError("the model's attention is not plainly causal")
    unknown = sorted(name for name, given in others.items() if _matters(name, given))
    if unknown:
        raise UnsupportedModelError(f"the model's attention takes {', '.join(unknown)}, which is not supported")
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return attention_context.attention(call), None
