"""What a shell is offered for `treadle`, and that every command that says something takes
--json."""

import os
import subprocess
import sys

import pytest
import typer
from treadle_cli.app import COMMANDS, app, load_command
from treadle_cli.options import complete_from
from typer.testing import CliRunner


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
    commands = {name: load_command(name) for name in COMMANDS}
    without = {
        name
        for name, command in commands.items()
        if not isinstance(command, typer.core.TyperGroup)
        and not any("--json" in parameter.opts for parameter in command.params)
    }
    assert not without


@pytest.mark.parametrize("name", [*COMMANDS, "bench"])
def test_help_shows_each_command_in_one_line_and_the_command_shows_its_own_help(name: str) -> None:
    lines = CliRunner().invoke(app, ["--help"], terminal_width=80).output.splitlines()
    shown = [line for line in lines if line.startswith(f"  {name} ")]
    assert len(shown) == 1 and shown[0].endswith(".") and not shown[0].endswith("...")
    if name in COMMANDS:
        own = CliRunner().invoke(app, [name, "--help"])
        assert own.exit_code == 0 and f" {name} [OPTIONS]" in own.output
