"""Which folder a model name means, and the identity of its tokenizer."""

from pathlib import Path

import pytest

from service_runtime.model_files import (
    DEFAULT_MODEL,
    ModelNotFound,
    resolve_model_folder,
    tokenizer_fingerprint,
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
