"""What lossy weights do to the logits: measured on the model itself, on texts that it wrote.

Must not know: how weights are packed, requests.
"""

import torch

from engine_service.core.weight_report import LogitError
from engine_service.worker.kernels.cpu_model import GROUP_SLOTS, CpuModel, PoolSize
from engine_service.worker.kernels.step_batch import StepBatch
from engine_service.worker.logit_error import NUM_TEXTS, TEXT_TOKENS, compare_logits, first_tokens

# Room for the measured texts, and nothing more.
POOL = PoolSize(NUM_TEXTS, GROUP_SLOTS)


def measure_error(reference: CpuModel, packed: CpuModel, first_token: int, packed_block_size: int) -> LogitError:
    """Both models read what the reference writes greedily after `first_token` and after three more tokens, evenly
    spread over the vocabulary, in the first blocks of their pools. Some twenty steps of at most 64 tokens."""
    texts = _write(reference, first_token)
    expected = reference.step(_batch(texts, 0, POOL.block_size)).logits.clone()
    got = packed.step(_batch(texts, 0, packed_block_size)).logits
    return compare_logits(expected, got, reference.dtype)


def _write(model: CpuModel, first_token: int) -> torch.Tensor:
    """int64 [texts, tokens]."""
    texts = first_tokens(first_token, model.shape.vocabulary)
    while texts.shape[1] < TEXT_TOKENS:
        output = model.step(_batch(texts[:, -1:], texts.shape[1] - 1, POOL.block_size), want_logits=False)
        texts = torch.cat([texts, output.best.unsqueeze(1)], dim=1)
    return texts


def _batch(tokens: torch.Tensor, start: int, block_size: int) -> StepBatch:
    """Tokens [texts, count] at `start` of each; text number n has block n. All of them sample."""
    texts, count = tokens.shape
    positions = torch.arange(start, start + count).repeat(texts)
    blocks = torch.arange(texts)
    return StepBatch(
        input_ids=tokens.flatten().contiguous(),
        positions=positions,
        slot_mapping=positions + blocks.repeat_interleave(count) * block_size,
        block_tables=blocks.int().unsqueeze(1),
        query_start=(torch.arange(texts + 1) * count).int(),
        seq_lens=torch.full((texts,), start + count, dtype=torch.int32),
        sample_rows=torch.arange(texts * count),
    )
