"""The default model in fp32, and what transformers answers to each prompt alone: the reference of this suite."""

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
class Case:
    """A prompt and how transformers in fp32 continues it greedily, alone."""

    prompt: str
    max_tokens: int
    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str


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
def cases(default_folder: Path) -> list[Case]:
    """32 prompts with their reference texts, each computed alone."""
    tokenizer = AutoTokenizer.from_pretrained(default_folder)
    model = AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32).eval()
    return [_reference(model, tokenizer, prompt, max_tokens) for prompt, max_tokens in mixed_prompts(32)]


def _reference(model: torch.nn.Module, tokenizer: object, prompt: str, max_tokens: int) -> Case:
    encoded = tokenizer(prompt, return_tensors="pt")  # type: ignore[operator]
    with torch.inference_mode():
        output = model.generate(**encoded, do_sample=False, max_new_tokens=max_tokens)  # type: ignore[operator]
    length = encoded["input_ids"].shape[1]
    generated = output[0, length:].tolist()
    text = tokenizer.decode(generated, skip_special_tokens=True, clean_up_tokenization_spaces=False)  # type: ignore[attr-defined]
    return Case(prompt, max_tokens, length, tuple(generated), text)
