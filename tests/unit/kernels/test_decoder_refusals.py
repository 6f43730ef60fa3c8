"""What the decoder refuses, as values or errors that say why."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.cpu_model import (
    PoolSize,
    build_cpu_model,
)
from engine_service.worker.kernels.decoder_shape import Unsupported, decoder_shape
from engine_service.worker.kernels.library import ThreadTeam
from tests.unit.kernels.batches import Requests
from tests.unit.kernels.models import (
    GQA,
    SMALL,
    build,
    build_rounded,
    make_reference,
)


@pytest.mark.parametrize("weight_format", [WeightFormat.INT4, WeightFormat.INT8])
def test_what_few_bits_cannot_hold(team: ThreadTeam, weight_format: WeightFormat) -> None:
    reference = make_reference("llama")
    name = f"{weight_format.value} weights need"
    for dtype, reason in [
        (torch.float32, "bfloat16"),
        (torch.bfloat16, "sizes that are multiples of 32, not 48 and 100"),
    ]:
        refusal = build_rounded(reference, team, dtype, weight_format)
        assert isinstance(refusal, Unsupported)
        assert f"{name} {reason}" in refusal.reason


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mlp_bias": True}, "MLP with bias"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope of type dynamic"),
    ],
)
def test_what_the_decoder_refuses(options: dict[str, Any], reason: str) -> None:
    refusal = decoder_shape(LlamaConfig(**{**SMALL, **GQA, **options}))
    assert isinstance(refusal, Unsupported)
    assert reason in refusal.reason


@pytest.mark.parametrize("blocks_and_size", [(0, 16), (4, 8), (4, 24)])
def test_pool_sizes_that_cannot_be(blocks_and_size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=str(blocks_and_size[blocks_and_size[0] > 0])):
        PoolSize(*blocks_and_size)


def test_wrong_tensors_are_refused(team: ThreadTeam) -> None:
    model, requests = build(make_reference("llama"), team), Requests(80)
    batch = requests.batch([(requests.add([1, 2, 3]), 3)])
    batch_wrong = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "seq_lens"},
        seq_lens=batch.seq_lens.long(),
    )
    with pytest.raises(ValueError, match=r"seq_lens must be a contiguous torch\.int32"):
        model.step(batch_wrong)


def test_a_missing_weight_is_named(team: ThreadTeam) -> None:
    reference = make_reference("llama")
    weights = {n: t for n, t in reference.state_dict().items() if "layers.1.mlp.down_proj" not in n}
    with pytest.raises(KeyError, match=r"layers\.1\.mlp\.down_proj"):
        build_cpu_model(weights, reference.config, PoolSize(4, 16), torch.float32, 64, team)


def test_a_weight_of_another_size_is_refused(team: ThreadTeam) -> None:
    reference = make_reference("llama")
    weights = dict(reference.state_dict())
    weights["model.norm.weight"] = torch.ones(47)
    with pytest.raises(ValueError, match="not the expected size"):
        build_cpu_model(weights, reference.config, PoolSize(4, 16), torch.float32, 64, team)
