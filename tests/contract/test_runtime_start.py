"""`python -m treadle_runtime.start`: the command of the images."""

import os
import subprocess
import sys
from pathlib import Path


def start(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treadle_runtime.start", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


def test_it_starts_the_service_with_the_kernels_of_the_image(tmp_path: Path) -> None:
    """A setting that is refused shows that the service read its settings. What the cache has already stays."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "one.nbi").write_text("compiled")
    places = {"TREADLE_KERNELS": str(tmp_path / "kernels"), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for _ in range(2):
        ended = start(TREADLE_SERVICE="placement", TREADLE_PLACEMENT_LISTEN="nowhere", **places)
        assert (ended.returncode, "TREADLE_PLACEMENT_LISTEN" in ended.stderr) == (2, True)
    assert (tmp_path / "cache" / "one.nbi").read_text() == "compiled"


def test_it_compiles_the_kernels_of_a_service_and_nothing_for_one_without(tmp_path: Path) -> None:
    for service, has_kernels in (("placement", True), ("rollout", False)):
        cache = tmp_path / service
        ended = start("--compile", TREADLE_SERVICE=service, NUMBA_CACHE_DIR=str(cache), NUMBA_CPU_NAME="generic")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert any(cache.rglob("*.nbi")) is has_kernels


def test_a_missing_service_is_said() -> None:
    ended = start(TREADLE_SERVICE="")
    assert (ended.returncode, "TREADLE_SERVICE must name a service" in ended.stderr) == (1, True)
