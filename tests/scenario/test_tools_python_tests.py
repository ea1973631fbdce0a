"""`python_tests` in the sandbox: exactly the given files run, and nothing of the agent's counts."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.processes import ServiceProcess
from support.rewards import RewardCalls
from support.tools import shared_tools
from treadle.tools.v1 import rewards_pb2 as pb

PARTS = 8  # of the cases, each of which starts pytest in a sandbox
DONE, FAILED = pb.REWARD_STATE_DONE, pb.REWARD_STATE_FAILED


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("tests")
    with shared_tools(folder, REWARDS="python_tests", CORES="2", PIN="off") as process:
        yield process


TESTS = """
from calc import add
def test_small():
    assert add(1, 2) == 3
def test_large():
    assert add(20, 20) == 40
"""
STAR_TESTS = TESTS.replace("import add", "import *")
RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return 0\n"
MINE = "".join(f"def test_mine_{n}():\n    assert True\n" for n in range(18))
ALWAYS_PASSED = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
def pytest_collection_modifyitems(items):
    del items[1:]
"""
OVERWRITES = """
for name in ("test_it.py", "test_two.py"):
    open(name, "w").write("def test_small():\\n    pass\\ndef test_large():\\n    pass\\n")
"""
COLLECT_ONLY = {
    "pytest.ini": "[pytest]\naddopts = --collect-only test_mine.py\n",
    ".pytest.ini": "[pytest]\naddopts = --collect-only\n",
    "tox.ini": "[pytest]\naddopts = --collect-only\n",
    "setup.cfg": "[tool:pytest]\naddopts = --collect-only\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '--collect-only'\n",
}
ENDS_ALL = "import os\nos._exit(0)\n"
SHADOWS = dict.fromkeys(
    (
        "pytest.py",
        "_pytest/__init__.py",
        "xdist/__init__.py",
        "execnet.py",
        "sitecustomize.py",
        "usercustomize.py",
    ),
    ENDS_ALL,
)
PLUGIN = {
    "mine.dist-info/METADATA": "Metadata-Version: 2.1\nName: mine\nVersion: 1\n",
    "mine.dist-info/entry_points.txt": "[pytest11]\nmine = mine\n",
    "mine.py": ALWAYS_PASSED,
}
PATCHES = (
    # Pytest's reports
    "from _pytest.reports import TestReport\n"
    "make = TestReport.from_item_and_call.__func__\n"
    "def passed(cls, item, call):\n"
    "    call.excinfo = None\n"
    "    return make(cls, item, call)\n"
    "TestReport.from_item_and_call = classmethod(passed)\n",
    # The code of a function of pytest's
    "import _pytest.runner\n"
    "def call(item, when, log=True, **kwds):\n"
    "    from _pytest.reports import TestReport\n"
    "    item.obj = lambda: None\n"
    "    return item.ihook.pytest_runtest_makereport(item=item, call=\n"
    "        __import__('_pytest.runner').runner.CallInfo.from_call(lambda: None, when))\n"
    "_pytest.runner.call_and_report.__code__ = call.__code__\n",
    # How pytest calls tests
    "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n",
    # How pytest reads asserts
    "import _pytest.assertion.rewrite as rewrite\n"
    "import ast\n"
    "def drop(tree, *rest):\n"
    "    for each in ast.walk(tree):\n"
    "        if isinstance(each, ast.FunctionDef):\n"
    "            each.body = [ast.Pass()]\n"
    "    ast.fix_missing_locations(tree)\n"
    "rewrite.rewrite_asserts = drop\n",
    # A plugin of its own
    "import gc, pytest\n"
    "class Mine:\n"
    "    @pytest.hookimpl(wrapper=True)\n"
    "    def pytest_runtest_makereport(self, item, call):\n"
    "        report = yield\n"
    "        report.outcome = 'passed'\n"
    "        return report\n"
    "for each in gc.get_objects():\n"
    "    if isinstance(each, pytest.PytestPluginManager):\n"
    "        each.register(Mine())\n",
    # Its module as a plugin
    "import gc, pytest, sys\n"
    "@pytest.hookimpl(tryfirst=True)\n"
    "def pytest_pyfunc_call(pyfuncitem):\n"
    "    return True\n"
    "for each in gc.get_objects():\n"
    "    if isinstance(each, pytest.PytestPluginManager):\n"
    "        each.register(sys.modules[__name__])\n",
    # The built-in functions
    "import builtins\nbuiltins.AssertionError = StopIteration\n"
    "builtins.all = lambda each: True\nbuiltins.sum = lambda each: 3\n",
)
HELPED_TESTS = """
import unittest
from calc import add
def test_sum():
    assert sum([add(1, 2)]) == 3 and all([add(1, 2) == 3])
class Sums(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(1, 2), 3)
"""
REPLACES_TESTS = """
import sys
def add(a, b):
    tests = sys._getframe(1).f_globals
    tests["test_large"].__code__ = (lambda: None).__code__
    return a + b if a == 1 else 0
"""
MULTIPLIES = """
def pytest_generate_tests(metafunc):
    if metafunc.function.__name__ == "test_small":
        metafunc.fixturenames.append("copy")
        metafunc.parametrize("copy", range(50))
def add(a, b):
    return 3
"""
WRITES_RESULTS = """
import glob, os, stat
for path in glob.glob(f"/proc/{os.getppid()}/fd/*"):  # pytest's main process
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "ab", buffering=0) as file:
                for test in ("test_small", "test_large"):
                    for phase in ("setup", "call", "teardown"):
                        line = '{"test": "test_it.py::%s", "phase": "%s", "outcome": "passed"}\\n'
                        file.write((line % (test, phase)).encode())
    except OSError:
        pass
"""
# Files of the agent's and given ones, and the score.
CASES: dict[str, tuple[dict[str, str], dict[str, str], float]] = {
    "a wrong program": ({"calc.py": WRONG}, {"test_it.py": TESTS}, 0.0),
    "a right program": ({"calc.py": RIGHT}, {"test_it.py": TESTS}, 1.0),
    "tests of the agent's": ({"calc.py": WRONG, "test_mine.py": MINE}, {"test_it.py": TESTS}, 0.0),
    "given files of any name": (
        {"calc.py": WRONG, "test_mine.py": MINE},
        {"calc_test.py": TESTS, "tests.py": TESTS, "checks.py": TESTS, "data.txt": "x"},
        0.0,
    ),
    "given files of any name, right": (
        {"calc.py": RIGHT, "test_mine.py": "def test_mine():\n    assert False\n"},
        {"calc_test.py": TESTS, "tests.py": TESTS, "checks.py": TESTS, "data.txt": "x"},
        1.0,
    ),
    "given helpers": (
        {"calc.py": RIGHT},
        {"tests/__init__.py": "", "tests/values.py": "THREE = 3\n", "tests/test_it.py": TESTS},
        1.0,
    ),
    "a conftest of the agent's": (
        {"calc.py": WRONG, "conftest.py": ALWAYS_PASSED},
        {"test_it.py": TESTS},
        0.0,
    ),
    "configuration of the agent's": (
        {"calc.py": WRONG, "test_mine.py": MINE, **COLLECT_ONLY},
        {"test_it.py": TESTS},
        0.0,
    ),
    "configuration of the agent's beside a right program": (
        {"calc.py": RIGHT, **COLLECT_ONLY},
        {"test_it.py": TESTS},
        1.0,
    ),
    "given configuration": (
        {"calc.py": RIGHT, "pytest.ini": "[pytest]\naddopts = --collect-only\n"},
        {
            "pytest.ini": "[pytest]\npython_functions = check_*\n",
            "test_it.py": "import calc\ndef check_it():\n    assert calc.add(1, 1) == 2\n",
        },
        1.0,
    ),
    "a given conftest": (
        {"calc.py": RIGHT},
        {
            "conftest.py": "import calc, pytest\n@pytest.fixture\ndef two():\n    return 2\n",
            "test_it.py": "import calc\ndef test_it(two):\n    assert calc.add(two, two) == 4\n",
        },
        1.0,
    ),
    "a given conftest that the agent breaks": (
        {"calc.py": "raise SystemExit(0)\n"},
        {"conftest.py": "import calc\n", "test_it.py": "def test_it():\n    pass\n"},
        0.0,
    ),
    "modules in place of pytest": ({"calc.py": WRONG, **SHADOWS}, {"test_it.py": TESTS}, 0.0),
    "modules in place of pytest beside a right program": (
        {"calc.py": RIGHT, **SHADOWS},
        {"test_it.py": TESTS},
        1.0,
    ),
    "a plugin": ({"calc.py": WRONG, **PLUGIN}, {"test_it.py": TESTS}, 0.0),
    "a package in place of a given helper": (
        {"calc.py": WRONG, "helpers/__init__.py": "def check(right):\n    pass\n"},
        {
            "helpers.py": "def check(right):\n    assert right\n",
            "test_it.py": "import calc, helpers\n"
            "def test_it():\n    helpers.check(calc.add(1, 2) == 3)\n",
        },
        0.0,
    ),
    "a folder in place of a given file": (
        {"calc.py": RIGHT, "test_it.py/mine.py": "", "tests": "a file"},
        {"test_it.py": TESTS, "tests/test_more.py": TESTS},
        1.0,
    ),
    "the end of the process at import": ({"calc.py": ENDS_ALL}, {"test_it.py": TESTS}, 0.0),
    "the exit code for no tests": (
        {"calc.py": "import os\nos._exit(5)\n"},
        {"test_it.py": TESTS},
        0.0,
    ),
    "an exit that pytest obeys": (
        {"calc.py": "import pytest\npytest.exit('done', 0)\n"},
        {"test_it.py": TESTS},
        0.0,
    ),
    "a skipped file": (
        {"calc.py": "import pytest\npytest.skip('no', allow_module_level=True)\n"},
        {"test_it.py": TESTS},
        0.0,
    ),
    "the end of the process in a test": (
        {"calc.py": "import os\ndef add(a, b):\n    os._exit(0)\n"},
        {"test_it.py": TESTS},
        0.0,
    ),
    "the end of the main process": (
        {"calc.py": f"import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n{WRONG}"},
        {"test_it.py": TESTS},
        0.0,
    ),
    "a printed report": (
        {
            "calc.py": "print('2 passed')\nopen('/tmp/report.xml', 'w').write('<testsuite/>')\n"
            + WRONG
        },
        {"test_it.py": TESTS},
        0.0,
    ),
    "tests that are overwritten": (
        {"calc.py": OVERWRITES + WRONG},
        {"test_it.py": TESTS, "test_two.py": TESTS},
        0.0,
    ),
    "tests that a given file imports from the agent": (
        {"calc.py": WRONG + MINE},
        {"test_it.py": STAR_TESTS},
        0.0,
    ),
    "tests that a given file imports from a right program": (
        {"calc.py": RIGHT + "def test_mine():\n    assert False\n"},
        {"test_it.py": STAR_TESTS},
        1.0,
    ),
    "a decorator of the agent's": (
        {"calc.py": "def twice(test):\n    return lambda: (test(), test())\n"},
        {"test_it.py": "from calc import twice\n@twice\ndef test_it():\n    assert True\n"},
        1.0,
    ),
    **{
        f"{sort} programs that replace pytest's functions and built-in ones": (
            {f"calc_{at}.py": patch + program for at, patch in enumerate(PATCHES)},
            {
                f"{name}_{at}.py": HELPED_TESTS.replace("calc", f"calc_{at}")
                for at in range(len(PATCHES))
                for name in ("test_it", "test_two")
            },
            score,
        )
        for sort, program, score in (("wrong", WRONG, 0.0), ("right", RIGHT, 1.0))
    },
    "unittest's assertions replaced": (
        {
            "calc.py": "import unittest\nunittest.TestCase.assertEqual = lambda *each: None\n"
            + WRONG,
            "unittest.py": "class TestCase:\n    pass\n",
        },
        {"test_it.py": HELPED_TESTS},
        0.0,
    ),
    "tests that a test replaces": ({"calc.py": REPLACES_TESTS}, {"test_it.py": TESTS}, 0.5),
    "a hook that multiplies tests": ({"calc.py": MULTIPLIES}, {"test_it.py": STAR_TESTS}, 0.5),
    "results of its own": ({"calc.py": WRITES_RESULTS + WRONG}, {"test_it.py": TESTS}, 0.0),
    "output at the end of the process": (
        {"calc.py": "import atexit, os\natexit.register(os._exit, 0)\n" + WRONG},
        {"test_it.py": TESTS},
        0.0,
    ),
    "a given conftest with fixtures and patches": (
        {"calc.py": RIGHT + "def read():\n    return input()\n"},
        {
            "tests/conftest.py": "import builtins, pytest\n"
            "builtins.input = lambda: 'typed'\n"
            "@pytest.hookimpl(wrapper=True)\n"
            "def pytest_runtest_call(item):\n    item.seen = True\n    return (yield)\n",
            "tests/test_it.py": "import calc\n"
            "def test_it(request, monkeypatch):\n"
            "    assert request.node.seen and calc.read() == 'typed'\n",
        },
        1.0,
    ),
    "a file that cannot be imported beside another": (
        {"other.py": ""},
        {"test_it.py": TESTS, "test_two.py": "def test_it():\n    pass\n"},
        1 / 3,
    ),
    "parameters": (
        {"calc.py": RIGHT},
        {
            "test_it.py": "import calc, pytest\n"
            "@pytest.mark.parametrize('a', [1, 2, 3, 4])\n"
            "def test_it(a):\n    assert calc.add(a, a) == 4\n"
        },
        0.25,
    ),
    "unittest": (
        {"calc.py": RIGHT},
        {
            "checks.py": "import calc, unittest\n"
            "class Sums(unittest.TestCase):\n"
            "    def test_one(self):\n        self.assertEqual(calc.add(1, 1), 2)\n"
            "    def test_two(self):\n        self.assertEqual(calc.add(1, 1), 3)\n"
        },
        0.5,
    ),
    "a program that leaves a process": (
        {
            "calc.py": "import subprocess, sys\n"
            "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'],"
            " start_new_session=True)\n" + RIGHT
        },
        {"test_it.py": TESTS},
        1.0,
    ),
}


# What programs of an agent's do to have no score in place of 0: to the processes that score them,
SIGNALS_ALL = "import os\nos.kill(-1, {})  # all processes but init and this one\n"
LIMITS_ALL = """
import resource
for pid in range(1, 400):
    for limit in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NOFILE):
        try:
            resource.prlimit(pid, limit, (0, 0))
        except OSError:
            pass
"""
# to what they print,
FLOODS = """
import os
def add(a, b):
    os.write(2, (b"\\1" if a == 1 else b"\\xff") * 1_500_000)
    return 0
"""
# to the results of the workers,
REPORTS_ANYTHING = """
import gc
report = {"$report_type": "TestReport", "location": ("test_it.py", 1, "x"), "keywords": {},
          "longrepr": None, "sections": [], "duration": 0, "start": 0, "stop": 0}
for each in gc.get_objects():
    if type(each).__name__ == "WorkerInteractor":
        for nodeid, when, outcome in ((["x"], 7, None), ("test_it.py::test_small", {}, []), (5, (), b"")):
            data = {**report, "nodeid": nodeid, "when": when, "outcome": outcome}
            each.sendevent("testreport", data=data)
        each.sendevent("collectionfinish", topdir="/", ids=[7, ["x"], None, "\\ud800"])
"""
# and to the files that the tests and a report are in.
PIPES = """
import os
for folder in ("/tmp", os.getcwd(), "/dev/shm"):
    for name in ("report.xml", "junit.xml", "results"):
        os.mkfifo(f"{folder}/{name}")
open("/tmp/large.xml", "wb").truncate(60_000_000)
for name in ("test_it.py", "test_two.py"):
    os.unlink(name)
    os.mkfifo(name)
os._exit(1)
"""
ODD_FILES = """
import os, socket
here = os.getcwd()
os.unlink("test_it.py")
os.symlink("/dev/zero", "test_it.py")
os.unlink("test_two.py")
socket.socket(socket.AF_UNIX).bind("test_two.py")
open(b"\\xff\\xfe.py", "w").close()
os.link("calc.py", "again.py")
for _ in range(300):
    os.mkdir("deep")
    os.chdir("deep")
os.chdir(here)
os.chmod(here, 0)
"""
FILLS_DISK = """
import os
here, number = os.getcwd(), 0
try:
    while True:
        open(f"{here}/{number}", "wb").write(bytes(4_000_000))
        number += 1
except OSError:
    pass
try:
    while True:
        os.mkdir(f"{here}/d{number}")
        number += 1
except OSError:
    pass
"""
PARAMETERS = """
import calc, pytest
@pytest.mark.parametrize("case", calc.CASES)
def test_case(case):
    assert calc.add(1, 2) == 3
"""
ODD_CASES = 'CASES = ["\\ud800", "a\\nb::c", "\\0", "x" * 100_000, "[/red]", "\\x1b]52;c;eA==\\a", b"\\xff"]\n'
MADE_TESTS = "import calc\nfor n in calc.NUMBERS:\n    globals()[f'test_{n}'] = calc.test_of(n)\n"
BESIDE = {"test_it.py": TESTS, "test_two.py": TESTS}
LATE_MODULES = ("queue", "doctest", "pdb", "bdb", "cmd", "code", "glob", "pprint", "socket", "uuid")
BAD_NAMES = (
    "../up.py",
    "/etc/up.py",
    "..",
    "\ud800.py",
    "a\0b.py",
    "é" * 400,
    "d/" * 1500 + "x.py",
)
HOSTILE: dict[str, tuple[dict[str, str], dict[str, str], float]] = {
    "the scorer killed": ({"calc.py": SIGNALS_ALL.format(9) + WRONG}, {"test_it.py": TESTS}, 0.0),
    "paths that are none, and files that cannot be written": (
        {"calc.py": RIGHT, **dict.fromkeys(BAD_NAMES, ""), "calc.py/x.py": ""},
        {"test_it.py": TESTS},
        1.0,
    ),
    "output that grows as JSON": ({"calc.py": FLOODS}, {"test_it.py": TESTS}, 0.0),
    "results of any type": ({"calc.py": REPORTS_ANYTHING + WRONG}, {"test_it.py": TESTS}, 0.0),
    "no tests where the agent's code makes them": (
        {"calc.py": "import pytest\npytest.skip('no', allow_module_level=True)\n"},
        {"test_it.py": MADE_TESTS},
        0.0,
    ),
    "pipes in place of reports and tests": ({"calc.py": PIPES}, BESIDE, 0.0),
    "limits of other processes": ({"calc.py": LIMITS_ALL + WRONG}, {"test_it.py": TESTS}, 0.0),
    "modules that pytest imports late": (
        {"calc.py": WRONG, **{f"{name}.py": "import os\nos._exit(4)\n" for name in LATE_MODULES}},
        {"test_it.py": TESTS},
        0.0,
    ),
    "the scorer interrupted": (
        {"calc.py": SIGNALS_ALL.format(2) + WRONG},
        {"test_it.py": TESTS},
        0.0,
    ),
    "a lone surrogate in a program": (
        {"calc.py": f"{RIGHT}\nx = '\ud800'\n"},
        {"test_it.py": TESTS},
        0.0,
    ),
    "configuration that cannot be read": (
        {"calc.py": RIGHT, **dict.fromkeys(COLLECT_ONLY, "\ud800[pytest\naddopts = --nonsense\n")},
        {"test_it.py": TESTS},
        1.0,
    ),
    "an exit with pytest's code for a wrong call": (
        {"calc.py": "import pytest\npytest.exit('done', 4)\n"},
        {"test_it.py": MADE_TESTS},
        0.0,
    ),
    "odd names of tests": ({"calc.py": ODD_CASES + WRONG}, {"test_it.py": PARAMETERS}, 0.0),
    "odd files": ({"calc.py": ODD_FILES + WRONG}, BESIDE, 0.0),
    "a full disk": ({"calc.py": FILLS_DISK + WRONG}, {"test_it.py": TESTS}, 0.0),
    "more files than fit": (
        {"calc.py": WRONG, **{f"{number}.txt": "" for number in range(20_000)}},
        {"test_it.py": TESTS},
        0.0,
    ),
    "tests that are overwritten before the process ends": (
        {"calc.py": OVERWRITES + ENDS_ALL},
        BESIDE,
        0.0,
    ),
    "closed descriptors": (
        {"calc.py": "import os\nos.closerange(0, 256)\n" + WRONG},
        {"test_it.py": TESTS},
        0.0,
    ),
}
# Most of the time of a case is the start of pytest: by default those that have a cause of their own
HOSTILE_BY_DEFAULT = 5


@pytest.mark.parametrize(
    "names",
    [
        list(HOSTILE)[:HOSTILE_BY_DEFAULT],
        *(
            pytest.param([name], marks=pytest.mark.full)
            for name in list(HOSTILE)[HOSTILE_BY_DEFAULT:]
        ),
    ],
    ids=["some", *list(HOSTILE)[HOSTILE_BY_DEFAULT:]],
)
async def test_whatever_the_agents_files_do_they_are_scored(
    rewards: RewardCalls, names: list[str]
) -> None:
    """They end, stop or fill everything that they reach. Result: the score of the tests that pass,
    never a call without a score, which a trainer may repeat or leave out."""
    accepted = [
        await rewards.score("python_tests", {"files": HOSTILE[name][0], "tests": HOSTILE[name][1]})
        for name in names
    ]
    ended = await rewards.ended(*(one.reward_id for one in accepted))
    found = {
        name: (one.state, one.score, one.error) for name, one in zip(names, ended, strict=True)
    }
    assert found == {name: (DONE, HOSTILE[name][2], "") for name in names}


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ({"test_it.py": "def test_it(:"}, "tests.test_it.py: cannot be parsed"),
        ({"conftest.py": "import", "test_it.py": TESTS}, "tests.conftest.py: cannot be parsed"),
        ({"data.txt": "\ud800", "test_it.py": TESTS}, "tests.data.txt: cannot be written"),
        ({"../test_it.py": TESTS}, "must be a path below the work folder"),
        ({"data.txt": "x"}, "pytest found no tests"),
    ],
)
async def test_tests_that_are_broken_by_themselves_are_no_score(
    rewards: RewardCalls, tests: dict[str, str], why: str
) -> None:
    ended = await rewards.end("python_tests", {"files": {"calc.py": RIGHT}, "tests": tests})
    assert ended.state == FAILED
    assert why in ended.error


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, PARTS))]
)
async def test_exactly_the_given_tests_count(rewards: RewardCalls, part: int) -> None:
    cases = dict(list(CASES.items())[part::PARTS])
    asked: list[dict[str, Any]] = [
        {"files": files, "tests": tests} for files, tests, _ in cases.values()
    ]
    accepted = [await rewards.score("python_tests", arguments) for arguments in asked]
    ended = await rewards.ended(*(one.reward_id for one in accepted))
    found = {name: (one.state, one.score) for name, one in zip(cases, ended, strict=True)}
    assert found == {name: (DONE, score) for name, (_, _, score) in cases.items()}


async def test_a_wrong_configuration_of_the_given_tests_is_no_score(rewards: RewardCalls) -> None:
    tests = {"pytest.ini": "[pytest]\naddopts = --no-such-flag\n", "test_it.py": TESTS}
    ended = await rewards.end("python_tests", {"files": {"calc.py": RIGHT}, "tests": tests})
    assert (ended.state, ended.error) == (FAILED, "tool_error: pytest was called wrongly")
