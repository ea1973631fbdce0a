"""What a shell is offered for `treadle`, and that every command that says something takes
--json."""

import os
import subprocess
import sys

import pytest
import typer
from treadle_cli.app import app
from treadle_cli.options import complete_from

NO_JSON = {"bench"}  # a distribution of its own takes its arguments


def offered(*words: str) -> list[str]:
    line = ("treadle", *words)
    asked = {
        "_TREADLE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(line),
        "COMP_CWORD": str(len(line) - 1),
    }
    command = [sys.executable, "-m", "treadle_cli"]
    return subprocess.run(
        command, env=os.environ | asked, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.parametrize(
    ("words", "among"),
    [
        (("at",), {"attach"}),
        (("d",), {"demo", "doctor", "down", "drain"}),
        (("simulate", "--format", "pr"), {"prime-rl"}),
        (("simulate", "--systems", "verl,sl"), {"verl,slime"}),
        (("up", "--weights", ""), {"auto", "int8", "float"}),
    ],
)
def test_a_shell_is_offered_commands_and_values(words: tuple[str, ...], among: set[str]) -> None:
    assert set(offered(*words)) == among


def test_a_list_with_commas_is_completed_at_its_end() -> None:
    assert complete_from("verl", "verl*", "slime")("slime,ve") == ["slime,verl", "slime,verl*"]


def test_every_command_takes_json() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    without = {
        name
        for name, command in group.commands.items()
        if not isinstance(command, typer.core.TyperGroup)
        and not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == NO_JSON
