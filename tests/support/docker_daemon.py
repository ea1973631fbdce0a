"""The Docker daemon that tests may use, if there is one.

TREADLE_TEST_DOCKER_HOST: its address, such as unix:///var/run/docker.sock.
TREADLE_TEST_DOCKER_IMAGE: an image with Python 3.11 or later that it has; python:3.11-slim-bookworm
by default. The tests start containers labelled with an owner of their own and leave none.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

HOST, IMAGE = "TREADLE_TEST_DOCKER_HOST", "TREADLE_TEST_DOCKER_IMAGE"
DEFAULT_IMAGE = "python:3.11-slim-bookworm"
ANSWER_S = 10.0


@dataclass(frozen=True)
class DockerDaemon:
    """One that answers, and has the image."""

    url: str
    image: str

    def settings(self, owner: str, folder: Path) -> dict[str, str]:
        """Settings of a service whose tools run here."""
        return {
            "BACKEND": "docker",
            "DOCKER_HOSTS": self.url,
            "IMAGE": self.image,
            "OWNER": owner,
            "STATE_DIR": str(folder / "state"),
            "MODULES": "support.container_tools",
        }

    def containers(self, owner: str, *, running: bool = False) -> list[str]:
        """Names of an owner's containers."""
        every = [] if running else ["--all"]
        return self._run(
            "ps", *every, "--filter", f"label=treadle.tools.owner={owner}", "--format", "{{.Names}}"
        ).split()

    def inspect(self, name: str) -> dict[str, object] | None:
        """What the daemon says of a container; None once it has been removed."""
        try:
            (about,) = json.loads(self._run("inspect", name))
        except subprocess.CalledProcessError as error:
            if "No such object" in error.stderr:
                return None
            raise
        return dict(about)

    def kill(self, name: str) -> None:
        """As an operator would."""
        self._run("kill", name)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run(
            ["docker", "-H", self.url, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[DockerDaemon]:
    """The daemon; skips the test where there is none, and says why."""
    url, image = os.environ.get(HOST, ""), os.environ.get(IMAGE, DEFAULT_IMAGE)
    if not url:
        pytest.skip(f"{HOST} names no Docker daemon")
    try:
        for question in (("version",), ("image", "inspect", image)):
            subprocess.run(
                ["docker", "-H", url, *question], capture_output=True, check=True, timeout=ANSWER_S
            )
    except FileNotFoundError:
        pytest.skip("the program `docker` is not installed")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{HOST}={url}: `{' '.join(error.cmd[3:])}` fails")
    yield DockerDaemon(url, image)
