"""A token's own bytes: those of all tokens of a text are the text."""

from hypothesis import given
from hypothesis import strategies as st

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.tokenizers_made import MSP_FIRST_BYTE, SPECIAL_NAMES, msp_tokenizer
from tokenizer_service.text.tokenizer import TextTokenizer

DEFAULT = TextTokenizer.load(resolve_model_folder(DEFAULT_MODEL))
MSP = TextTokenizer(msp_tokenizer(), SPECIAL_NAMES)


def of_text(tokenizer: TextTokenizer, text: str) -> bytes:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text, False))


# The default model has no token for a few bytes: its encoder drops them.
KNOWN_BYTES = {DEFAULT.token_bytes(i) for i in range(DEFAULT.vocab_size)}
KNOWN_TEXT = st.text(st.characters(codec="utf-8"), max_size=40).map(
    lambda text: "".join(c for c in text if all(bytes([byte]) in KNOWN_BYTES for byte in c.encode()))
)


@given(KNOWN_TEXT)
def test_byte_level_tokens_add_up_to_the_text(text: str) -> None:
    assert of_text(DEFAULT, text) == text.encode()


@given(st.text(max_size=40))
def test_byte_fallback_tokens_add_up_to_the_text_after_its_space(text: str) -> None:
    assert of_text(MSP, text) == (f" {text}".encode() if text else b"")


@given(st.lists(st.integers(0, 49_151), max_size=20))
def test_any_ids_add_up_to_what_decode_reads(token_ids: list[int]) -> None:
    """Also where a special token is in the middle: it is its own text."""
    joined = b"".join(map(DEFAULT.token_bytes, token_ids))
    assert joined.decode(errors="replace") == DEFAULT.decode(token_ids, False)


def test_parts_of_characters_special_tokens_and_no_tokens() -> None:
    assert [DEFAULT.token_bytes(i) for i in (10813, 230, 131)] == [b"\xf0\x9f", b"\x8c", b"\xb6"]
    assert DEFAULT.token_bytes(2) == b"<|im_end|>"
    assert MSP.token_bytes(MSP_FIRST_BYTE + 0xE9) == b"\xe9"
    for nothing in (-1, 49_152, 2**32):
        assert DEFAULT.token_bytes(nothing) == b""
