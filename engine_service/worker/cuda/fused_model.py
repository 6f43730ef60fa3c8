"""A decoder of the Llama family in few, large operations: joined projections, norms and rotation in one kernel each.

Computes what transformers' own layers compute, with half the kernels; weights by the names that transformers gives.
Must not know: the KV pool, graphs, requests, where weights come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine_service.worker.attention import LayerShape
from engine_service.worker.cuda.pieces import Pieces
from engine_service.worker.kernels.decoder_shape import DecoderShape
from engine_service.worker.lora.adapter import LinearShape
from engine_service.worker.lora.linear_hooks import AdapterRows, LinearHooks
from engine_service.worker.paged_model import AttentionCall, AttentionContext

_NO_ADAPTERS = "the fused decoder has no adapters"


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer on the device. `qkv` and `gate_up` are rows of several matrices one after the other."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class FusedDecoder:
    """A StepModel. `rotary`: cosine and sine float32 [positions, head size / 2] of every position that may come."""

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        shape: DecoderShape,
        rotary: tuple[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        device: torch.device,
        pieces: Pieces,
    ) -> None:
        """Copies `weights` layer by layer. KeyError for one that is missing, ValueError for one of another shape."""
        source = _Source(weights, dtype, device)
        table = (shape.vocabulary, shape.hidden)
        self._shape = shape
        self._pieces = pieces
        self._embedding = source.take("model.embed_tokens.weight", *table)
        self._head = self._embedding if shape.tied_head else source.take("lm_head.weight", *table)
        self._norm = source.take("model.norm.weight", shape.hidden)
        self._cosine, self._sine = (table.to(device=device, dtype=dtype) for table in rotary)
        self._layers = [_fuse(source, layer, shape) for layer in range(shape.layers)]
        self.layers = tuple(
            LayerShape(
                shape.query_heads, shape.kv_heads, shape.head_size, shape.head_size, shape.head_size**-0.5, window
            )
            for window in shape.windows
        )

    @property
    def adapters(self) -> LinearHooks:
        raise ValueError(_NO_ADAPTERS)

    def find_linears(self) -> dict[str, LinearShape]:
        raise ValueError(_NO_ADAPTERS)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        context: AttentionContext,
        adapters: AdapterRows | None = None,
    ) -> torch.Tensor:
        assert adapters is None, _NO_ADAPTERS
        pieces, epsilon = self._pieces, self._shape.epsilon
        hidden = functional.embedding(input_ids, self._embedding)
        # One factor for all heads of a token.
        cosine, sine = (table.index_select(0, positions).unsqueeze(1) for table in (self._cosine, self._sine))
        normed = pieces.norm(hidden, self._layers[0].input_norm, epsilon)
        for number, layer in enumerate(self._layers):
            attended = self._attend(number, layer, normed, cosine, sine, context)
            added = functional.linear(attended, layer.output, layer.output_bias)
            hidden, normed = pieces.add_norm(hidden, added, layer.post_norm, epsilon)
            added = functional.linear(pieces.gate(functional.linear(normed, layer.gate_up)), layer.down)
            if number + 1 < len(self._layers):
                hidden, normed = pieces.add_norm(hidden, added, self._layers[number + 1].input_norm, epsilon)
        last = hidden.index_select(0, rows) + added.index_select(0, rows)
        return functional.linear(pieces.norm(last, self._norm, epsilon), self._head)

    def _attend(
        self,
        number: int,
        layer: FusedLayer,
        normed: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        context: AttentionContext,
    ) -> torch.Tensor:
        """[T, hidden] -> [T, query heads * head size]."""
        shape = self._shape
        heads = functional.linear(normed, layer.qkv, layer.qkv_bias).view(len(normed), -1, shape.head_size)
        queries, keys = heads[:, : shape.query_heads], heads[:, shape.query_heads : -shape.kv_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = self._pieces.norm(queries, layer.query_norm, shape.epsilon)
            keys = self._pieces.norm(keys, layer.key_norm, shape.epsilon)
        call = AttentionCall(
            number,
            _as_called(self._pieces.rotate(queries, cosine, sine)),
            _as_called(self._pieces.rotate(keys, cosine, sine)),
            _as_called(heads[:, -shape.kv_heads :]),
            self.layers[number].scale,
            self.layers[number].sliding_window,
            None,
        )
        return context.attention(call)[0].flatten(1)


def _as_called(heads: torch.Tensor) -> torch.Tensor:
    """[T, heads, size] -> [1, heads, T, size], as transformers' layers call attention; a view."""
    return heads.transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint's tensors, brought to the device one by one."""

    weights: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    device: torch.device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        found = self.weights[name]
        if found.shape != shape:
            sizes = (" x ".join(map(str, each)) for each in (found.shape, shape))
            raise ValueError(f"weights {name} are {next(sizes)}, not {next(sizes)}")
        return found.to(device=self.device, dtype=self.dtype)

    def take_if_there(self, name: str, *shape: int) -> torch.Tensor | None:
        return self.take(name, *shape) if name in self.weights else None

    def join(self, names: Mapping[str, int], *columns: int) -> torch.Tensor:
        """Name -> rows, one after the other."""
        return torch.cat([self.take(name, rows, *columns) for name, rows in names.items()])


def _fuse(source: _Source, layer: int, shape: DecoderShape) -> FusedLayer:
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    query_rows, key_rows = shape.query_heads * shape.head_size, shape.kv_heads * shape.head_size
    rows = {"q": query_rows, "k": key_rows, "v": key_rows}
    hidden, middle = shape.hidden, shape.intermediate
    has_bias = f"{attention}.q_proj.bias" in source.weights
    biases = {f"{attention}.{name}_proj.bias": count for name, count in rows.items()}
    return FusedLayer(
        input_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=source.join({f"{attention}.{name}_proj.weight": count for name, count in rows.items()}, hidden),
        qkv_bias=source.join(biases) if has_bias else None,
        query_norm=source.take(f"{attention}.q_norm.weight", shape.head_size) if shape.head_norms else None,
        key_norm=source.take(f"{attention}.k_norm.weight", shape.head_size) if shape.head_norms else None,
        output=source.take(f"{attention}.o_proj.weight", hidden, query_rows),
        output_bias=source.take_if_there(f"{attention}.o_proj.bias", hidden),
        post_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=source.join({f"{mlp}.gate_proj.weight": middle, f"{mlp}.up_proj.weight": middle}, hidden),
        down=source.take(f"{mlp}.down_proj.weight", hidden, middle),
    )
