"""`treadle bench`: its list of benches, and the flags that it passes on."""

from treadle_cli import app as command_line
from typer.testing import CliRunner

from treadle_bench.command import BENCHES


def test_without_a_name_the_benches_are_listed_and_each_has_the_name_that_it_is_found_by() -> None:
    done = CliRunner().invoke(command_line.app, ["bench"])
    assert done.exit_code == 2
    assert all(f"  {name}: " in done.output for name in BENCHES)
    assert [bench.name for bench in BENCHES.values()] == list(BENCHES)


def test_flags_of_sglang_reach_the_bench_behind_two_dashes() -> None:
    done = CliRunner().invoke(
        command_line.app, ["bench", "nothing", "--", "--stream-interval", "16"]
    )
    assert done.exit_code == 2 and "there is no bench 'nothing'" in done.output
