"""Applies adapters in a model as transformers writes it: what a linear layer gives is changed for some rows.

Must not know: files, requests, how the model is run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_service.worker.lora.adapter import Adapter, LinearShape, LowRank

AdapterRows = npt.NDArray[np.int32]
"""[T]: the number of each row's adapter, 0: none."""


class LinearHooks:
    """Owns the adapters of one model. Layers get a hook with their first adapter; without one they cost nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hooked: dict[str, dict[int, LowRank]] = {}
        # Of the step that runs now: (adapter, its rows).
        self._segments: list[tuple[int, torch.Tensor]] = []

    def install(self, number: int, adapter: Adapter) -> None:
        """Its layers are some that `find_linears` finds."""
        for name, update in adapter.updates.items():
            layer = self._model.get_submodule(name)
            weight = layer.weight
            assert isinstance(weight, torch.Tensor)
            if name not in self._hooked:
                self._hooked[name] = {}
                layer.register_forward_hook(partial(self._add, name))
            # Transposed here, once.
            down = update.down.to(weight).t().contiguous()
            self._hooked[name][number] = LowRank(down, adapter.scaled_up(name).to(weight).t().contiguous())

    def drop(self, number: int) -> None:
        for pairs in self._hooked.values():
            pairs.pop(number, None)

    @contextmanager
    def step(self, adapters: AdapterRows | None, device: torch.device) -> Iterator[None]:
        """The forward pass within is of rows with these adapters."""
        self._segments = [] if adapters is None else list(segments(adapters, device))
        try:
            yield
        finally:
            self._segments = []

    def _add(self, name: str, _layer: torch.nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        for number, rows in self._segments:
            update = self._hooked[name].get(number)
            if update is not None:
                output[0].index_add_(0, rows, (inputs[0][0].index_select(0, rows) @ update.down) @ update.up)


def segments(adapters: AdapterRows, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """The rows of each adapter, int64, ascending; rows without one are in none."""
    for number in np.unique(adapters):
        if number != 0:
            yield int(number), torch.from_numpy(np.flatnonzero(adapters == number)).to(device)


def find_linears(model: Any, run: Callable[[], object], tokens: int) -> dict[str, LinearShape]:
    """The linear layers below the model's blocks that `run` calls once, with all `tokens` rows of [1, tokens, inputs].

    Others (the output layer, experts that see some rows only) cannot have an adapter.
    """
    seen: dict[str, list[tuple[int, ...]]] = {}

    def note(name: str, _layer: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.setdefault(name, []).append(tuple(inputs[0].shape))

    head = model.get_output_embeddings()
    linears = {
        name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head
    }
    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in linears.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: LinearShape(layer.in_features, layer.out_features)
        for name, layer in linears.items()
        if seen.get(name) == [(1, tokens, layer.in_features)]
    }
