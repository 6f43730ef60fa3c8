"""What a lossy weight format does to the logits: measured on the model itself, on text it wrote.

Must not know: how weights are packed, requests.
"""

from dataclasses import dataclass

import torch

from engine_service.worker.kernels.cpu_model import GROUP_SLOTS, CpuModel, PoolSize, StepBatch

NUM_TOKENS = 64
# Room for the measured text, and nothing more.
POOL = PoolSize(NUM_TOKENS // GROUP_SLOTS, GROUP_SLOTS)


@dataclass(frozen=True, slots=True)
class LogitError:
    """`relative`: norm of the difference over the norm of the plain logits. `same_best`: share of positions
    where both find the same best token."""

    relative: float
    same_best: float


def measure_error(plain: CpuModel, packed: CpuModel, first_token: int) -> LogitError:
    """Both models read what the plain one writes greedily after `first_token`, in the first blocks of their pools."""
    tokens = _write(plain, first_token)
    expected, got = (model.step(_whole(tokens)).logits.clone() for model in (plain, packed))
    relative = float((got - expected).norm() / expected.norm())
    same = (got.argmax(-1) == expected.argmax(-1)).float().mean()
    return LogitError(relative, float(same))


def _write(model: CpuModel, first_token: int) -> list[int]:
    tokens = [first_token]
    while len(tokens) < NUM_TOKENS:
        output = model.step(_chunk(tokens[-1:], len(tokens) - 1, sample_rows=[0]), want_logits=False)
        tokens.append(int(output.best[0]))
    return tokens


def _whole(tokens: list[int]) -> StepBatch:
    return _chunk(tokens, 0, sample_rows=list(range(len(tokens))))


def _chunk(tokens: list[int], start: int, sample_rows: list[int]) -> StepBatch:
    """One request whose blocks are 0, 1, 2, ...: a position is its own slot."""
    positions = torch.arange(start, start + len(tokens))
    return StepBatch(
        input_ids=torch.tensor(tokens),
        positions=positions,
        slot_mapping=positions.clone(),
        block_tables=torch.arange(POOL.num_blocks, dtype=torch.int32).unsqueeze(0),
        query_start=torch.tensor([0, len(tokens)], dtype=torch.int32),
        seq_lens=torch.tensor([start + len(tokens)], dtype=torch.int32),
        sample_rows=torch.tensor(sample_rows),
    )
