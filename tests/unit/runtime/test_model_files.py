"""Which folder a model name means, and the identity of its tokenizer."""

from pathlib import Path

import pytest

from service_runtime.model_files import (
    DEFAULT_MODEL,
    ModelNotFound,
    resolve_model_folder,
    tokenizer_fingerprint,
    weights_fingerprint,
)


def test_a_folder_with_a_config_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("reference", ["", "nothing", "./nowhere/here", "a/b/c", "no-such-org/no-such-model"])
def test_what_is_no_model_is_refused(reference: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound):
        resolve_model_folder(reference)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve_model_folder(str(tmp_path))


def test_a_default_model_that_was_never_prepared_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWIRE_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="embedded_model"):
        resolve_model_folder(DEFAULT_MODEL)


def test_fingerprint_depends_on_tokenizer_files_alone(tmp_path: Path) -> None:
    assert tokenizer_fingerprint(tmp_path) == ""
    (tmp_path / "tokenizer.json").write_text("a")
    first = tokenizer_fingerprint(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x")
    assert tokenizer_fingerprint(tmp_path) == first
    (tmp_path / "tokenizer.json").write_text("b")
    assert tokenizer_fingerprint(tmp_path) != first
    assert len(first) == 64


def write_weights(folder: Path, name: str, header: bytes, data: bytes) -> None:
    (folder / name).write_bytes(len(header).to_bytes(8, "little") + header + data)


def test_the_weights_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    """By configuration, names and shapes, sizes, and samples of the numbers; the same files give the same one."""
    assert weights_fingerprint(tmp_path) == ""
    data = bytes(range(256)) * 4096
    header = b'{"w":{"dtype":"F32"}}'
    seen = set()

    def is_new() -> bool:
        found = weights_fingerprint(tmp_path)
        assert found == weights_fingerprint(tmp_path)
        is_new = found not in seen
        seen.add(found)
        return is_new

    write_weights(tmp_path, "a.safetensors", header, data)
    assert is_new()
    (tmp_path / "config.json").write_text("{}")
    assert is_new()
    (tmp_path / "README.md").write_text("not part of the model")
    assert not is_new()
    write_weights(tmp_path, "a.safetensors", b'{"v":{"dtype":"F32"}}', data)
    assert is_new()
    write_weights(tmp_path, "a.safetensors", header, data[:-1])
    assert is_new()
    for place in (0, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        changed[place : place + 20_000] = bytes(20_000)[: len(data) - place]
        write_weights(tmp_path, "a.safetensors", header, bytes(changed))
        assert is_new(), place
    write_weights(tmp_path, "b.safetensors", header, b"")
    assert is_new()
    (tmp_path / "b.safetensors").write_bytes(b"\xff" * 9)  # no length of a header that could be
    assert is_new()
