"""Settings: precedence, and every wrong name or value refused before anything loads."""

from pathlib import Path

import pytest
from pydantic import Field

from service_runtime.config import ServiceSettings, cache_folder, load_settings, shipped_folder


class Settings(ServiceSettings):
    port: int = Field(50, ge=0, le=65535, description="port")
    ratio: float = Field(0.5, gt=0, le=1, description="ratio")
    prefix_cache: bool = Field(True, description="cache")
    engine: tuple[str, ...] = Field(("a",), description="addresses, 100 % of them")
    model: str = Field("m", description="model")
    block_size: int | None = Field(None, ge=1, description="tokens per block")


def load(*arguments: str, **environment: str) -> Settings:
    return load_settings(Settings, program="prog", env_prefix="TW_", arguments=arguments, environment=environment)


def test_defaults() -> None:
    assert load() == Settings()


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('port = 1\nratio = 0.1\nmodel = "file"\nengine = ["x", "y"]\n')
    settings = load("--config", str(file), "--port", "3", TW_PORT="2", TW_RATIO="0.2")
    assert (settings.port, settings.ratio, settings.model, settings.engine) == (3, 0.2, "file", ("x", "y"))


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("port = 7\n")
    assert load(TW_CONFIG=str(file)).port == 7


def test_lists_and_switches() -> None:
    assert load("--engine", "a:1", "--engine", "b:2").engine == ("a:1", "b:2")
    assert load(TW_ENGINE="a:1,b:2").engine == ("a:1", "b:2")
    assert load("--no-prefix-cache").prefix_cache is False
    assert load(TW_PREFIX_CACHE="false").prefix_cache is False
    assert load("--block-size", "32").block_size == 32


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (("--prot", "1"), {}, "--prot"),
        (("--por", "1"), {}, "--por"),
        (("--port", "70000"), {}, "--port"),
        (("--port", "x"), {}, "--port"),
        (("--ratio", "nan"), {}, "--ratio"),
        (("--ratio", "inf"), {}, "--ratio"),
        (("--ratio", "0"), {}, "--ratio"),
        (("--block-size", "0"), {}, "--block-size"),
        ((), {"TW_PROT": "1"}, "TW_PROT"),
        ((), {"TW_PORT": "-1"}, "--port"),
        ((), {"TW_CONFIG": "missing.toml"}, "cannot read"),
    ],
)
def test_what_is_wrong_ends_the_program_and_is_named(
    arguments: tuple[str, ...], environment: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(*arguments, **environment)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("content", "said"), [("prot = 1", "--prot"), ("port = ", "not valid TOML")])
def test_a_wrong_file_is_named(content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text(content)
    with pytest.raises(SystemExit):
        load("--config", str(file))
    assert said in capsys.readouterr().err


def test_help_names_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help")
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for expected in ("--port N", "(default: 50)", "--no-prefix-cache", "100 % of them", "TW_NAME"):
        assert expected in text


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().port = 1  # type: ignore[misc]


def test_cache_folder() -> None:
    assert cache_folder({"TOKENWIRE_CACHE": "/x"}) == Path("/x")
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/tokenwire")
    assert cache_folder({}) == Path.home() / ".cache" / "tokenwire"


def test_shipped_folder() -> None:
    assert shipped_folder({"TOKENWIRE_SHIPPED": "/opt/x"}) == Path("/opt/x")
    assert shipped_folder({}) is None
    assert shipped_folder({"TOKENWIRE_SHIPPED": ""}) is None
