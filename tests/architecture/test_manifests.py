"""Compose, Kubernetes and the Dockerfile name what exists: a renamed setting, extra or folder must not wait for an
operator to find it."""

import importlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from treadle_runtime.config import Settings, prefix_of

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("predictor", "scheduler", "placement", "migrator", "tools", "rollout", "sidecar")


def settings_of(service: str) -> type[Settings]:
    module = importlib.import_module(f"treadle_{service}.config")
    [found] = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Settings) and value.service == service
    ]
    return found


def variables_in_compose() -> set[str]:
    document = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return {name for service in document["services"].values() for name in service.get("environment", {})}


def variables_in_kubernetes() -> set[str]:
    documents = [each for path in (ROOT / "k8s").rglob("*.yaml") for each in yaml.safe_load_all(path.read_text())]
    return set(_environment(documents))


def _environment(node: Any) -> list[str]:
    if isinstance(node, list):
        return [name for item in node for name in _environment(item)]
    if not isinstance(node, dict):
        return []
    here = [item["name"] for item in node.get("env", [])]
    if node.get("kind") == "ConfigMap":
        here += list(node["data"])
    return here + [name for value in node.values() for name in _environment(value)]


@pytest.mark.parametrize("variables", [variables_in_compose, variables_in_kubernetes])
def test_every_treadle_variable_in_a_manifest_is_a_setting(variables: Any) -> None:
    known = {f"TREADLE_{field.upper()}" for field in Settings.model_fields}
    for service in SERVICES:
        cls = settings_of(service)
        known |= {f"{prefix_of(cls)}{field.upper()}" for field in cls.model_fields}
    named = {name for name in variables() if name.startswith("TREADLE_")}
    assert len(named) > len(SERVICES)
    assert named <= known, f"no such setting: {sorted(named - known)}"


@pytest.mark.parametrize("service", SERVICES)
def test_compose_and_kubernetes_give_every_service_an_address_of_its_own(service: str) -> None:
    variable = f"TREADLE_{service.upper()}_LISTEN"
    assert variable in variables_in_compose()
    assert variable in variables_in_kubernetes()


def test_the_dockerfile_copies_the_folder_of_every_package_and_installs_an_extra_for_every_service() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(SERVICES) <= set(project["project"]["optional-dependencies"])
    copied = {
        word
        for line in (ROOT / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    }
    folders = project["tool"]["setuptools"]["packages"]["find"]["where"]
    assert {Path(folder).parts[0] for folder in folders} <= copied


def test_no_probe_ends_an_engine_that_loads_weights() -> None:
    """SGLang answers /health and /server_info by its scheduler process, which is silent while weights are loaded; and
    /health takes more than the second that Kubernetes gives a probe by default."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["engine-0"]
    [pod, gpu] = [
        yaml.safe_load((ROOT / "k8s" / file).read_text())["spec"]["template"]["spec"]["containers"][0]
        for file in ("engine/statefulset.yaml", "components/gpu-engines/gpu/gpu.yaml")
    ]
    for command in (compose["healthcheck"]["test"], pod["livenessProbe"]["exec"]["command"]):
        assert command[-1].endswith("/model_info")
    assert "livenessProbe" not in gpu, "it is the pod's"
    for probe in (pod["startupProbe"], gpu["startupProbe"]):
        assert probe["exec"]["command"][-1].endswith("/health")
        assert probe["timeoutSeconds"] > 20, "SGLang's own limit"
