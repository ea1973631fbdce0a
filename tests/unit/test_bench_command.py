"""`treadle bench`: its list of benches, and what it says where the distribution is not installed."""

import pytest
from treadle_cli import app as command_line
from typer.testing import CliRunner

from treadle_bench.command import BENCHES


def test_without_a_name_the_benches_are_listed_and_each_has_the_name_that_it_is_found_by() -> None:
    done = CliRunner().invoke(command_line.app, ["bench"])
    assert done.exit_code == 2
    assert all(f"  {name}: " in done.output for name in BENCHES)
    assert [bench.name for bench in BENCHES.values()] == list(BENCHES)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["heddle4", "--json"]])
def test_without_the_distribution_the_command_says_how_to_install_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "entry_points", lambda **_: ())
    done = CliRunner().invoke(command_line.app, ["bench", *arguments])
    assert done.exit_code == 2
    assert done.output.startswith("treadle: ")
    assert "pip install ./bench" in done.output
    assert done.output.count("\n") == 1


def test_flags_of_sglang_reach_the_bench_behind_two_dashes() -> None:
    done = CliRunner().invoke(command_line.app, ["bench", "nothing", "--", "--stream-interval", "16"])
    assert done.exit_code == 2 and "there is no bench 'nothing'" in done.output
