"""Attention by torch.nn.attention.varlen, whose signature differs between versions of torch: paged, or gathered.

Must not know: the pool's owner, graphs, requests, whether the device keeps what the signature promises (the self test
finds that out).
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from engine_service.worker.attention import LayerShape
from engine_service.worker.cuda.kernel import Attend, KernelStep
from engine_service.worker.cuda.pages import PageRule

_DTYPES = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8
# The kernel inside torch reads a page of the table as so many rows.
_BUILT_IN_PAGE = 256
# Keys of so many tokens are gathered at once: 256 MiB for 8 KV heads of 128 numbers, both K and V.
GATHERED_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class VarlenApi:
    """The functions of this torch, and the arguments that they know. `into`: the one that fills a given tensor."""

    attend: Callable[..., Any]
    into: Callable[..., Any] | None
    arguments: frozenset[str]

    def options(self, shape: LayerShape, splits: int | None) -> dict[str, Any]:
        """Keyword arguments of a causal call; those that this torch lacks say nothing that its defaults don't."""
        options: dict[str, Any] = {}
        if "window_size" in self.arguments:
            options["window_size"] = (-1 if shape.sliding_window is None else shape.sliding_window - 1, 0)
        else:
            options["is_causal"] = True
        if "scale" in self.arguments:
            options["scale"] = shape.scale
        if "enable_gqa" in self.arguments:
            options["enable_gqa"] = True
        if splits is not None:
            options["num_splits"] = splits
        return options

    def refusal(self, layers: Sequence[LayerShape], dtype: torch.dtype, splits: int | None) -> str | None:
        """Why these layers cannot be attended, paged or not."""
        if dtype not in _DTYPES:
            return f"it computes in bfloat16 and float16, not in {dtype}"
        if splits is not None and "num_splits" not in self.arguments:
            return f"torch {torch.__version__} cannot be told how to split keys, as batch invariance needs"
        return next((reason for layer in layers if (reason := self._layer_refusal(layer)) is not None), None)

    def _layer_refusal(self, layer: LayerShape) -> str | None:
        size = layer.key_dim
        if size != layer.value_dim:
            return f"keys have {size} numbers and values {layer.value_dim}"
        if size > _LARGEST_HEAD or size % _HEAD_MULTIPLE:
            return f"heads of {size} numbers are not a multiple of {_HEAD_MULTIPLE} up to {_LARGEST_HEAD}"
        if layer.softcap is not None:
            return "the scores are soft-capped"
        if layer.sliding_window is not None and "window_size" not in self.arguments:
            return f"torch {torch.__version__} has no sliding window there"
        if "scale" not in self.arguments and abs(layer.scale * size**0.5 - 1.0) > 1e-6:
            return f"torch {torch.__version__} cannot be told to scale by {layer.scale}"
        return None


def find_varlen() -> VarlenApi | None:
    """None for a torch without it."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return None
    arguments = frozenset(inspect.signature(varlen.varlen_attn).parameters)
    return VarlenApi(varlen.varlen_attn, getattr(varlen, "varlen_attn_out", None), arguments)


@dataclass(frozen=True, slots=True)
class VarlenPagedKernel:
    """The pool is read through the page table. `fills`: by the function that fills a tensor of ours.

    `splits` 1: the keys of a request are never split, so its sum does not depend on its neighbours; None: as the kernel
    thinks best.
    """

    api: VarlenApi
    fills: bool
    splits: int | None = None
    pages = PageRule(multiple=_BUILT_IN_PAGE)
    default_block_size = _BUILT_IN_PAGE
    is_static = True

    @property
    def name(self) -> str:
        return "varlen paged, filled" if self.fills else "varlen paged"

    def refusal(self, layers: Sequence[LayerShape], dtype: torch.dtype) -> str | None:
        if not {"block_table", "seqused_k"} <= self.api.arguments:
            return f"torch {torch.__version__} has no block tables there"
        if self.fills and self.api.into is None:
            return f"torch {torch.__version__} has no varlen_attn_out"
        return self.api.refusal(layers, dtype, self.splits)

    def start(self, step: KernelStep) -> Attend:
        places = (step.query_start, step.key_start, step.max_query, step.max_keys)
        paging = {"seqused_k": step.seq_lens, "block_table": step.tables}

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: LayerShape) -> torch.Tensor:
            options = self.api.options(shape, self.splits) | paging
            if not self.fills:
                return self.api.attend(query, keys, values, *places, **options)
            assert self.api.into is not None
            out = torch.empty_like(query)
            self.api.into(out, query, keys, values, *places, **options)
            return out

        return attend


@dataclass(frozen=True, slots=True)
class VarlenGatherKernel:
    """Where there is no paging: the keys of some requests after others are gathered side by side, then attended."""

    api: VarlenApi
    splits: int | None = None
    name = "varlen gather"
    pages = PageRule()
    default_block_size = 16
    is_static = False

    def refusal(self, layers: Sequence[LayerShape], dtype: torch.dtype) -> str | None:
        return self.api.refusal(layers, dtype, self.splits)

    def start(self, step: KernelStep) -> Attend:
        groups = list(_groups(step))

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: LayerShape) -> torch.Tensor:
            options = self.api.options(shape, self.splits)
            flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
            parts = [
                self.api.attend(
                    query[group.rows],
                    flat_keys.index_select(0, group.slots),
                    flat_values.index_select(0, group.slots),
                    group.query_start,
                    group.key_start,
                    group.max_query,
                    group.max_keys,
                    **options,
                )
                for group in groups
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests whose keys are gathered together: their `rows` of the batch, and `slots` int64 of their tokens."""

    rows: slice
    slots: torch.Tensor
    query_start: torch.Tensor
    key_start: torch.Tensor
    max_query: int
    max_keys: int


def _groups(step: KernelStep) -> Iterator[_Group]:
    assert step.query_lens is not None
    assert step.key_lens is not None
    begin = 0
    for first, last in group_lengths(step.key_lens, GATHERED_TOKENS):
        end = begin + sum(step.query_lens[first:last])
        bounds = slice(first, last + 1)
        yield _Group(
            rows=slice(begin, end),
            slots=_slots(step, first, last),
            query_start=step.query_start[bounds] - step.query_start[first],
            key_start=step.key_start[bounds] - step.key_start[first],
            max_query=max(step.query_lens[first:last]),
            max_keys=max(step.key_lens[first:last]),
        )
        begin = end


def _slots(step: KernelStep, first: int, last: int) -> torch.Tensor:
    """Places in the pool, int64, of all tokens of the requests `first` .. `last` - 1, one after the other."""
    assert step.key_lens is not None
    total = sum(step.key_lens[first:last])
    lengths = step.seq_lens[first:last].long()
    rows = torch.arange(first, last, device=lengths.device).repeat_interleave(lengths, output_size=total)
    places = torch.arange(total, device=lengths.device) - (step.key_start[rows] - step.key_start[first])
    pages = step.tables[rows, places // step.page_size].long()
    return pages * step.page_size + places % step.page_size


def group_lengths(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Runs (first, last + 1) of neighbours whose lengths sum to `most` at most; a longer one stands alone."""
    ends = [0, *accumulate(lengths)]
    first = 0
    for place in range(1, len(lengths) + 1):
        if place == len(lengths) or ends[place + 1] - ends[first] > most:
            yield first, place
            first = place
