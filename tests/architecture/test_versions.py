"""A release has one version: each file that names it names the same."""

import json
import re
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
VERSION = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def project(path: str) -> Any:
    return tomllib.loads((ROOT / path).read_text())["project"]


def text(path: str) -> str:
    return (ROOT / path).read_text()


def versions() -> dict[str, list[str]]:
    """What each place says."""
    image_tags = yaml.safe_load(text("k8s/base/kustomization.yaml"))["images"]
    return {
        "clients/python/pyproject.toml": [project("clients/python/pyproject.toml")["version"]],
        "research/pyproject.toml": [project("research/pyproject.toml")["version"]],
        "pyproject.toml, the client": [
            each.partition("==")[2]
            for each in project("pyproject.toml")["dependencies"]
            if each.startswith("treadle-client")
        ],
        "research/pyproject.toml, treadle": [
            each.partition("==")[2]
            for each in project("research/pyproject.toml")["dependencies"]
            if each.startswith("treadle")
        ],
        ".env": re.findall(r"^TREADLE_VERSION=(.*)$", text(".env"), re.MULTILINE),
        "k8s/base": [
            str(each["newTag"]) for each in image_tags if each["name"].startswith("treadle-")
        ],
        "k8s/components": [
            tag
            for path in sorted((ROOT / "k8s").rglob("*.yaml"))
            for tag in re.findall(r"treadle-[a-z-]+:(\d+\.\d+\.\d+\S*?)[\"'\s}]", path.read_text())
        ],
        "examples/node/package.json": [json.loads(text("examples/node/package.json"))["version"]],
        "protos/README.md": re.findall(
            r"treadle-protos-(\d[\w.]*?)(?:\.tar\.gz|/)", text("protos/README.md")
        ),
    }


@pytest.mark.parametrize("place", sorted(versions()))
def test_every_place_has_the_version_of_the_release(place: str) -> None:
    found = versions()[place]
    assert found and set(found) == {VERSION}, f"{place} says {found}, pyproject.toml {VERSION}"


def test_the_changelog_is_about_this_version() -> None:
    """Its first entry is the work since the last release, or the release itself."""
    heads = re.findall(r"^## (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    assert heads[0] == "Unreleased" or heads[0].split()[0] == VERSION
    released = [head for head in heads if head != "Unreleased"]
    assert not [
        head for head in released if not re.fullmatch(r"\d+\.\d+\.\d+ \(\d{4}-\d\d-\d\d\)", head)
    ]


def test_the_pinned_packages_take_the_oldest_python_that_the_readme_names() -> None:
    """Debian 12 has Python 3.11.2; a package that wants a later one ends `make setup` there."""
    pins = [
        line.partition("==")[0]
        for line in text("requirements-mesh.txt").splitlines()
        if "==" in line
    ]
    assert re.search(r"Python 3\.11\s+or newer", text("README.md"))
    refused = {}
    for name in pins:
        with suppress(PackageNotFoundError):  # what this machine does not install
            wants = metadata(name)["Requires-Python"] or ""
            if not SpecifierSet(wants).contains("3.11.0"):
                refused[name] = wants
    assert not refused
