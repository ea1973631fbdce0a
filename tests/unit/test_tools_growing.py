"""A run of pytest-xdist that gets cores while it goes on. What runs is pytest itself."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from treadle_tools.scoring import growing, python_tests
from treadle_tools.tool import Status

CORES = sorted(os.sched_getaffinity(0))
TESTS = 12
RUN_S = 60.0  # nothing here takes as long, unless it hangs

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs a second core to lend")

# In the controller, one core. A worker leaves a file for each test that it runs.
CONFTEST = f"""
import os, pathlib, time
import pytest

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if WORKER is None:
    os.environ["CONTROLLER"] = str(os.getpid())
    os.sched_setaffinity(0, {{{CORES[0]}}})

def lend():
    os.sched_setaffinity(int(os.environ["CONTROLLER"]), {set(CORES[:2])})

def wait_for(pattern):
    while not list(pathlib.Path("ran").glob(pattern)):
        time.sleep(0.01)

@pytest.fixture(autouse=True)
def ran(request):
    pathlib.Path("ran", f"{{WORKER}} {{request.node.name}} {{time.monotonic_ns()}}").touch()
"""
REST = f"""
@pytest.mark.parametrize("n", range({TESTS - 1}))
def test_of_the_rest(n):
    pass
"""
# The first waits for a test that another worker runs.
LENT = f"""
import pytest
from conftest import lend, wait_for

def test_first():
    lend()
    wait_for("gw1 *")
{REST}"""
A_WHILE = "__import__('time').sleep(0.5)"  # of several looks


@dataclass(frozen=True)
class Run:
    """exit_code: of pytest. ran: who ran each test. report: the counts of its report."""

    exit_code: int
    output: str
    ran: dict[str, list[str]]
    report: Mapping[str, int]

    @property
    def workers(self) -> set[str]:
        return {worker for workers in self.ran.values() for worker in workers}


def run(folder: Path, tests: str, *options: str, conftest: str = "", most_cores: int = 2) -> Run:
    (folder / "ran").mkdir()
    (folder / "conftest.py").write_text(CONFTEST + conftest)
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "xdist.plugin", "-p", "no:cacheprovider"]
    command += ["-n", "1", "--dist", "worksteal", "-p", growing.__name__, "--junitxml=report.xml"]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(
        [*command, *options, "test_it.py"],
        cwd=folder,
        env={**inherited, **found, python_tests.MOST_CORES_VARIABLE: str(most_cores)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=RUN_S,
    )
    ran: dict[str, list[str]] = {}
    for one in (folder / "ran").iterdir():
        worker, test, _ = one.name.split(" ")
        ran.setdefault(test, []).append(worker)
    [suite] = ElementTree.parse(folder / "report.xml").getroot().iter("testsuite")
    report = {count: int(suite.attrib[count]) for count in ("tests", "failures", "errors", "skipped")}
    return Run(ended.returncode, ended.stdout.decode(), ran, report)


def passed(tests: int) -> dict[str, int]:
    return {"tests": tests, "failures": 0, "errors": 0, "skipped": 0}


def test_a_worker_joins_on_a_core_that_is_lent(tmp_path: Path) -> None:
    """WHEN a core comes while the first test runs. Result: two workers; each test ran once, and is in the report."""
    ended = run(tmp_path, LENT)
    assert (ended.exit_code, ended.workers) == (0, {"gw0", "gw1"}), ended.output
    assert ended.report == passed(TESTS)
    assert Counter(map(len, ended.ran.values())) == {1: TESTS}


def test_a_test_that_fails_fails_on_a_worker_that_joined(tmp_path: Path) -> None:
    failing = LENT.replace("    pass", "    assert os.environ['PYTEST_XDIST_WORKER'] == 'gw0'")
    ended = run(tmp_path, "import os\n" + failing)
    joined = [test for test, workers in ended.ran.items() if workers == ["gw1"]]
    assert (ended.exit_code, len(ended.ran)) == (1, TESTS), ended.output
    assert joined
    assert ended.report == passed(TESTS) | {"failures": len(joined)}


def test_a_run_that_stops_at_its_first_failure_ends_after_a_worker_joined(tmp_path: Path) -> None:
    ended = run(tmp_path, LENT.replace('"gw1 *")', '"gw1 *")\n    assert False'), "-x")
    assert ended.exit_code == pytest.ExitCode.INTERRUPTED, ended.output  # as without one
    assert ended.report["failures"] == 1


def test_a_worker_that_crashes_after_it_joined_fails_one_test(tmp_path: Path) -> None:
    crashing = LENT.replace("    pass", "    if os.environ['PYTEST_XDIST_WORKER'] == 'gw1': os._exit(1)")
    ended = run(tmp_path, "import os\n" + crashing)
    if ended.exit_code == python_tests.OWN_ERROR:
        assert "send_steal" in ended.output  # xdist's own, which `score` answers
        return
    assert (ended.exit_code, len(ended.ran)) == (1, TESTS), ended.output
    crashed = sum(workers == ["gw1"] for workers in ended.ran.values())
    assert ended.report == passed(TESTS) | {"errors": crashed}
    assert crashed == 1


def test_no_worker_joins_beyond_the_most_cores(tmp_path: Path) -> None:
    """WHEN there are two cores, of which the action may have one. Result: one worker."""
    ended = run(tmp_path, LENT.replace('wait_for("gw1 *")', A_WHILE), most_cores=1)
    assert (ended.exit_code, ended.workers, ended.report) == (0, {"gw0"}, passed(TESTS)), ended.output


def test_the_run_ends_without_a_worker_that_is_still_starting(tmp_path: Path) -> None:
    """WHEN one more starts for longer than the tests take. Result: the first runs them all, and nobody waits."""
    slow = f"""
if WORKER == "gw1":
    pathlib.Path("ran", "gw1 starts 0").touch()
    time.sleep({2 * RUN_S})
"""
    ended = run(tmp_path, LENT, conftest=slow)
    assert (ended.exit_code, ended.report) == (0, passed(TESTS)), ended.output
    assert ended.ran.pop("starts") == ["gw1"]
    assert (ended.workers, len(ended.ran)) == ({"gw0"}, TESTS)


def test_a_worker_that_collects_other_tests_does_not_join(tmp_path: Path) -> None:
    """WHEN the order of the tests differs from process to process. Result: each ran once, all on the first worker."""
    differing = """
def pytest_collection_modifyitems(items):
    if WORKER == "gw1":
        items[1:] = items[:0:-1]

@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    if WORKER == "gw1":
        pathlib.Path("ran", "gw1 collected 0").touch()
"""
    tests = LENT.replace('wait_for("gw1 *")', f'wait_for("gw1 *"); {A_WHILE}')
    ended = run(tmp_path, tests, conftest=differing)
    assert (ended.exit_code, ended.report) == (0, passed(TESTS)), ended.output
    assert ended.ran.pop("collected") == ["gw1"]
    assert ended.workers == {"gw0"}
    assert Counter(map(len, ended.ran.values())) == {1: TESTS}


@pytest.mark.parametrize("names", ["OF_RUN", "OF_SCHEDULER", "OF_WORKER"])
def test_with_an_xdist_that_names_things_otherwise_the_run_keeps_its_workers(tmp_path: Path, names: str) -> None:
    another = f"""
from treadle_tools.scoring import growing, python_tests
from treadle_tools.tool import Status
growing.{names} += ("not_there",)
"""
    tests = LENT.replace('wait_for("gw1 *")', A_WHILE)
    ended = run(tmp_path, tests, conftest=another)
    assert (ended.exit_code, ended.workers, ended.report) == (0, {"gw0"}, passed(TESTS)), ended.output


COMMANDS = {
    "alone": ({}, None, False),
    "one core, and no more": ({"TREADLE_CORES": "1", "TREADLE_MOST_CORES": "1"}, None, False),
    "short": ({"TREADLE_CORES": "1", "TREADLE_MOST_CORES": "4", "TREADLE_SINGLE_CORE_S": "9.0"}, None, False),
    "long": ({"TREADLE_CORES": "1", "TREADLE_MOST_CORES": "4", "TREADLE_SINGLE_CORE_S": "10.0"}, "1", True),
    "all there are": ({"TREADLE_CORES": "4", "TREADLE_MOST_CORES": "4"}, "4", False),
    "some": ({"TREADLE_CORES": "2", "TREADLE_MOST_CORES": "4", "TREADLE_SINGLE_CORE_S": "0.0"}, "2", True),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_workers_start_where_they_are_worth_it_and_more_join_where_more_may_come(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    told, workers, grows = COMMANDS[case]
    for variable in ("TREADLE_CORES", "TREADLE_MOST_CORES", "TREADLE_SINGLE_CORE_S"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in told.items():
        monkeypatch.setenv(variable, value)
    command = python_tests._command(["test_it.py", "helper.py"], *python_tests._workers())
    assert (command[command.index("-n") + 1] if "-n" in command else None) == workers
    assert (growing.__name__ in command) == ("worksteal" in command) == grows
    assert command[-1] == "test_it.py"


BREAKS = """
def pytest_runtestloop(session):
    if session.config.pluginmanager.hasplugin("treadle_tools.scoring.growing"):
        raise RuntimeError("of xdist")
"""


def test_a_run_that_breaks_while_it_may_grow_is_made_again_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_tests, "WORK", tmp_path / "work")
    monkeypatch.setattr(python_tests, "REPORT", tmp_path / "report.xml")
    monkeypatch.setenv("TREADLE_CORES", "2")
    tests = {"conftest.py": BREAKS, "test_it.py": "def test_it():\n    pass"}
    monkeypatch.setenv("TREADLE_MOST_CORES", "4")
    scored = python_tests.score({"files": {"code.py": ""}, "tests": tests})
    assert (scored.status, scored.reward) == (Status.OK, 1.0), scored.output
