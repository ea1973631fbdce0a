"""Stored pages of KV inside the engine's own venv: what was damaged or is another engine's is never used."""

import subprocess

import pytest
from support.processes import SUPPORT
from support.real_engines import engine_python

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


def test_a_stored_page_is_used_only_as_it_was_written() -> None:
    """The scenarios are functions of support/stored_pages.py, which imports SGLang."""
    command = [engine_python(), SUPPORT / "stored_pages.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
