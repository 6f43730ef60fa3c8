"""Incremental detokenization against the library, over every split (area 1 of the faults)."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest
from tokenizers import Tokenizer, decoders, models

from tests.fixtures.tokenizers_made import (
    SPECIAL_NAMES,
    bpe_suffix_tokenizer,
    metaspace_tokenizer,
    msp_bytes,
    msp_id,
    msp_tokenizer,
    plain_tokenizer,
    wordpiece_tokenizer,
)
from tokenizer_service.text.detokenizer import CharacterAssembler, Detokenizer, PieceDetokenizer
from tokenizer_service.text.pieces import PieceTable, piece_rules
from tokenizer_service.text.tokenizer import TextTokenizer


def splits(ids: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """Every way to cut `ids` into non-empty consecutive parts (2 to the n-1)."""
    for count in range(len(ids)):
        for cuts in combinations(range(1, len(ids)), count):
            edges = [0, *cuts, len(ids)]
            yield [ids[start:end] for start, end in pairwise(edges)]


def stream(detokenizer: Detokenizer, parts: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.add(part) for part in parts), detokenizer.finish()]


def one_by_one(tokenizer: TextTokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    return stream(tokenizer.new_detokenizer(prompt, skip_special_tokens=True), [[i] for i in ids])


@pytest.fixture(scope="module")
def library(default_folder) -> Tokenizer:
    return Tokenizer.from_file(str(default_folder / "tokenizer.json"))


HARD_IDS = {
    "B002: two recoveries in a row that end in an incomplete character": [
        49,
        216,
        7906,
        240,
        181,
        49,
        181,
        127,
        134,
    ],
    "S1 of the scripted checkpoint": [15107, 230, 131, 13874, 44691, 23960, 57, 58, 18601, 220, 137],
    "B009: punctuation after indentation": [333, 1673],
    "B011: space and the first byte of an emoji in one token": [40303, 228],
    "B012: combining mark": [85, 151, 219],
    "B012: genuine U+FFFD, then text": [24211, 19556],
    "B012: genuine U+FFFD at the end": [19556, 24211],
    "B012: genuine U+FFFD in a row": [24211, 24211, 24211],
    "lone continuation bytes": [181, 181, 181, 181],
    "an unfinished character at the end": [10813, 230],
    "special tokens in between": [1, 15107, 2, 230, 0, 131, 2],
}


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("ids", HARD_IDS.values(), ids=HARD_IDS)
def test_every_split_gives_the_text_of_the_whole(default_tokenizer, library, ids, skip_special):
    """B002 B007 B009 B011 B012: the result does not depend on how tokens arrive."""
    whole = library.decode(ids, skip_special_tokens=skip_special)
    for parts in splits(ids):
        detokenizer = default_tokenizer.new_detokenizer((), skip_special)
        assert "".join(stream(detokenizer, parts)) == whole, parts


HARD_TEXTS = [
    "the   example",
    "an anchor",
    "हिन्दी में",
    "世界 你好",
    "👩‍👩‍👧‍👦 🏳️‍🌈",
    "e\u0301a\u0308",
    "שלום",
    "a\u0000b",
    "\r\n\t x",
]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_text_streams_whole_characters_only(default_tokenizer, text):
    """B011 B012: no U+FFFD on the way, nothing lost, nothing twice."""
    parts = one_by_one(default_tokenizer, default_tokenizer.encode(text, False))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert parts[-1] == ""


def test_a_whole_character_is_emitted_with_its_last_byte(default_tokenizer):
    """B012: held back exactly as long as needed; genuine U+FFFD (24211) and plain text not at all."""
    assert one_by_one(default_tokenizer, [10813, 230, 131]) == ["", "", "\U0001f336", ""]
    assert one_by_one(default_tokenizer, [40303, 228]) == [" ", "\U0001f60a", ""]
    assert one_by_one(default_tokenizer, [24211, 19556]) == ["\ufffd", "Hello", ""]


def test_a_character_cut_by_a_word_is_two_broken_parts(default_tokenizer, library):
    """B015: lead bytes, a token that starts with a space, the rest."""
    ids = [230, 15107, 131]
    assert "".join(one_by_one(default_tokenizer, ids)) == library.decode(ids)


def test_2000_random_sequences(default_tokenizer, library):
    """B004: half of the tokens are bytes; no exception, and always the text of the whole."""
    random_ = random.Random(4)
    for _ in range(2000):
        ids = [random_.randint(17, 272) if random_.random() < 0.5 else random_.randrange(49152) for _ in range(64)]
        skip = random_.random() < 0.5
        detokenizer = default_tokenizer.new_detokenizer((), skip)
        cuts = sorted(random_.sample(range(65), 8))
        parts = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, 64], strict=True)]
        assert "".join(stream(detokenizer, parts)) == library.decode(ids, skip_special_tokens=skip)


def test_unknown_ids_have_no_text_and_do_no_harm(default_tokenizer):
    """An id of a padded model vocabulary may be sampled; the stream goes on (B004, B095)."""
    ids = [10813, 49152, 230, 2**31, -1, 131, 2**63]
    assert "".join(one_by_one(default_tokenizer, ids)) == "\U0001f336"


def test_a_completion_that_ends_a_character_of_the_prompt(default_tokenizer):
    """The character belongs to the completion, wherever in the prompt it began."""
    assert "".join(one_by_one(default_tokenizer, [131], prompt=[10813, 230])) == "\U0001f336"
    assert "".join(one_by_one(default_tokenizer, [131], prompt=[19556] * 50 + [10813, 2, 230])) == "\U0001f336"
    assert "".join(one_by_one(default_tokenizer, [131], prompt=[10813, 230, 19556])) == "\ufffd"


@pytest.mark.parametrize("begun", [1, 2, 3])
@pytest.mark.parametrize("front", [[], msp_bytes(b"\xf0"), [*msp_bytes(b"\xf0\x9f"), 1, 2]])
def test_a_long_prompt_that_ends_in_single_bytes(msp, begun, front):
    """Only the ends of the prompt are read, and that is enough."""
    emoji = msp_bytes("\U0001f336".encode())
    prompt = [*front, *[msp_id("_x")] * 50, *emoji[:begun]]
    assert one_by_one(msp, emoji[begun:], prompt)[-2:] == ["\U0001f336", ""]


def test_sentencepiece_spaces_survive_streaming(msp):
    """B005: a decoder that strips the first space must see only the first token of the text."""
    ids = [msp_id("_Hello"), msp_id("_world"), msp_id(".")]
    assert "".join(one_by_one(msp, ids)) == "Hello world."
    for prompt in (msp.encode("Hello", True), [1] * 20 + [msp_id("_Hello")] + [2] * 20):
        assert "".join(one_by_one(msp, [msp_id("_world")], prompt)) == " world"
    assert "".join(one_by_one(msp, [msp_id("_world")], prompt=[1, 1])) == "world"
    assert "".join(one_by_one(msp, [msp_id("__"), msp_id("_x")])) == "  x"


def library_and_ours() -> list[tuple[Tokenizer, TextTokenizer]]:
    made = [
        msp_tokenizer(),
        metaspace_tokenizer("always"),
        metaspace_tokenizer("never"),
        plain_tokenizer(),
        wordpiece_tokenizer(),
        _with_decoder(decoders.Sequence([decoders.Replace("l", "L"), decoders.Fuse()])),
        _with_decoder(decoders.Sequence([decoders.Fuse(), decoders.Replace("lo", "l")])),
        _with_decoder(decoders.Sequence([decoders.Fuse(), decoders.Strip("h", 2, 0)])),
        bpe_suffix_tokenizer(),
    ]
    return [(tokenizer, TextTokenizer(tokenizer, SPECIAL_NAMES)) for tokenizer in made]


def _with_decoder(decoder: decoders.Decoder) -> Tokenizer:
    tokenizer = plain_tokenizer()
    tokenizer.decoder = decoder
    return tokenizer


@pytest.mark.parametrize("skip_special", [True, False])
def test_every_family_of_decoders_equals_the_library(skip_special):
    """B004 B005: random ids without broken bytes, split at random, one tokenizer of each family."""
    random_ = random.Random(5)
    for library_, ours in library_and_ours():
        text_ids = [i for i in range(ours.vocab_size) if not (library_.id_to_token(i) or "").startswith("<0x")]
        for _ in range(100):
            ids = random_.choices(text_ids, k=12)
            cut = random_.randint(0, 12)
            parts = [ids[:cut], ids[cut:]]
            streamed = "".join(stream(ours.new_detokenizer((), skip_special), parts))
            assert streamed == library_.decode(ids, skip_special_tokens=skip_special)
            assert streamed == ours.decode(ids, skip_special)


def test_byte_fallback_runs(msp):
    """Complete runs equal the library's; in broken ones valid characters stay, a bad byte is one U+FFFD."""
    library_ = msp_tokenizer()
    for text in ("世界", "é🌶 ", "\u0301"):
        ids = [msp_id("A"), *msp_bytes(text.encode()), msp_id("_x")]
        assert "".join(one_by_one(msp, ids)) == library_.decode(ids) == f"A{text} x"
    for broken in (b"\xe4\xb8", b"\xff\x80\x80", b"\xf0\x9f\x8c"):
        ids = [*msp_bytes(broken), msp_id("_x")]
        assert "".join(one_by_one(msp, ids)) == library_.decode(ids) == "\ufffd" * len(broken) + " x"
    assert "".join(one_by_one(msp, msp_bytes("世".encode() + b"\xff" + "界".encode()))) == "世\ufffd界"


def test_a_byte_is_held_back_for_at_most_three_more(default_tokenizer, msp):
    """Runs of lone bytes come out as they arrive: never more than 3 bytes wait."""
    for ids in ([181] * 50, [230] * 50, msp_bytes(b"\x80" * 50), msp_bytes(b"\xf0\x9f\x8c" * 16)):
        tokenizer = default_tokenizer if ids[0] in (181, 230) else msp
        detokenizer = tokenizer.new_detokenizer((), True)
        for token_id in ids:
            detokenizer.add([token_id])
        assert len(detokenizer.finish()) <= 3


def test_the_library_is_asked_once_for_each_distinct_token(default_folder):
    """Linear cost as a count: 4,000 lone bytes, one by one, need no decode at all and one look-up for each id."""
    library_ = Tokenizer.from_file(str(default_folder / "tokenizer.json"))
    asked: list[int] = []

    def id_to_token(token_id: int) -> str | None:
        asked.append(token_id)
        return library_.id_to_token(token_id)

    rules = piece_rules(library_.decoder.__getstate__())
    assert rules is not None
    ids = [181] * 4000 + list(range(17, 273)) * 10
    detokenizer = PieceDetokenizer(PieceTable(rules, id_to_token, 49152), frozenset(), ids)
    assert len(asked) <= 5  # of the prompt, only the two ends are read
    text = "".join(detokenizer.add([token_id]) for token_id in ids) + detokenizer.finish()
    assert text[:4000] == "\ufffd" * 4000
    assert len(asked) <= 256 + 5


def test_the_window_reads_a_bounded_number_of_ids():
    """Linear cost of the fallback as a count: at most 12 ids are decoded for each token."""
    tokenizer = TextTokenizer(bpe_suffix_tokenizer(), SPECIAL_NAMES)
    detokenizer = tokenizer.new_detokenizer((), True)
    sizes: list[int] = []
    plain_decode = detokenizer._decode

    def counting(ids: list[int]) -> str:
        sizes.append(len(ids))
        return plain_decode(ids)

    detokenizer._decode = counting
    detokenizer.add([3, 4, 10] * 500)
    assert sum(sizes) <= 1500 * 12


def test_a_window_holds_an_unfinished_character_back():
    """A decoder of no known kind, with byte tokens: whole characters only, broken ones after 4 tokens."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"hi": 256}
    library_ = Tokenizer(models.WordLevel(vocabulary, unk_token="hi"))
    library_.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("q", "")])
    tokenizer = TextTokenizer(library_, {})
    assert one_by_one(tokenizer, [256, *"世".encode(), 256]) == ["hi", "", "", "世", "hi", ""]
    assert "".join(one_by_one(tokenizer, [0x80] * 9 + [256, *"世".encode()])) == "\ufffd" * 9 + "hi世"
    assert "".join(one_by_one(tokenizer, [*"世".encode(), 0xFF, 256])) == "世\ufffdhi"


def test_assembler_reads_utf8_like_the_standard_library():
    """All 2-byte strings and the hard 4-byte ones, cut after each byte."""
    hard = [
        b"\xed\xa0\x80\x41",
        b"\xf4\x90\x80\x80",
        b"\xe0\x80\xaf\x41",
        b"\xf0\x9f\x41\x9f",
        b"\xf1\xc0\x80\xc3",
    ]
    for data in [bytes([first, second]) for first in range(256) for second in range(256)] + hard:
        assembler = CharacterAssembler(each_byte=False)
        text = "".join(assembler.add(bytes([byte])) for byte in data) + assembler.add(b"", final=True)
        assert text == data.decode(errors="replace")
