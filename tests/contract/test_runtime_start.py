"""`python -m treadle_runtime.start`: the command of the images."""

import os
import subprocess
import sys


def start(**variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treadle_runtime.start"]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


def test_it_starts_the_service_that_is_named() -> None:
    """A setting that is refused shows that the service read its settings."""
    ended = start(TREADLE_SERVICE="placement", TREADLE_PLACEMENT_LISTEN="nowhere")
    assert (ended.returncode, "TREADLE_PLACEMENT_LISTEN" in ended.stderr) == (2, True)


def test_a_missing_service_is_said() -> None:
    ended = start(TREADLE_SERVICE="")
    assert (ended.returncode, "TREADLE_SERVICE must name a service" in ended.stderr) == (1, True)
