"""`treadle up --ray` where Ray is not installed."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_machine_without_ray_is_told_what_to_install(command: str) -> None:
    program = (
        f"import sys; sys.modules['ray'] = None; sys.argv = ['treadle', '{command}', "
        "'--ray', 'auto']; "
    )
    program += "from treadle_cli.app import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "Ray is not installed here: pip install 'treadle[ray]'" in " ".join(done.stderr.split())
