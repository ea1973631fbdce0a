"""Score trajectories by the functions that come with the service: `exact_match` and `math_equal`
compare an answer with expected ones, `python_tests` runs pytest over the agent's files.

A function that is added here declares a `Tool` of kind REWARD, whose `entry` names it, and stands
in REWARDS. The service reads what they declare; the sandbox runs them.

`python_tests` runs on all cores of the action (pytest-xdist). The agent's code runs in the same
process as the tests, as it does everywhere pytest is used: code that tries to fake a result can.
`expected_tests` bounds what an agent gains by leaving tests out.
"""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from treadle_tools.tool import (
    MIB,
    TEXT,
    InvalidArguments,
    Kind,
    Limits,
    Outcome,
    Scaling,
    Status,
    Tool,
    object_schema,
)

EXPECTED = {
    "anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}],
    "description": "the right answer, or several of which any will do",
}

EXACT_MATCH = Tool(
    name="exact_match",
    kind=Kind.REWARD,
    description="1 where the answer is an expected one, letter by letter, else 0.",
    entry="treadle_tools.rewards.builtin:exact_match",
    arguments_schema=object_schema(
        {
            "answer": TEXT,
            "expected": EXPECTED,
            "ignore_case": {"type": "boolean", "default": False},
            "ignore_spaces": {
                "type": "boolean",
                "default": True,
                "description": "at the ends, and how many within",
            },
        },
        "answer",
        "expected",
    ),
    reward_range=(0.0, 1.0),
)

MATH_EQUAL = Tool(
    name="math_equal",
    kind=Kind.REWARD,
    description="1 where the answer's last mathematical expression (LaTeX or plain) equals an "
    "expected one, else 0.",
    entry="treadle_tools.rewards.builtin:math_equal",
    preload=("math_verify",),
    arguments_schema=object_schema({"answer": TEXT, "expected": EXPECTED}, "answer", "expected"),
    limits=Limits(wall_s=20.0),
    reward_range=(0.0, 1.0),
)

FILES = {"type": "object", "additionalProperties": TEXT, "minProperties": 1}

PYTHON_TESTS = Tool(
    name="python_tests",
    kind=Kind.REWARD,
    description="The share of pytest tests that the files pass; with `all_or_nothing` 1 where all "
    "pass, else 0.",
    entry="treadle_tools.rewards.builtin:python_tests",
    arguments_schema=object_schema(
        {
            "files": {
                **FILES,
                "description": "path relative to the work folder: content; the agent's code",
            },
            "tests": {
                **FILES,
                "description": "the same, of the tests; written last, so that no file of the "
                "agent replaces them",
            },
            "expected_tests": {
                "type": "integer",
                "minimum": 1,
                "description": "how many there are; missing ones fail",
            },
            "all_or_nothing": {"type": "boolean", "default": False},
        },
        "files",
        "tests",
    ),
    limits=Limits(cpu_cores=32, memory_bytes=4096 * MIB, wall_s=300.0),
    reward_range=(0.0, 1.0),
    processes=256,
    # Collecting the tests and starting the workers of pytest-xdist takes about as long as a few
    # tests.
    scaling=Scaling(cores=(1, 2, 4, 8, 16, 32), serial_share=0.2),
)

REWARDS = (EXACT_MATCH, MATH_EQUAL, PYTHON_TESTS)

WORK = Path("/tmp/work")
REPORT = Path("/tmp/report.xml")
# Exit codes of pytest.
NOT_RUN = {3: "had an error of its own", 4: "was called wrongly", 5: "found no tests"}
CORES_VARIABLE = "TREADLE_CORES"  # how many cores this action has


def exact_match(arguments: Mapping[str, Any]) -> Outcome:
    """Score 1.0 where the answer equals an expected one letter by letter, else 0.0."""
    expected = {_normal(one, arguments) for one in _expected(arguments)}
    return Outcome(reward=float(_normal(arguments["answer"], arguments) in expected))


def math_equal(arguments: Mapping[str, Any]) -> Outcome:
    """Score 1.0 where the answer's last mathematical expression equals an expected one, else 0.0.

    math-verify reads both sides, and sympy decides. The sandbox's wall clock bounds how long that
    takes.
    """
    # The import is slow: see `preload` of MATH_EQUAL.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    formats = (LatexExtractionConfig(), ExprExtractionConfig())
    expected = []
    for text in _expected(arguments):
        # A bare LaTeX formula is read as one only between dollars.
        found = parse(text, formats, parsing_timeout=None) or parse(
            f"${text}$", formats, parsing_timeout=None
        )
        if not found:
            raise InvalidArguments("expected", f"is no mathematical expression: {text[:80]!r}")
        expected.append(found)
    formats = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    answer = parse(arguments["answer"], formats, parsing_timeout=None)
    right = any(verify(one, answer, timeout_seconds=None) for one in expected)
    return Outcome(output=str(answer[0]) if answer else "", reward=float(right))


def _expected(arguments: Mapping[str, Any]) -> list[str]:
    expected = arguments["expected"]
    return [expected] if isinstance(expected, str) else expected


def _normal(text: str, arguments: Mapping[str, Any]) -> str:
    if arguments.get("ignore_spaces", True):
        text = " ".join(text.split())
    return text.casefold() if arguments.get("ignore_case", False) else text


def python_tests(arguments: Mapping[str, Any]) -> Outcome:
    """Score the share of tests that pass; with `all_or_nothing` 1.0 where all pass, else 0.0."""
    _write("files", arguments["files"])
    _write("tests", arguments["tests"])
    run = subprocess.run(
        _command(list(arguments["tests"]), int(os.environ.get(CORES_VARIABLE, "1"))),
        cwd=WORK,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output = run.stdout.decode(errors="backslashreplace")
    if run.returncode in NOT_RUN:
        return Outcome(
            output=output, status=Status.TOOL_ERROR, error=f"pytest {NOT_RUN[run.returncode]}"
        )
    passed, ran = _counted()
    total = max(ran, int(arguments.get("expected_tests", 0)), 1)
    share = passed / total
    reward = float(passed == total) if arguments.get("all_or_nothing", False) else share
    return Outcome(output=output, reward=reward, data={"passed": passed, "tests": total})


def _command(tests: list[str], cores: int) -> list[str]:
    # -P: a file of the agent called pytest.py is not what runs.
    command = [
        sys.executable,
        "-P",
        "-s",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={REPORT}",
    ]
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
    """Return how many tests of pytest's report passed, and how many there are.

    A failed collection counts as one test. A skipped test has not passed.
    """
    try:
        suites = ElementTree.parse(REPORT).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):
        return 0, 0
    passed = ran = 0
    for suite in suites:
        count = _number(suite, "tests")
        ran += count
        passed += max(
            0, count - sum(_number(suite, kind) for kind in ("failures", "errors", "skipped"))
        )
    return passed, ran


def _number(suite: ElementTree.Element, name: str) -> int:
    """Return a count of the report; 0 for anything but a short decimal number, as the agent's code
    can have written it."""
    text = suite.get(name, "0")
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else 0
