"""Stored pages of KV inside the engine's own venv: what was damaged or is another engine's is never
used, and the folder keeps its limit."""

import pytest
from support.processes import SUPPORT
from support.real_engines import run_beside_sglang

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]


def play(*scenarios: str) -> None:
    """The scenarios are functions of support/stored_pages.py, which imports SGLang."""
    run_beside_sglang(SUPPORT / "stored_pages.py", *scenarios)


def test_a_stored_page_is_used_only_as_it_was_written() -> None:
    play("whole", "flipped", "cut", "swapped", "other_kind", "no_folder")


def test_engines_that_share_a_folder_keep_its_limit_and_delete_what_was_used_longest_ago() -> None:
    play("several_engines", "last_used_last", "leftovers", "too_large")
