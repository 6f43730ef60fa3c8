"""What packed weights do to the logits of a fused decoder: measured on the model itself, on texts that it wrote.

Must not know: how weights are packed, the KV pool, requests.
"""

import torch
from torch.nn import functional

from engine_service.core.weight_report import LogitError
from engine_service.worker.logit_error import TEXT_TOKENS, compare_logits, first_tokens
from engine_service.worker.paged_model import AttentionCall, StepModel


def measure_packed_error(
    reference: StepModel, packed: StepModel, first_token: int, vocabulary: int, dtype: torch.dtype, device: torch.device
) -> LogitError:
    """Both read what the reference, computed in `dtype`, writes greedily after some first tokens. Some sixteen steps of
    at most 64 tokens, without a KV pool."""
    texts = first_tokens(first_token, vocabulary).to(device)
    with torch.inference_mode():
        while texts.shape[1] < TEXT_TOKENS:
            last = _logits(reference, texts)[:, -1]
            texts = torch.cat([texts, last.argmax(-1, keepdim=True)], dim=1)
        expected, got = (_logits(model, texts).flatten(0, 1) for model in (reference, packed))
        return compare_logits(expected, got, dtype)


def _logits(model: StepModel, texts: torch.Tensor) -> torch.Tensor:
    """float32 [texts, tokens, vocabulary]."""
    count, length = texts.shape
    positions = torch.arange(length, device=texts.device).repeat(count)
    rows = torch.arange(count * length, device=texts.device)
    logits = model.forward(texts.flatten(), positions, rows, _WholeTexts(count))
    return logits.float().view(count, length, -1)


class _WholeTexts:
    """A context in which each of `count` texts of equal length attends to itself alone."""

    def __init__(self, count: int) -> None:
        self._count = count

    def attention(self, call: AttentionCall) -> torch.Tensor:
        query, key, value = (self._by_text(tensor) for tensor in (call.query, call.key, call.value))
        places = torch.arange(query.shape[2], device=query.device)
        back = places[:, None] - places[None, :]
        mask = (back >= 0) & (back < (call.sliding_window or TEXT_TOKENS))
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=call.scale, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(0, 1).unsqueeze(0)

    def _by_text(self, heads: torch.Tensor) -> torch.Tensor:
        """[1, heads, texts * tokens, size] -> [texts, heads, tokens, size]."""
        _, count, tokens, size = heads.shape
        return heads[0].view(count, self._count, tokens // self._count, size).transpose(0, 1)
