"""A decoder of the Llama family in few, large operations: joined projections, norms and rotation in one kernel each.

Computes what transformers' own layers compute, with half the kernels; weights by the names that transformers gives.
Must not know: the KV pool, graphs, requests, where weights come from.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine_service.worker.attention import LayerShape
from engine_service.worker.cuda.linear import Linear, MakeLinear, plain_linear
from engine_service.worker.cuda.pieces import Pieces
from engine_service.worker.cuda.weight_source import WeightSource
from engine_service.worker.kernels.decoder_shape import DecoderShape
from engine_service.worker.lora.adapter import LinearShape
from engine_service.worker.lora.linear_hooks import AdapterRows, LinearHooks
from engine_service.worker.paged_model import AttentionCall, AttentionContext

_NO_ADAPTERS = "the fused decoder has no adapters"


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer on the device. `qkv` and `gate_up` are rows of several matrices one after the other."""

    input_norm: torch.Tensor
    qkv: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear


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
        make: MakeLinear = plain_linear,
    ) -> None:
        """Copies `weights` layer by layer; `make` decides how the layers' matrices are kept. KeyError for one that is
        missing, ValueError for one of another shape."""
        source = WeightSource(weights, dtype, device)
        table = (shape.vocabulary, shape.hidden)
        self._shape = shape
        self._pieces = pieces
        self._embedding = source.take("model.embed_tokens.weight", *table)
        self._head = self._embedding if shape.tied_head else source.take("lm_head.weight", *table)
        self._norm = source.take("model.norm.weight", shape.hidden)
        self._cosine, self._sine = (table.to(device=device, dtype=dtype) for table in rotary)
        self._layers = [_fuse(source, layer, shape, make) for layer in range(shape.layers)]
        self.layers = tuple(
            LayerShape(
                shape.query_heads, shape.kv_heads, shape.head_size, shape.head_size, shape.head_size**-0.5, window
            )
            for window in shape.windows
        )

    @property
    def layer_bytes(self) -> int:
        """Of the layers' matrices, as they are kept."""
        matrices = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self._layers]
        return sum(matrix.nbytes for layer in matrices for matrix in layer)

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
            added = layer.output(attended)
            hidden, normed = pieces.add_norm(hidden, added, layer.post_norm, epsilon)
            added = layer.down(pieces.gate(layer.gate_up(normed)))
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
        heads = layer.qkv(normed).view(len(normed), -1, shape.head_size)
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


def _fuse(source: WeightSource, layer: int, shape: DecoderShape, make: MakeLinear) -> FusedLayer:
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    query_rows, key_rows = shape.query_heads * shape.head_size, shape.kv_heads * shape.head_size
    rows = {"q": query_rows, "k": key_rows, "v": key_rows}
    hidden, middle = shape.hidden, shape.intermediate
    has_bias = f"{attention}.q_proj.bias" in source.weights
    biases = {f"{attention}.{name}_proj.bias": count for name, count in rows.items()}
    qkv = {f"{attention}.{name}_proj.weight": count for name, count in rows.items()}
    output_bias = source.take_if_there(f"{attention}.o_proj.bias", hidden)
    return FusedLayer(
        input_norm=source.take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=make(source, qkv, hidden, source.join(biases) if has_bias else None),
        query_norm=source.take(f"{attention}.q_norm.weight", shape.head_size) if shape.head_norms else None,
        key_norm=source.take(f"{attention}.k_norm.weight", shape.head_size) if shape.head_norms else None,
        output=make(source, {f"{attention}.o_proj.weight": hidden}, query_rows, output_bias),
        post_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=make(source, {f"{mlp}.gate_proj.weight": middle, f"{mlp}.up_proj.weight": middle}, hidden, None),
        down=make(source, {f"{mlp}.down_proj.weight": hidden}, middle, None),
    )
