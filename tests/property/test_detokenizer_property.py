"""Streamed text equals the text of the whole, for any bytes, any split, any prompt."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.tokenizers_made import SPECIAL_NAMES, msp_bytes, msp_tokenizer
from tokenizer_service.text.tokenizer import TextTokenizer

MSP = TextTokenizer(msp_tokenizer(), SPECIAL_NAMES)
MSP_LIBRARY = msp_tokenizer()


@pytest.fixture(scope="module")
def default() -> tuple[TextTokenizer, Tokenizer]:
    folder = resolve_model_folder(DEFAULT_MODEL)
    return TextTokenizer.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


default_ids = st.lists(st.one_of(st.integers(17, 272), st.integers(0, 49151), st.just(24211)), max_size=24)
cuts = st.lists(st.integers(0, 24), max_size=6).map(sorted)


def streamed(tokenizer: TextTokenizer, ids: Sequence[int], cuts_: list[int], prompt: Sequence[int], skip: bool) -> str:
    detokenizer = tokenizer.new_detokenizer(prompt, skip)
    parts = [ids[start:end] for start, end in zip([0, *cuts_], [*cuts_, len(ids)], strict=True)]
    return "".join(detokenizer.add(part) for part in parts) + detokenizer.finish()


@given(ids=default_ids, cuts_=cuts, skip=st.booleans())
@settings(max_examples=400, deadline=None)
def test_byte_level_equals_the_library(default, ids, cuts_, skip):
    """B002 B004 B012 B015."""
    tokenizer, library = default
    assert streamed(tokenizer, ids, cuts_, (), skip) == library.decode(ids, skip_special_tokens=skip)


@given(prompt=default_ids, ids=default_ids, cuts_=cuts, skip=st.booleans())
@settings(max_examples=400, deadline=None)
def test_prompt_and_completion_together_are_the_text_of_all(default, prompt, ids, cuts_, skip):
    """B005: completion = text of prompt and completion, less what the prompt alone completes."""
    tokenizer, library = default
    complete = tokenizer.new_detokenizer((), skip).add(prompt)
    whole = library.decode([*prompt, *ids], skip_special_tokens=skip)
    assert complete + streamed(tokenizer, ids, cuts_, prompt, skip) == whole


def expected_msp(ids: Sequence[int], skip: bool) -> str:
    """The slow reference: SentencePiece's reading of bytes, one U+FFFD for each byte of no character."""
    text, run = "", b""
    for token_id in [*ids, None]:
        token = None if token_id is None else MSP_LIBRARY.id_to_token(token_id)
        if token_id is not None and skip and token_id in (0, 1, 2):
            continue
        if token is not None and token.startswith("<0x"):
            run += bytes([int(token[3:5], 16)])
            continue
        text += read_run(run) + (token or "").replace("\u2581", " ")
        run = b""
    return text.removeprefix(" ")


def read_run(run: bytes) -> str:
    for size in range(1, 5):
        try:
            return run[:size].decode() + read_run(run[size:]) if run else ""
        except UnicodeDecodeError:
            continue
    return "\ufffd" + read_run(run[1:])


characters = st.text(max_size=3).map(lambda text: msp_bytes(text.encode("utf-8", "replace")))
msp_ids = st.lists(st.one_of(st.integers(0, 272).map(lambda i: [i]), characters, st.just([3 + 0x20])), max_size=12).map(
    lambda groups: [token_id for group in groups for token_id in group]
)


@given(prompt=msp_ids, ids=msp_ids, cuts_=cuts, skip=st.booleans())
@settings(max_examples=600, deadline=None)
def test_byte_fallback_equals_the_reference(prompt, ids, cuts_, skip):
    """B002 B005 B015 for SentencePiece tokenizers, with and without a prompt."""
    assert streamed(MSP, ids, cuts_, (), skip) == MSP.decode(ids, skip) == expected_msp(ids, skip)
    complete = MSP.new_detokenizer((), skip).add(prompt)
    assert complete + streamed(MSP, ids, cuts_, prompt, skip) == expected_msp([*prompt, *ids], skip)


@given(text=st.text(max_size=30), words=st.lists(st.integers(259, 272), max_size=4), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_unbroken_byte_fallback_equals_the_library(text, words, skip):
    """Where the bytes are whole characters, the reference above and the library agree."""
    ids = [*words, *msp_bytes(text.encode("utf-8", "replace")), *words]
    assert streamed(MSP, ids, [], (), skip) == MSP_LIBRARY.decode(ids, skip_special_tokens=skip)
