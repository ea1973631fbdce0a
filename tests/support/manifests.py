"""What an operator of Kubernetes applies and what Compose starts, as tests read it."""

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
TOOLS = Path(sys.executable).parent  # where kubectl and its schemas are
OVERLAYS = sorted(folder.name for folder in (K8S / "overlays").iterdir())
COMPONENTS = sorted(folder.name for folder in (K8S / "components").iterdir())
# Beside the overlays, each component on the base: also those that no overlay has.
RENDERED = (*OVERLAYS, *(f"base+{component}" for component in COMPONENTS))
DOTENV = dict(
    line.split("=", 1)
    for line in (ROOT / ".env").read_text().splitlines()
    if "=" in line and line[0] != "#"
)
# What compose takes from the environment, which has no default.
GIVEN = {"NATS_PASSWORD": "of-the-operator"}
OBSERVED = ("docker-compose.yml", "compose.cpu.yml", "compose.observability.yml")
COMPOSED = (
    ("docker-compose.yml", "compose.cpu.yml"),
    ("docker-compose.yml", "compose.gpu.yml"),
    OBSERVED,
)


@cache
def render(name: str) -> str:
    """Return the manifests of an overlay, or of `base+COMPONENT`."""
    if name in OVERLAYS:
        return _kustomize(K8S / "overlays" / name)
    with tempfile.TemporaryDirectory() as made:
        k8s = os.path.relpath(K8S, Path(made).resolve())
        component = name.removeprefix("base+")
        overlay = {"resources": [f"{k8s}/base"], "components": [f"{k8s}/components/{component}"]}
        (Path(made) / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
        return _kustomize(Path(made))


def _kustomize(folder: Path) -> str:
    command = [str(TOOLS / "kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def rendered(name: str) -> tuple[dict[str, Any], ...]:
    """Return the objects of an overlay, or of `base+COMPONENT`."""
    return tuple(yaml.load_all(render(name), yaml.CSafeLoader))


def workloads(name: str) -> dict[str, dict[str, Any]]:
    """Return the pod template of each workload, by `namespace/name`."""
    return {
        f"{each['metadata']['namespace']}/{each['metadata']['name']}": each["spec"]["template"]
        for each in rendered(name)
        if "template" in each.get("spec", {})
    }


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all containers of a pod's specification."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def compose(*files: str) -> dict[str, Any]:
    """Return the layers merged as compose does for what these tests read: maps by key, `volumes` by
    their path in the container, everything else by the last layer."""
    merged: dict[str, Any] = {}
    for file in files:
        text = re.sub(
            r"\$\{(\w+)(?::[-?](.*?))?\}",
            lambda match: {**DOTENV, **GIVEN}.get(match[1], match[2]),
            (ROOT / file).read_text(),
        )
        _merge(merged, yaml.safe_load(text))
    return merged


def _merge(base: dict[str, Any], layer: dict[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        elif key == "volumes" and isinstance(value, list):
            paths = {mount.split(":")[1]: mount for mount in [*base.get(key, []), *value]}
            base[key] = list(paths.values())
        else:
            base[key] = value
