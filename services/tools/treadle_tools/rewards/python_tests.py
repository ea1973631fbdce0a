"""The `python_tests` reward: pytest over the agent's files, as parallel as the action has cores (pytest-xdist).

The agent's code runs in the same process as the tests, as it does everywhere pytest is used: code that sets out to fake
a result can. `expected_tests` bounds what is gained by leaving tests out.
"""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from treadle_tools.tool import InvalidArguments, Outcome, Status

WORK = Path("/tmp/work")
REPORT = Path("/tmp/report.xml")
NOT_RUN = {3: "had an error of its own", 4: "was called wrongly", 5: "found no tests"}  # its exit codes
CORES_VARIABLE = "TREADLE_CORES"  # of this action, where an elastic scheduler says


def score(arguments: Mapping[str, Any]) -> Outcome:
    """Passed over all, or 1.0 and 0.0; see builtin.py for the arguments."""
    _write("files", arguments["files"])
    _write("tests", arguments["tests"])
    run = subprocess.run(
        _command(list(arguments["tests"]), int(os.environ.get(CORES_VARIABLE, "1"))),
        cwd=WORK,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = run.stdout.decode(errors="backslashreplace")
    if run.returncode in NOT_RUN:
        return Outcome(output=output, status=Status.TOOL_ERROR, error=f"pytest {NOT_RUN[run.returncode]}")
    passed, ran = _counted()
    total = max(ran, int(arguments.get("expected_tests", 0)), 1)
    share = passed / total
    reward = float(passed == total) if arguments.get("all_or_nothing", False) else share
    return Outcome(output=output, reward=reward, data={"passed": passed, "tests": total})


def _command(tests: list[str], cores: int) -> list[str]:
    # -P: a file of the agent called pytest.py is not what runs.
    command = [sys.executable, "-P", "-s", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={REPORT}"]
    command += ["-o", "pythonpath=."]
    if cores > 1:
        command += ["-n", str(cores)]
    # Not those that only hold what the tests import.
    return command + [path for path in tests if PurePosixPath(path).name.startswith("test_")]


def _write(name: str, files: Mapping[str, str]) -> None:
    for path, content in files.items():
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts:
            raise InvalidArguments(f"{name}.{path}", "must be a path below the work folder")
        target = WORK.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        target.write_text(content)


def _counted() -> tuple[int, int]:
    """(passed, all) of pytest's report; a failed collection counts as one test. A skipped one has not passed."""
    try:
        suites = ElementTree.parse(REPORT).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):
        return 0, 0
    passed = ran = 0
    for suite in suites:
        count = _number(suite, "tests")
        ran += count
        passed += max(0, count - sum(_number(suite, kind) for kind in ("failures", "errors", "skipped")))
    return passed, ran


def _number(suite: ElementTree.Element, name: str) -> int:
    """A count of the report, which the agent's code can have written: decimal digits, few of them, else 0."""
    text = suite.get(name, "0")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
