"""Prompts whose tokens' log probabilities are wanted: their chunks cut into pieces of bounded memory.

Must not know: logits, the device, how chunks are planned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_service.core.plan import Chunk

PIECE_TOKENS = 64
"""A piece's logits are [PIECE_TOKENS, vocabulary] at most."""


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """A running request whose prompt tokens at `first` .. `end - 1` still lack log probabilities; `wanted` most
    likely ones are reported for each."""

    first: int
    end: int
    wanted: int


@dataclass(frozen=True, slots=True)
class ScoredPiece:
    """Positions to compute; those from `first_scored` on give the log probabilities of the tokens after them."""

    chunk: Chunk
    first_scored: int
    wanted: int


def cut(
    chunks: Sequence[Chunk], scored_prompt: Callable[[int], ScoredPrompt | None]
) -> tuple[list[ScoredPiece], tuple[Chunk, ...]]:
    """Pieces to be computed one after the other, and then the chunks that are left, in the order of the plan.

    The position of the last prompt token gives no log probability but the first token of the completion: it
    stays a chunk.
    """
    pieces: list[ScoredPiece] = []
    rest: list[Chunk] = []
    for chunk in chunks:
        prompt = scored_prompt(chunk.request_id)
        end = chunk.start if prompt is None else min(chunk.start + chunk.length, prompt.end - 1)
        if prompt is None or end <= max(chunk.start, prompt.first - 1):
            rest.append(chunk)
            continue
        for start in range(chunk.start, end, PIECE_TOKENS):
            piece = Chunk(chunk.request_id, start, min(PIECE_TOKENS, end - start), (), False)
            pieces.append(ScoredPiece(piece, max(start, prompt.first - 1), prompt.wanted))
        left = chunk.start + chunk.length - end
        if left:
            rest.append(chunk._replace(start=end, length=left))
    return pieces, tuple(rest)
