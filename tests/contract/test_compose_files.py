"""The Compose files and the images: at one with the services' settings, with Kubernetes, and with docs/compose.md."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from engine_service.config import ENV_PREFIX as ENGINE_PREFIX
from engine_service.config import EngineSettings
from service_runtime.config import ServiceSettings, load_settings
from tokenizer_service.config import ENV_PREFIX as TOKENIZER_PREFIX
from tokenizer_service.config import TokenizerSettings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
SETTINGS: dict[str, tuple[type[ServiceSettings], str]] = {
    "engine": (EngineSettings, ENGINE_PREFIX),
    "tokenizer": (TokenizerSettings, TOKENIZER_PREFIX),
}
# What each image is locked with; `tokenwire[...]` inside an extra is followed.
EXTRAS = {"engine": ["engine", "gateway", "tracing"], "tokenizer": ["tokenizer", "tracing"], "load": ["client", "load"]}
DOWN_LIMIT_S = 10

Service = dict[str, Any]


def interpolated(text: str) -> str:
    """As Compose does where no variable is set: `${NAME:-default}`."""
    return re.sub(r"\$\{[A-Z_]+(?::-([^}]*))?\}", lambda match: match[1] or "", text)


def services(*files: str) -> dict[str, Service]:
    """Merged as Compose merges environments; nothing else here is said twice."""
    merged: dict[str, Service] = {}
    for file in files:
        for name, service in yaml.safe_load(interpolated((ROOT / file).read_text()))["services"].items():
            before = merged.setdefault(name, {})
            environment = {**before.get("environment", {}), **service.get("environment", {})}
            merged[name] = {**before, **service, "environment": environment}
    return merged


def settings_of(name: str, service: Service) -> Any:
    """As the service in the container reads them. A variable without a value is not there."""
    settings, prefix = SETTINGS[name]
    environment = {key: str(value) for key, value in service["environment"].items() if value is not None}
    return load_settings(settings, program="test", env_prefix=prefix, arguments=[], environment=environment)


def seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(s|m)", duration).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1, "m": 60}[unit]


def test_the_services_accept_their_settings_also_on_a_gpu_and_with_keys() -> None:
    for name, service in services("compose.yaml").items():
        if name in SETTINGS:
            settings = settings_of(name, service)
            assert settings.host == settings.metrics_host == "0.0.0.0"
    assert settings_of("engine", services("compose.yaml", "compose.gpu.yaml")["engine"]).device == "cuda"
    tokenizer = services("compose.yaml", "compose.keys.yaml")["tokenizer"]
    assert settings_of("tokenizer", tokenizer).api_key_file == "/run/secrets/api_keys"
    assert tokenizer["secrets"] == ["api_keys"]


def test_variables_that_are_passed_through_are_settings() -> None:
    for name, service in services("compose.yaml", "compose.gpu.yaml", "compose.keys.yaml").items():
        if name in SETTINGS:
            settings, prefix = SETTINGS[name]
            known = {prefix + field.upper() for field in settings.model_fields}
            passed = {key for key in service["environment"] if key.startswith(prefix)}
            assert passed
            assert passed <= known


def test_every_service_is_confined_restarts_and_says_how_it_is() -> None:
    for name, service in services("compose.yaml").items():
        assert service["read_only"] is True, name
        assert service["init"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["logging"]["options"]["max-size"], name
        if name != "load":
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"], name


def test_ports_are_published_on_loopback_and_the_engine_has_none() -> None:
    described = services("compose.yaml")
    assert "ports" not in described["engine"]
    for name, service in described.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), (name, port)


def test_services_end_before_docker_kills_them_and_all_within_ten_seconds() -> None:
    total = 0.0
    for name, service in services("compose.yaml").items():
        if name in SETTINGS:
            total += (drain := settings_of(name, service).drain_timeout)
            assert drain < seconds(service["stop_grace_period"])
    assert total < DOWN_LIMIT_S


def test_whoever_waits_for_another_waits_until_it_is_healthy() -> None:
    described = services("compose.yaml")
    for service in described.values():
        for other, condition in service.get("depends_on", {}).items():
            assert condition == {"condition": "service_healthy"}
            assert "healthcheck" in described[other]


def test_health_names_and_users_are_those_of_kubernetes() -> None:
    user = re.findall(r"^USER (\S+)$", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    for name in SETTINGS:
        resources = list(yaml.safe_load_all((ROOT / f"deploy/kubernetes/base/{name}.yaml").read_text()))
        pod = next(each for each in resources if each["kind"] == "Deployment")["spec"]["template"]["spec"]
        security = pod["securityContext"]
        assert set(user) == {f"{security['runAsUser']}:{security['runAsGroup']}"}
        probe = pod["containers"][0]["readinessProbe"]["grpc"]
        test = services("compose.yaml")[name]["healthcheck"]["test"]
        assert test[-2:] == [f"127.0.0.1:{probe['port']}", probe["service"]]


def test_networks_keep_load_tests_and_the_board_away_from_engines() -> None:
    described = services("compose.yaml")
    inside = {name for name, service in described.items() if "engines" in service["networks"]}
    assert inside == {"engine", "tokenizer", "prometheus"}


@pytest.mark.parametrize("file", ["compose.yaml", "compose.gpu.yaml", "compose.keys.yaml"])
def test_nothing_is_in_the_files_that_compose_1_29_does_not_know(file: str) -> None:
    described = yaml.safe_load((ROOT / file).read_text())
    known = {"services", "volumes", "networks", "secrets"}
    assert {key for key in described if not key.startswith("x-")} <= known
    for service in described["services"].values():
        assert "start_interval" not in service.get("healthcheck", {})
        assert isinstance(service.get("env_file", []), list)


def test_the_dockerfile_builds_without_buildkit() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert not text.startswith("# syntax")
    assert not re.search(r"^\s*(RUN --|COPY --(?!from))", text, flags=re.MULTILINE)


def locked(image: str) -> dict[str, str]:
    """Package -> version."""
    lines = re.findall(r"^([a-zA-Z0-9._-]+)==([^ ]+)", (DOCKER / f"{image}.lock").read_text(), flags=re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def requirements(extras: list[str]) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    for extra in extras:
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            found += requirements(sorted(requirement.extras)) if requirement.name == "tokenwire" else [requirement]
    return found


@pytest.mark.parametrize("image", EXTRAS)
def test_the_lock_file_has_what_the_image_needs(image: str) -> None:
    versions = locked(image)
    for requirement in requirements(EXTRAS[image]):
        if requirement.name != "torch":
            version = versions.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is not in {image}.lock: run deploy/docker/lock.sh"
            assert version in requirement.specifier, f"{requirement} and {image}.lock: run deploy/docker/lock.sh"


def test_only_the_engine_has_torch_and_no_lock_file_has_it() -> None:
    stages = (DOCKER / "Dockerfile").read_text().split("\nFROM ")
    installs = [stage.split()[2] for stage in stages[1:] if '"$TORCH"' in stage]
    assert installs == ["engine-packages-pip"]
    for image in EXTRAS:
        assert "torch" not in locked(image)
