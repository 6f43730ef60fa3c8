"""Settings of the engine: units, defaults, and combinations that are refused before anything loads (B071, B145)."""

from dataclasses import fields

import pytest

from engine_service.byte_sizes import parse_bytes
from engine_service.config import ENV_PREFIX, PROGRAM, DeviceChoice, EngineSettings
from engine_service.engine_config import engine_config
from engine_service.server_config import server_config
from service_runtime.config import load_settings


def load(*arguments: str, environment: dict[str, str] | None = None) -> EngineSettings:
    return load_settings(
        EngineSettings,
        program=PROGRAM,
        env_prefix=ENV_PREFIX,
        arguments=arguments,
        environment=environment or {},
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1024", 1024),
        ("512MiB", 512 * 2**20),
        ("1GiB", 2**30),
        ("1.5 gb", 1_500_000_000),
        ("64k", 64_000),
        (7, 7),
    ],
)
def test_bytes_with_units(text: object, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_defaults() -> None:
    settings = load()
    engine, server = engine_config(settings), server_config(settings)
    assert engine.model.reference == "smollm2-135m-instruct"
    assert engine.model.device is DeviceChoice.AUTO
    assert engine.scheduling.step_token_budget == engine.scheduling.prefill_chunk_size == 512
    assert engine.scheduling.max_num_requests == 256
    assert not engine.scheduling.overlap
    assert (server.port, server.metrics_port, server.host) == (50051, 9091, "127.0.0.1")
    assert server.served_model_name == "smollm2-135m-instruct"


@pytest.mark.parametrize(("model", "name"), [("/models/tiny", "tiny"), ("/models/tiny/", "tiny"), ("org/tiny", "tiny")])
def test_served_name_comes_from_the_model(model: str, name: str) -> None:
    assert server_config(load("--model", model)).served_model_name == name


def test_running_requests_default_to_a_small_budget() -> None:
    assert engine_config(load("--step-token-budget", "64")).scheduling.max_num_requests == 64


def test_environment_and_flags() -> None:
    environment = {"TOKENWIRE_ENGINE_KV_CACHE_MEMORY": "1MiB", "TOKENWIRE_ENGINE_PORT": "7"}
    settings = load("--port", "8", "--no-prefix-cache", environment=environment)
    assert (settings.kv_cache_memory, settings.port, settings.prefix_cache) == (2**20, 8, False)


def test_every_setting_reaches_a_composed_object() -> None:
    """No flag is accepted and forgotten."""
    engine, server = engine_config(load()), server_config(load())
    parts = [engine.model, engine.cache, engine.scheduling, engine.log, engine.recorder, engine.lora, server]
    names = {field.name for part in parts for field in fields(part)}
    renamed = {
        "model": "reference",
        "kv_cache_memory": "memory_bytes",
        "kv_cache_fraction": "memory_fraction",
        "drain_timeout": "drain_timeout_s",
        "stalled_step_timeout": "stalled_step_timeout_s",
        "hung_step_timeout": "hung_step_timeout_s",
        "tls_cert_file": "tls",
        "tls_key_file": "tls",
        "tls_client_ca_file": "tls",
        "slow_request_seconds": "slow_request_s",
        "step_recorder_steps": "steps",
        "step_dump_folder": "dump_folder",
        "otlp_endpoint": "traces",
        "trace_sample_ratio": "traces",
        "log_level": "level",
        "lora": "named",
        "max_loras": "max_resident",
        "max_lora_rank": "max_rank",
    }
    assert {renamed.get(name, name) for name in EngineSettings.model_fields} == names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefill-chunk-size", "1024"], ["--prefill-chunk-size 1,024", "--step-token-budget 512"]),
        (["--speculation", "prompt-lookup", "--overlap"], ["--speculation prompt-lookup", "--overlap", "contradict"]),
        (["--speculation", "magic"], ["--speculation"]),
        (["--max-draft-tokens", "65"], ["--max-draft-tokens", "65", "64"]),
        (["--max-num-requests", "513"], ["--max-num-requests 513", "512"]),
        (["--num-blocks", "8", "--kv-cache-memory", "1GiB"], ["--num-blocks", "--kv-cache-memory"]),
        (["--max-model-len", "100", "--max-waiting-tokens", "99"], ["99", "100"]),
        (["--simulate", "steps.json", "--tensor-parallel-size", "2"], ["--simulate", "--tensor-parallel-size 2"]),
        (
            ["--batch-invariant", "--cuda-graph-requests", "8", "--max-num-requests", "9"],
            ["--cuda-graph-requests 8", "--max-num-requests 9"],
        ),
        (["--port", "9091"], ["9091"]),
        (["--port", "65536"], ["--port", "65536"]),
        (["--port", "-1"], ["--port"]),
        (["--kv-cache-memory", "1 lightyear"], ["--kv-cache-memory", "512MiB"]),
        (["--kv-cache-memory", "-5"], ["--kv-cache-memory"]),
        (["--kv-cache-fraction", "1.5"], ["--kv-cache-fraction"]),
        (["--kv-cache-fraction", "nan"], ["--kv-cache-fraction"]),
        (["--step-token-budget", "0"], ["--step-token-budget"]),
        (["--block-size", "0"], ["--block-size"]),
        (["--max-model-len", "1"], ["--max-model-len"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--dtype", "int3"], ["--dtype"]),
        (["--drain-timeout", "-1"], ["--drain-timeout"]),
        (["--host", " "], ["--host"]),
        (["--tls-cert-file", "x"], ["--tls-cert-file", "--tls-key-file"]),
        (["--tls-client-ca-file", "x"], ["--tls-client-ca-file"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_bad_settings_end_with_a_plain_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        load(*arguments)
    assert exit_.value.code == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    for word in words:
        assert word in shown


def test_unknown_variable_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(environment={"TOKENWIRE_ENGINE_PROT": "1"})
    assert "TOKENWIRE_ENGINE_PROT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora", "red"], "NAME=FOLDER"),
        (["--lora", "red="], "NAME=FOLDER"),
        (["--lora", "../red=x"], "NAME=FOLDER"),
        (["--lora", "red=x", "--lora", "red=y"], "twice"),
        (["--lora", "tiny=x", "--served-model-name", "tiny"], "the model itself"),
        (["--lora-dir", "/nowhere/at/all"], "not a folder"),
        (["--allow-lora-rpc"], "needs --lora-dir"),
        (["--lora", "red=x", "--tensor-parallel-size", "2"], "tensor-parallel-size 2"),
        (["--lora", "red=x", "--simulate", "file"], "--simulate"),
        (["--max-loras", "0"], "max-loras"),
        (["--max-lora-rank", "0"], "max-lora-rank"),
    ],
)
def test_adapters_that_cannot_be(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(*flags)
    assert words in capsys.readouterr().err


def test_adapters_by_flag_and_environment() -> None:
    assert engine_config(load()).lora.max_resident == 0
    lora = engine_config(load("--lora", "a=x", "--lora", "b=y=z", "--max-loras", "3")).lora
    assert (lora.named, lora.max_resident) == ((("a", "x"), ("b", "y=z")), 3)
    environment = {"TOKENWIRE_ENGINE_LORA": "a=x,b=y"}
    assert engine_config(load(environment=environment)).lora.named == (("a", "x"), ("b", "y"))


@pytest.mark.parametrize(
    ("flags", "where_certain", "elsewhere"),
    [
        ((), 16, 0),
        (("--overlap",), 0, 0),
        (("--speculation", "off"), 0, 0),
        (("--speculation", "prompt-lookup", "--max-draft-tokens", "5"), 5, 5),
    ],
)
def test_drafts_are_made_where_the_text_is_certain_or_they_are_wanted(
    flags: tuple[str, ...], where_certain: int, elsewhere: int
) -> None:
    scheduling = engine_config(load(*flags)).scheduling
    assert (scheduling.draft_tokens(True), scheduling.draft_tokens(False)) == (where_certain, elsewhere)
