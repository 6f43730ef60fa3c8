"""TextTokenizer: ids as transformers gives them, limits and failures as TextError, a quick start."""

import json
import subprocess
import sys
import threading

import pytest
from tokenizers import Tokenizer

from tests.fixtures.tokenizers_made import (
    SPECIAL_NAMES,
    failing_tokenizer,
    metaspace_tokenizer,
    msp_id,
    msp_tokenizer,
    plain_tokenizer,
    write_folder,
)
from tokenizer_service.text.errors import TextError
from tokenizer_service.text.tokenizer import TextTokenizer


def test_names_and_sizes(default_tokenizer):
    assert default_tokenizer.vocab_size == 49152
    assert default_tokenizer.special_ids == frozenset(range(17))
    assert default_tokenizer.special_tokens[:3] == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert (default_tokenizer.bos_token, default_tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert default_tokenizer.token_id("<|im_end|>") == 2
    assert default_tokenizer.token_id("no such token") is None


@pytest.mark.parametrize("text", ["Hello world", "", "  x\n", "世界 🌶", "<|im_end|> y", "def f(x):\n    return x"])
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encode_equals_transformers(reference, default_tokenizer, text, add_special_tokens):
    expected = reference(text, add_special_tokens=add_special_tokens)["input_ids"]
    assert default_tokenizer.encode(text, add_special_tokens) == expected


def test_nul_is_a_character(default_tokenizer):
    """B108."""
    assert default_tokenizer.encode("a\u0000b", True) == [81, 190, 82]
    assert default_tokenizer.decode([81, 190, 82], True) == "a\u0000b"


def test_bos_is_added_to_plain_text_and_never_to_rendered_text(msp):
    """B104."""
    assert msp.encode("Hello", True) == [1, msp_id("_Hello")]
    assert msp.encode("Hello", False) == [msp_id("_Hello")]
    assert msp.encode_rendered("<s>Hello") == [1, msp_id("_Hello")]


def test_cleanup_is_never_applied(tmp_path, default_folder):
    """B009: also when the model's configuration asks for it."""
    library = Tokenizer.from_file(str(default_folder / "tokenizer.json"))
    folder = write_folder(tmp_path, library, {"clean_up_tokenization_spaces": True})
    tokenizer = TextTokenizer.load(folder)
    detokenizer = tokenizer.new_detokenizer((), True)
    assert [detokenizer.add([333]), detokenizer.add([1673]), detokenizer.finish()] == ["   ", " .", ""]
    assert tokenizer.decode([333, 1673], True) == "    ."


@pytest.mark.parametrize("token_id", [-1, 49152, 2**32, 2**63, -(2**63)])
def test_decode_refuses_ids_out_of_range(default_tokenizer, token_id):
    """B095."""
    with pytest.raises(TextError) as raised:
        default_tokenizer.decode([1, token_id], True)
    assert raised.value.field == "token_ids"
    assert raised.value.message == f"token_ids[1] is {token_id}; the vocabulary has the ids 0 to 49151"


def test_decode_of_nothing_and_of_special_tokens(default_tokenizer):
    """B095."""
    assert default_tokenizer.decode([], True) == ""
    assert default_tokenizer.decode([1, 19556, 2], True) == "Hello"
    assert default_tokenizer.decode([1, 19556, 2], False) == "<|im_start|>Hello<|im_end|>"


@pytest.mark.parametrize(
    ("text", "limits", "words"),
    [
        ("ab\ud800c", {}, "character 2 is the lone surrogate U+D800"),
        ("x" * 1001, {"max_chars": 1000}, "1,001 characters exceed the limit of 1,000"),
        ("é" * 501, {"max_bytes": 1000}, "1,002 bytes exceed the limit of 1,000"),
        ("\ud800" * 400, {"max_bytes": 1000}, "1,200 bytes exceed the limit of 1,000"),
    ],
)
def test_bad_text_is_refused_with_field_and_numbers(default_tokenizer, text, limits, words):
    """The acceptance list's lone surrogate and too large prompt."""
    with pytest.raises(TextError) as raised:
        default_tokenizer.encode(text, True, field="prompt", **limits)
    assert raised.value.field == "prompt"
    assert words in raised.value.message


def test_text_at_the_limit_passes(default_tokenizer):
    assert default_tokenizer.encode("é" * 500, True, max_chars=500, max_bytes=1000)


def test_a_tokenizer_that_raises_fails_one_request(msp):
    """B140: the failure is this request's, not the client's mistake; the next request is served."""
    tokenizer = TextTokenizer(failing_tokenizer(), {})
    with pytest.raises(TextError) as raised:
        tokenizer.encode("b", True)
    assert (raised.value.field, raised.value.message) == (None, "the tokenizer failed on this text")
    assert tokenizer.encode("a", True) == [0]


def test_many_threads_encode_alike(default_tokenizer):
    expected = default_tokenizer.encode("The quick brown fox " * 50, True)
    results: list[list[int]] = []

    def work() -> None:
        results.extend(default_tokenizer.encode("The quick brown fox " * 50, True) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 80


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    library = msp_tokenizer()
    library.enable_truncation(2)
    library.enable_padding(length=64)
    tokenizer = TextTokenizer.load(write_folder(tmp_path, library, SPECIAL_NAMES))
    assert tokenizer.encode("Hello world.", False) == [msp_id("_Hello"), msp_id("_world"), msp_id(".")]


def test_tokens_that_only_the_configuration_declares(tmp_path):
    """Older models: special tokens that tokenizer.json does not call so, and added ones that it lacks."""
    library = metaspace_tokenizer("always")
    bare = json.loads(library.to_str())
    bare["added_tokens"] = []
    config = {
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "</s>",
        "added_tokens_decoder": {
            "17": {"content": "<|x|>", "special": True, "normalized": False},
            "18": {"content": "<y>", "special": False, "normalized": False},
        },
    }
    folder = write_folder(tmp_path, Tokenizer.from_str(json.dumps(bare)), config)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "old", "unk_token": "<unk>"}))
    tokenizer = TextTokenizer.load(folder)
    assert tokenizer.named_special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.special_tokens == ("<unk>", "<s>", "</s>", "<|x|>")
    assert (tokenizer.token_id("<|x|>"), tokenizer.token_id("<y>"), tokenizer.vocab_size) == (17, 18, 19)
    assert tokenizer.encode("<y><|x|></s>", False) == [18, 17, 2]
    assert tokenizer.decode([18, 17, 2], True) == "<y>"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{"}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "does not hold a JSON object"),
        ({}, "holds no tokenizer that can be read"),
    ],
)
def test_a_folder_that_cannot_be_read(tmp_path, files, words):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(TextError) as raised:
        TextTokenizer.load(tmp_path)
    assert raised.value.field is None
    assert words in raised.value.message
    assert str(tmp_path) not in raised.value.message


def test_a_folder_with_the_older_files_goes_through_transformers(tmp_path, default_folder, default_tokenizer):
    """vocab.json and merges.txt instead of tokenizer.json."""
    model = json.loads((default_folder / "tokenizer.json").read_text())["model"]
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"unk_token": "<|endoftext|>"}))
    tokenizer = TextTokenizer.load(tmp_path)
    text = "Hello world 世界<|im_end|>"
    assert tokenizer.encode(text, True) == default_tokenizer.encode(text, True)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text, True), True) == "Hello world 世界"


def test_vocab_size_counts_to_the_highest_id():
    library = plain_tokenizer()
    library.add_tokens(["new"])
    assert TextTokenizer(library, {}).vocab_size == 14


_START = """
import sys
from pathlib import Path
from tokenizer_service.text.tokenizer import TextTokenizer
from tokenizer_service.text.prompt import ChatLimits, ChatPrompts
folder = Path(sys.argv[1])
tokenizer = TextTokenizer.load(folder)
ChatPrompts.load(folder, tokenizer, ChatLimits(10, 1000))
heavy = {"torch", "transformers", "numpy", "grpc", "google.protobuf", "asyncio", "huggingface_hub"}
print(sorted(heavy.intersection(sys.modules)))
"""


def test_the_start_imports_nothing_heavy(default_folder):
    """Ready in under 3 s, and without torch: counted as modules, not as time."""
    done = subprocess.run(
        [sys.executable, "-c", _START, str(default_folder)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
