"""The default model in fp32, and what transformers says of each prompt alone: the reference of this suite."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder

TOPICS = (
    "the tides", "a lighthouse", "binary search", "the capital of Peru", "bread", "prime numbers", "a red bicycle",
    "photosynthesis", "chess openings", "the Baltic Sea", "compilers", "volcanoes", "a lost key", "jazz", "snow",
    "the moon",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expected:
    """What a completion must say beside its token ids."""

    prompt_tokens: int
    text: str


class Reference:
    """transformers in fp32, each prompt alone: it confirms a greedy completion in one pass instead of writing it.

    Token i is the greedy one exactly when it has the largest of the logits after the prompt and the tokens before
    it; one pass over both gives those of all places.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._confirmed: dict[tuple[str, int, tuple[int, ...]], Expected] = {}

    def confirm(self, prompt: str, max_tokens: int, token_ids: tuple[int, ...]) -> Expected:
        """Fails unless `token_ids` are the greedy tokens after `prompt`, up to `max_tokens` or the end token."""
        key = (prompt, max_tokens, token_ids)
        if key not in self._confirmed:
            self._confirmed[key] = self._compare(*key)
        return self._confirmed[key]

    def _compare(self, prompt: str, max_tokens: int, token_ids: tuple[int, ...]) -> Expected:
        prompt_ids = self._tokenizer(prompt)["input_ids"]
        end = self._model.generation_config.eos_token_id
        assert end not in token_ids[:-1]
        assert len(token_ids) == max_tokens or (0 < len(token_ids) < max_tokens and token_ids[-1] == end)
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt_ids, *token_ids[:-1]]])).logits[0, len(prompt_ids) - 1 :]
        assert logits.argmax(-1).tolist() == list(token_ids)
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return Expected(len(prompt_ids), text)


def mixed_prompts(count: int) -> list[tuple[str, int]]:
    """Prompts of about 5 to 150 tokens with 8 to 39 tokens to generate, of different lengths on purpose."""
    cases = []
    for index in range(count):
        topic = TOPICS[index % len(TOPICS)]
        opening = f"Notes, part {index}. " + f"We speak about {topic} and what people say of it. " * (index % 11)
        cases.append((f"{opening}The most surprising fact about {topic} is", 8 + (index * 5) % 32))
    return cases


@pytest.fixture(scope="session")
def default_folder() -> Path:
    return resolve_model_folder(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def reference(default_folder: Path) -> Reference:
    return Reference(default_folder)
