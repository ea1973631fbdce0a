"""`treadle bench` where the distribution that has the figures is not installed."""

import pytest
from treadle_cli import app as command_line
from typer.testing import CliRunner


@pytest.mark.parametrize("arguments", [[], ["--help"], ["heddle4", "--json"]])
def test_without_the_distribution_the_command_says_how_to_install_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    done = CliRunner().invoke(command_line.app, ["bench", *arguments])
    assert done.exit_code == 2
    assert done.output.startswith("treadle: ")
    assert "pip install ./research" in done.output
    assert done.output.count("\n") == 1
