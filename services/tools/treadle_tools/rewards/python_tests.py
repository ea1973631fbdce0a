"""Score an agent's files by the share of the given pytest tests that they pass.

Exactly the given tests run and count. The agent's files that would choose or count tests are not
written (`_chooses_tests`), nor those that cannot be; pytest reads the configuration of the tests
alone, and a test function of the agent's that a given file imports is left out.

Only the tests can leave a call without a score: where they cannot be read, or are none (looked at
before any file of the agent's is written). Whatever the agent's files do, they are scored: no value
that comes from them is trusted to have its type or size, and where their code ends this process or
holds it up, `Tool.stopped_reward` counts.

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
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any

import pytest

from treadle_tools.sandbox.inside import isolation
from treadle_tools.tool import InvalidArguments, Outcome, Status

WORK = Path("/tmp/work")
TESTS_S = 280.0  # within the wall clock of the reward; a test that has not ended then has failed
COLLECTION_S = 15.0  # also within it, before the tests
CORES_VARIABLE = "TREADLE_CORES"  # how many cores this action has
# For the plugin: the given files; the file of the results, in the main process.
GIVEN_VARIABLE, RESULTS_VARIABLE = "TREADLE_GIVEN_TESTS", "TREADLE_TEST_RESULTS"
MOST_OUTPUT_BYTES = 64 * 1024  # a byte takes up to six in the answer
MOST_LEFT_OUT, MOST_LINE_CHARS = 20, 200  # files of the agent's that the output names
NO_TESTS, USAGE_ERROR = pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR
IN_WORKER = "PYTEST_XDIST_WORKER"  # environment variable, which pytest-xdist sets in a worker

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
    # An interrupt of the agent's code ends this process, as every signal does
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    given: dict[PurePosixPath, str] = {}
    for name, text in arguments["tests"].items():
        if (path := _path(name)) is None:
            raise InvalidArguments(f"tests.{name}", "must be a path below the work folder")
        given[path] = text
    counts = {path: _count_tests(path, text) for path, text in given.items()}
    files = {path: count for path, count in counts.items() if count is not None}
    _write_given(given)
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as results:
        run = _Pytest(files, given, printed, results)
        if (refusal := run.refuse()) is not None:
            return refusal
        left_out = _write_agents(arguments["files"], given)
        returncode = run.run(TESTS_S)
        output, tests = left_out + run.output(), _results(results)
    if returncode == USAGE_ERROR and not run.has_conftest:
        return _wrong_call(output)
    missing = sum(
        count
        for path, count in files.items()
        if count and not any(test.split("::")[0] == str(path) for test in tests)
    )
    # At least one: the tests alone have some, or need the agent's files to
    total = max(len(tests) + missing, int(arguments.get("expected_tests", 1)))
    passed = sum(tests.values())
    share = passed / total
    reward = float(passed == total) if arguments.get("all_or_nothing", False) else share
    return Outcome(output=output, reward=reward, data={"passed": passed, "tests": total})


def _path(name: str) -> PurePosixPath | None:
    """Return a path below the work folder; None where the name is of another place."""
    pure = PurePosixPath(name)
    return None if not pure.parts or name.startswith("/") or ".." in pure.parts else pure


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
            one == path
            or one.with_suffix("") in path.parents
            or one in path.parents
            or path in one.parents
            for one in given
        )
    )


def _write_given(files: Mapping[PurePosixPath, str]) -> None:
    WORK.mkdir(exist_ok=True)
    for path, text in files.items():
        try:
            _write(path, text.encode())
        except (OSError, ValueError, RecursionError) as error:
            why = f"cannot be written: {error}"
            raise InvalidArguments(f"tests.{path}", why) from None


def _write_agents(files: Mapping[str, str], given: Iterable[PurePosixPath]) -> str:
    """Write the agent's files beside the given ones; return a line for each that cannot be."""
    left_out = []
    for name, text in files.items():
        if (path := _path(name)) is None:
            left_out.append(f"{name!r}: is not below the work folder")
        elif not _chooses_tests(path, given):
            try:
                _write(path, text.encode("utf-8", "surrogatepass"))
            except (OSError, ValueError, RecursionError) as error:
                left_out.append(f"{name!r}: {error}")
    lines = [f"left out: {line[:MOST_LINE_CHARS]}\n" for line in left_out[:MOST_LEFT_OUT]]
    if len(left_out) > len(lines):
        lines.append(f"left out: {len(left_out) - len(lines)} more files\n")
    return "".join(lines)


def _write(path: PurePosixPath, content: bytes) -> None:
    (WORK / path).parent.mkdir(parents=True, exist_ok=True)
    (WORK / path).write_bytes(content)


def _count_tests(path: PurePosixPath, source: str) -> int | None:
    """Return how many test functions a given file writes down; None of a file without tests, by
    its name and what is in it. Raises InvalidArguments for a test file that is no Python."""
    if path.suffix != ".py" or path.name == "__init__.py":
        return None
    stem = path.stem
    named = stem.startswith("test_") or stem.endswith("_test") or stem in ("test", "tests")
    try:
        count = _count_functions(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if not named and path.name != CONFTEST:
            return None
        raise InvalidArguments(f"tests.{path}", f"cannot be parsed: {error}") from None
    return count if path.name != CONFTEST and (named or count) else None


def _count_functions(body: list[ast.stmt]) -> int:
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


class _Pytest:
    """Runs pytest over the given tests.

    files: given files with tests, and how many test functions each writes down. printed, results:
    open files without a name, so that nothing in the work folder is read afterwards.
    """

    def __init__(
        self,
        files: Mapping[PurePosixPath, int],
        given: Collection[PurePosixPath],
        printed: IO[bytes],
        results: IO[bytes],
    ) -> None:
        self.has_conftest = any(path.name == CONFTEST for path in given)
        self._files, self._given = files, given
        self._printed, self._results = printed, results

    def refuse(self) -> Outcome | None:
        """Return why the tests alone are none, if that is so; call it before a file of the agent's
        is there. Tests that need such a file are some."""
        if any(self._files.values()):
            return None
        returncode = self.run(COLLECTION_S, "--collect-only") if self._files else NO_TESTS
        output = self.output()
        for file in (self._printed, self._results):
            file.seek(0)
            file.truncate()
        if returncode == USAGE_ERROR and not self.has_conftest:
            return _wrong_call(output)
        if returncode == NO_TESTS:
            error = "pytest found no tests"
            return Outcome(output=output, status=Status.TOOL_ERROR, error=error)
        return None

    def run(self, most_s: float, *flags: str) -> int | None:
        """Run pytest; return its exit code, None where it took too long."""
        # With flags it imports the tests itself, and they may need a given file
        paths = [*filter(None, sys.path), *([str(WORK)] if flags else [])]
        process = subprocess.Popen(
            [*self._command(), *flags],
            cwd=WORK,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "PYTHONSAFEPATH": "1",  # no pytest.py of the agent's, in workers too
                "PYTHONDONTWRITEBYTECODE": "1",
                GIVEN_VARIABLE: json.dumps([str(path) for path in self._given]),
                RESULTS_VARIABLE: str(self._results.fileno()),
            },
            pass_fds=[self._results.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(most_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):  # no worker is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def output(self) -> str:
        """Return what pytest and the tests have printed, cut."""
        self._printed.seek(0)
        return self._printed.read(MOST_OUTPUT_BYTES).decode(errors="backslashreplace")

    def _command(self) -> list[str]:
        named = (name for name in CONFIGURATIONS if PurePosixPath(name) in self._given)
        command = [sys.executable, "-P", "-s", "-m", "pytest", "-q"]
        command += ["-p", "no:cacheprovider", "-p", __name__]
        command += ["--rootdir", str(WORK), "--confcutdir", str(WORK)]
        command += ["-c", next(named, os.devnull)]
        command += ["-n", os.environ.get(CORES_VARIABLE, "1")]
        return command + [str(path) for path in self._files]


def _wrong_call(output: str) -> Outcome:
    """Return the outcome of tests whose configuration pytest refuses. No code of the agent's runs
    in the process that says so, unless a given conftest.py imports it."""
    return Outcome(output=output, status=Status.TOOL_ERROR, error="pytest was called wrongly")


def _results(file: IO[bytes]) -> dict[str, bool]:
    """Return which tests there are, and whether each has passed: once, in all its phases."""
    phases: dict[str, list[tuple[str, str]]] = defaultdict(list)
    file.seek(0)
    for line in file:
        try:
            message = json.loads(line)
        except ValueError:  # the disk was full
            continue
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
    """Let tests import from the work folder; not before pytest has loaded its own modules, and in
    the main process only where a given conftest.py may need it: modules that it imports later must
    not be the agent's."""
    early_config.stash[ORIGINALS] = _Originals(early_config)
    paths = map(PurePosixPath, json.loads(os.environ[GIVEN_VARIABLE]))
    if IN_WORKER in os.environ or any(path.name == CONFTEST for path in paths):
        sys.path.insert(0, str(early_config.rootpath))


def pytest_configure(config: pytest.Config) -> None:
    """Register what the main process does, or a worker."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_GivenTestsOnly(config), "given tests only")
    else:
        isolation.set_dumpable(False)  # so that no other process opens its files
        config.pluginmanager.register(_Main(config), "main process")


class _Main:
    """Gives workers the given files, and writes what they report: which tests there are, and each
    phase of one."""

    def __init__(self, config: pytest.Config) -> None:
        self._file = int(os.environ[RESULTS_VARIABLE])
        os.set_inheritable(self._file, False)
        # Read now: a worker that is started later finds what code of the agent's has made of them
        self._given = {
            path: (config.rootpath / path).read_bytes()
            for path in json.loads(os.environ[GIVEN_VARIABLE])
        }

    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[GIVEN_VARIABLE] = self._given

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._write({"collected": [str(test) for test in ids]})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Of any type, where code of the agent's sends it in the worker's place
        told = {"test": report.nodeid, "phase": report.when, "outcome": report.outcome}
        self._write({name: str(value) for name, value in told.items()})

    def _write(self, message: Mapping[str, Any]) -> None:
        os.write(self._file, json.dumps(message).encode() + b"\n")


class _GivenTestsOnly:
    """Runs the given tests in a worker: as they were given, by the original pytest, and none of the
    agent's."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._plugins = config.pluginmanager
        self._originals = config.stash[ORIGINALS]
        given: Mapping[str, bytes] = vars(config)["workerinput"][GIVEN_VARIABLE]
        self._given = {self._root / path: content for path, content in given.items()}
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
                # Also of /tmp, which the agent's code can write too
                is_agents = source not in self._given and source.is_relative_to(self._root.parent)
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
