"""Score an agent's files by the share of the given pytest tests that they pass.

Exactly the given tests run and count. The agent's files that would choose or count tests are not
written (`_chooses_tests`), pytest reads the configuration of the tests alone, and a test function
of the agent's that a given file imports is left out.

pytest runs with pytest-xdist, also on one core: its workers run the tests and the agent's code. Its
main process counts, in a file that the workers cannot open, and imports the agent's code only where
a given conftest.py does. This module is also their plugin: in a worker it undoes, around each test,
what the agent's code has changed of pytest, of unittest, of built-in functions and of the tests.

Not prevented: the agent's code runs in the process of the tests. It can read them, give them
objects that equal everything, and send results in the worker's place from a thread of its own. A
test without a result has failed.
"""

import ast
import builtins
import contextlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest.mock  # noqa: F401 - so that _Originals has it
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from treadle_tools.sandbox.inside import isolation
from treadle_tools.tool import InvalidArguments, Outcome, Status

WORK = Path("/tmp/work")
TESTS_S = 280.0  # within the wall clock of the reward; a test that has not ended then has failed
CORES_VARIABLE = "TREADLE_CORES"  # how many cores this action has
# For the plugin: the given files; the file of the results, in the main process.
GIVEN_VARIABLE, RESULTS_VARIABLE = "TREADLE_GIVEN_TESTS", "TREADLE_TEST_RESULTS"
MOST_OUTPUT_BYTES = 1024 * 1024
USAGE_ERROR = 4  # exit code of pytest

CONFTEST = "conftest.py"
CONFIGURATIONS = ("pytest.toml", "pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
# What runs tests and compares: no file of the agent's may be imported in its place.
RUNNERS = frozenset(
    ("pytest", "_pytest", "pluggy", "xdist", "execnet", "iniconfig", "packaging", "pygments", "py")
) | {"unittest"}
SHADOWED = RUNNERS | {"sitecustomize", "usercustomize", "treadle_tools", "numpy", "hypothesis"}
REPLACEABLE = ("input", "print", "open", "exit", "quit", "help")  # tests give their own
GENERATE = "pytest_generate_tests"
PHASES = {"setup": "passed", "call": "passed", "teardown": "passed"}  # of a test that passes


def python_tests(arguments: Mapping[str, Any]) -> Outcome:
    """Score the share of tests that pass; with `all_or_nothing` 1.0 where all pass, else 0.0."""
    given = {_path("tests", path): content for path, content in arguments["tests"].items()}
    agents = {_path("files", path): content for path, content in arguments["files"].items()}
    _write({path: text for path, text in agents.items() if not _chooses_tests(path, given)})
    _write(given)
    files = {path: _count_tests(text) for path, text in given.items() if _is_test_file(path, text)}
    returncode, output, lines = _run(files, given)
    tests = _results(lines)
    missing = sum(
        max(1, count)
        for path, count in files.items()
        if count and not any(test.split("::")[0] == str(path) for test in tests)
    )
    total = max(len(tests) + missing, int(arguments.get("expected_tests", 0)))
    wrong_call = returncode == USAGE_ERROR and not any(path.name == CONFTEST for path in given)
    if wrong_call or not total:
        error = "pytest was called wrongly" if wrong_call else "pytest found no tests"
        return Outcome(output=output, status=Status.TOOL_ERROR, error=error)
    passed = sum(tests.values())
    share = passed / total
    reward = float(passed == total) if arguments.get("all_or_nothing", False) else share
    return Outcome(output=output, reward=reward, data={"passed": passed, "tests": total})


def _path(name: str, path: str) -> PurePosixPath:
    pure = PurePosixPath(path)
    if not pure.parts or path.startswith("/") or ".." in pure.parts:
        raise InvalidArguments(f"{name}.{path}", "must be a path below the work folder")
    return pure


def _chooses_tests(path: PurePosixPath, given: Iterable[PurePosixPath]) -> bool:
    """Return whether a file of the agent's would be read by pytest, or in place of a given one."""
    return (
        path.name == CONFTEST
        or path.suffix in (".pyc", ".pth")
        or "__pycache__" in path.parts
        or any(part.endswith((".dist-info", ".egg-info")) for part in path.parts)
        or path.parts[0].removesuffix(".py") in SHADOWED
        # A folder is imported before a file of the same name.
        or any(
            one == path or one.with_suffix("") in path.parents or one in path.parents
            for one in given
        )
    )


def _write(files: Mapping[PurePosixPath, str]) -> None:
    WORK.mkdir(exist_ok=True)
    for path, content in files.items():
        target = WORK / path
        for parent in reversed(target.relative_to(WORK).parents[:-1]):
            if (WORK / parent).is_file():
                (WORK / parent).unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            shutil.rmtree(target)
        target.write_text(content)


def _is_test_file(path: PurePosixPath, source: str) -> bool:
    """Return whether a given file holds tests: by its name, or by what is in it."""
    if path.suffix != ".py" or path.name in (CONFTEST, "__init__.py"):
        return False
    stem = path.stem
    named = stem.startswith("test_") or stem.endswith("_test") or stem in ("test", "tests")
    return named or _count_tests(source) > 0


def _count_tests(source: str) -> int:
    """Return how many test functions a file writes down; of a file that cannot be read, one."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 1
    bodies = [body]
    for each in body:
        if isinstance(each, ast.ClassDef):
            bases = [ast.unparse(base) for base in each.bases]
            if each.name.startswith("Test") or any(base.endswith("TestCase") for base in bases):
                bodies.append(each.body)
    return sum(
        isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name.startswith("test")
        for body in bodies
        for each in body
    )


def _run(
    files: Iterable[PurePosixPath], given: Iterable[PurePosixPath]
) -> tuple[int | None, str, list[str]]:
    """Run pytest; return its exit code (None: it took too long), output and lines of results."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as results:
        process = subprocess.Popen(
            _command(files, given),
            cwd=WORK,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PYTHONSAFEPATH": "1",  # no pytest.py of the agent's, in workers too
                "PYTHONDONTWRITEBYTECODE": "1",
                GIVEN_VARIABLE: json.dumps([str(path) for path in given]),
                RESULTS_VARIABLE: str(results.fileno()),
            },
            pass_fds=[results.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode = process.wait(TESTS_S)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # no worker is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in (printed, results):
            file.seek(0)
        output = printed.read(MOST_OUTPUT_BYTES).decode(errors="backslashreplace")
        return returncode, output, results.read().decode().splitlines()


def _command(files: Iterable[PurePosixPath], given: Iterable[PurePosixPath]) -> list[str]:
    configuration = next((name for name in CONFIGURATIONS if PurePosixPath(name) in given), None)
    command = [sys.executable, "-P", "-s", "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "-p", __name__, "--rootdir", str(WORK)]
    command += ["-c", configuration or os.devnull]
    command += ["-n", os.environ.get(CORES_VARIABLE, "1")]
    return command + [str(path) for path in files]


def _results(lines: Iterable[str]) -> dict[str, bool]:
    """Return which tests there are, and whether each has passed: once, in all its phases."""
    phases: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for line in lines:
        message = json.loads(line)
        for test in message.get("collected", ()):
            phases.setdefault(test, [])
        if "test" in message:
            phases[message["test"]].append((message["phase"], message["outcome"]))
    return {test: sorted(seen) == sorted(PHASES.items()) for test, seen in phases.items()}


# The plugin, in pytest's main process and its workers.


class _Originals:
    """The functions of what runs the tests, as they were before code of the agent's ran."""

    def __init__(self, config: pytest.Config) -> None:
        modules = [
            module
            for name, module in list(sys.modules.items())
            if name == "builtins" or name.partition(".")[0] in RUNNERS
        ]
        owners: dict[int, Any] = {id(module): module for module in modules}
        for module in modules:
            owners |= {id(one): one for one in vars(module).values() if isinstance(one, type)}
        self._owners = owners
        self._attributes: list[tuple[Any, str, Any]] = []
        self._codes: list[tuple[FunctionType, CodeType]] = []
        for owner in (*owners.values(), config.hook, config.pluginmanager):
            for name, value in vars(owner).items():
                if (
                    callable(value) or isinstance(value, staticmethod | classmethod | property)
                ) and not (owner is builtins and name in REPLACEABLE):
                    self._attributes.append((owner, name, value))
                self.keep_code(getattr(value, "__func__", value))

    def keep_code(self, function: Any) -> None:
        """Restore the code of this function too, where it is one of Python's."""
        if isinstance(function, FunctionType):
            self._codes.append((function, function.__code__))

    def restore(self) -> None:
        """Undo what has been replaced since."""
        for owner, name, value in self._attributes:
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
        for function, code in self._codes:
            if function.__code__ is not code:
                function.__code__ = code

    def has_type_of(self, plugin: object) -> bool:
        """Return whether an object's class is one of pytest's own."""
        return id(type(plugin)) in self._owners


ORIGINALS = pytest.StashKey[_Originals]()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Let tests import from the work folder; not before pytest has loaded its own modules."""
    early_config.stash[ORIGINALS] = _Originals(early_config)
    sys.path.insert(0, str(early_config.rootpath))


def pytest_configure(config: pytest.Config) -> None:
    """Register what the main process does, or a worker."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_GivenTestsOnly(config), "given tests only")
    else:
        isolation.set_dumpable(False)  # so that no other process opens its files
        config.pluginmanager.register(_Reporter(int(os.environ[RESULTS_VARIABLE])), "reporter")


class _Reporter:
    """Writes what the workers report: which tests there are, and each phase of one."""

    def __init__(self, file: int) -> None:
        os.set_inheritable(file, False)
        self._file = file

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._write({"collected": ids})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write({"test": report.nodeid, "phase": report.when, "outcome": report.outcome})

    def _write(self, message: Mapping[str, Any]) -> None:
        os.write(self._file, json.dumps(message).encode() + b"\n")


class _GivenTestsOnly:
    """Runs the given tests in a worker: as they were given, by the original pytest, and none of the
    agent's."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._plugins = config.pluginmanager
        self._originals = config.stash[ORIGINALS]
        paths = [self._root / path for path in json.loads(os.environ[GIVEN_VARIABLE])]
        self._given = {path: path.read_bytes() for path in paths}
        self._known: set[Any] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        """Know the plugins that are there before the tests, and with them the agent's code, are
        imported."""
        self._known = self._plugins.get_plugins()

    @pytest.hookimpl(tryfirst=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> None:
        """Undo what the agent's code, imported by a file before, has changed."""
        self._restore()
        if isinstance(collector, pytest.Module):
            for path, content in self._given.items():
                if not path.is_file() or path.read_bytes() != content:
                    path.unlink(missing_ok=True)
                    path.write_bytes(content)
                # Compiled tests: nothing of Python's or pytest's is written here
                shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: pytest.Collector) -> None:
        """Remove a hook that a test file has imported from the agent, and that multiplies tests."""
        if isinstance(collector, pytest.Module):
            hook = vars(collector.obj).get(GENERATE)
            if hook is not None and GENERATE not in _functions_of(self._given[collector.path]):
                delattr(collector.obj, GENERATE)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self._is_given(item)]
        for item in items:
            self._originals.keep_code(_function_of(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._restore()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        try:
            return (yield)
        finally:
            self._restore()

    def _restore(self) -> None:
        self._originals.restore()
        for plugin in self._plugins.get_plugins() - self._known:
            if isinstance(plugin, ModuleType):
                source = Path(plugin.__file__ or self._root)
                is_agents = source not in self._given and source.is_relative_to(self._root)
            else:
                is_agents = not self._originals.has_type_of(plugin)
            if is_agents:
                self._plugins.unregister(plugin)

    def _is_given(self, item: pytest.Item) -> bool:
        if item.path not in self._given:
            return False
        code = getattr(_function_of(item), "__code__", None)
        source = Path(getattr(code, "co_filename", item.path))
        if source in self._given or not source.is_relative_to(self._root):
            return True
        # A given test that a decorator of the agent's wraps; or a test that the agent wrote
        name = getattr(item, "originalname", None) or item.name
        return name in _functions_of(self._given[item.path])


def _function_of(item: pytest.Item) -> Any:
    return inspect.unwrap(getattr(item, "function", None) or item.runtest)


def _functions_of(source: bytes) -> Iterator[str]:
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
