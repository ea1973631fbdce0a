"""What is downloaded is known beforehand: images by their digests, packages by their hashes."""

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.manifests import COMPOSED, RENDERED, ROOT, compose, containers, workloads

DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
# By tag: no digest of this image could be looked up in two sources.
BY_TAG = {"lmsysorg/sglang:v0.5.23"}
OWN = re.compile(r"(docker\.io/)?treadle-")  # built from this tree
LOCKED = {
    "requirements-images.txt": "requirements-mesh.txt",
    "services/sidecar/engine/images.txt": "services/sidecar/engine/constraints.txt",
    "services/sidecar/engine/torch.txt": "services/sidecar/engine/constraints.txt",
}


def tracked(*patterns: str) -> list[Path]:
    """Files of the tree, without what is built or installed in it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


def images() -> Iterator[tuple[str, str]]:
    """Where each image is named, and its name."""
    for name in RENDERED:
        for workload, template in workloads(name).items():
            for container in containers(template["spec"]):
                yield f"{name}: {workload}", container["image"]
    for files in COMPOSED:
        for name, service in compose(*files)["services"].items():
            if "build" not in service:
                yield f"{files[-1]}: {name}", service["image"]
    for file in tracked("*Dockerfile*"):
        text = file.read_text()
        given = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
        stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
        for base in re.findall(r"^FROM (\S+)", text, re.MULTILINE):
            if base not in stages:
                argument = re.fullmatch(r"\$\{(\w+)\}", base)
                yield f"{file}: {base}", given[argument[1]] if argument else base


def test_every_image_of_others_is_named_by_its_digest() -> None:
    named = dict(images())
    assert len(named) > len(RENDERED)
    loose = {
        where: image
        for where, image in images()
        if not DIGEST.search(image) and not OWN.match(image) and image not in BY_TAG
    }
    assert not loose
    assert set(named.values()) >= BY_TAG, "an exception that nothing needs"


def pins(path: str) -> dict[str, str]:
    """Version of each package that a file pins."""
    found = re.findall(r"^([\w.\-]+)==([^\s;\\]+)", (ROOT / path).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in found}


@pytest.mark.parametrize("path", sorted(LOCKED))
def test_images_install_the_versions_that_were_tested_each_by_its_hashes(path: str) -> None:
    text = re.sub(r"\\\n", " ", (ROOT / path).read_text())
    lines = [line for line in text.splitlines() if line and line[0] not in "# -"]
    assert lines
    for line in lines:
        assert re.match(r"[\w.\-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", line), line[:80]
    tested = pins(LOCKED[path])
    assert pins(path)
    differing = {
        name: version
        for name, version in pins(path).items()
        if tested.get(name, version) != version
    }
    assert not differing, "make locks"


def test_every_package_that_a_service_asks_for_is_locked() -> None:
    """The images of services install from what is locked alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    services = {path.name.removeprefix("treadle_") for path in ROOT.glob("services/*/treadle_*")}
    wanted = [
        *project["dependencies"],
        *(each for name in services for each in project["optional-dependencies"][name]),
    ]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~ ]", each)[0]).lower() for each in wanted}
    assert names - {"treadle-client"} <= pins("requirements-images.txt").keys()
    assert "setuptools" in pins("requirements-images.txt")


def test_images_install_nothing_without_a_hash() -> None:
    """What an index answers is compared with a hash; else pip gets a folder alone."""
    files = [ROOT / "Dockerfile", ROOT / "services/sidecar/engine/Dockerfile"]
    installs = [
        line
        for file in files
        for line in re.split(r"\n(?=[A-Z]+ )| && |; ", file.read_text().replace("\\\n", " "))
        if re.search(r"pip3? +(install|download|wheel)", line) and not line.startswith("#")
    ]
    assert installs
    for line in installs:
        assert re.search(r" --(require-hashes|no-index) ", line), line
    called = [name for file in files for name in re.findall(r"[\w-]+\.sh\b", file.read_text())]
    assert set(called) == {"install-torch.sh"}, "what others install has no hash"
    assert 'if [ -n "${TORCH_FROM_PYPI}" ]; then ./install-torch.sh' in files[1].read_text()


def test_no_script_fetches_what_it_does_not_check() -> None:
    """Packages come by the clients of their registries, which compare signatures or hashes."""
    for path in tracked("*.sh", ".ci", "Makefile", "*Dockerfile*", "scripts", "examples"):
        text = path.read_text()
        assert not re.search(r"\b(curl|wget)\s+(-\S+\s+)*[\"']?https?://(?!127\.)", text), path
        assert "@latest" not in text, path


def test_the_examples_in_other_languages_name_their_packages_by_hash() -> None:
    go = (ROOT / "examples/go/go.mod").read_text()
    required = re.findall(r"^\s*(\S+\.\S+/\S+) (v\S+)", go, re.MULTILINE)
    sums = (ROOT / "examples/go/go.sum").read_text().splitlines()
    assert len(required) >= 3
    for module, version in required:
        for what in (version, f"{version}/go.mod"):
            assert [line for line in sums if line.startswith(f"{module} {what} h1:")], module
    lock = json.loads((ROOT / "examples/node/package-lock.json").read_text())
    for name, package in lock["packages"].items():
        assert not name or package["integrity"].startswith("sha512-"), name
