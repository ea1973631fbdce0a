"""`treadle bench tools --quick` as a person runs it: every key is there, with a page and a
picture."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.sandbox import need_sandbox, without_bubblewrap_wheel

RUN_S = 300.0

pytestmark = pytest.mark.timeout(400)

KEYS = (
    *(
        "decision_p99_ms",
        "overhead_pct",
        "act_ratio_pod_1280",
        "act_ratio_min",
        "act_ratio_dop4_256",
    ),
    *("act_ratio_dop16_1280", "gpu_fraction_same_act", "live_p50_ms", "live_p99_ms", "sessions_ok"),
)


def run_quickly(folder: Path, **environ: str) -> dict[str, Any]:
    """What `--json` prints; the page is in `folder`."""
    arguments = ["bench", "tools", "--quick", "--repeats", "1", "--json", "--pictures", str(folder)]
    command = [sys.executable, "-m", "treadle_cli", *arguments]
    env = {**os.environ, **environ}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_S, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_quick_run_prints_every_key_and_writes_its_page(tmp_path: Path) -> None:
    need_sandbox()
    found = run_quickly(tmp_path)
    assert all(isinstance(found[key], float) for key in KEYS)
    assert found["live"]["missing"] is None
    assert found["sessions_ok"] == found["live"]["sessions"]["asked"]
    assert found["quick"]
    assert (tmp_path / "tools.md").exists()
    assert (tmp_path / "tools.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "tools.json").read_text()) == found


def test_without_a_sandbox_the_live_figures_are_null_and_it_says_why(tmp_path: Path) -> None:
    found = run_quickly(
        tmp_path, PATH=str(tmp_path), PYTHONPATH=without_bubblewrap_wheel(tmp_path / "modules")
    )
    assert {key for key in KEYS if found[key] is None} == {
        "live_p50_ms",
        "live_p99_ms",
        "sessions_ok",
    }
    assert "bubblewrap is not installed" in found["live"]["missing"]
    assert "Nothing was measured live" in (tmp_path / "tools.md").read_text()
