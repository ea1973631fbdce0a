"""Compute rewards. This file declares the functions that come with the service: `exact_match` and
`math_equal` compare an answer with expected ones, `python_tests` runs pytest over an agent's files.

A function that is added here declares a `Tool` of kind REWARD, whose `entry` names it, and stands
in REWARDS. The service reads what they declare; the sandbox runs them, and alone imports the
modules that an `entry` names.
"""

import re
from collections.abc import Mapping
from typing import Any

from treadle_tools.tool import (
    MIB,
    TEXT,
    InvalidArguments,
    Kind,
    Limits,
    Outcome,
    Scaling,
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
    entry="treadle_tools.rewards:exact_match",
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
    description="1 where the final answer (the last \\boxed, `#### 42`, or a formula, LaTeX or "
    "plain) equals an expected one, else 0.",
    entry="treadle_tools.rewards.mathematics:math_equal",
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
    entry="treadle_tools.rewards.python_tests:python_tests",
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
    stopped_reward=0.0,  # the agent's code can kill or starve the process that scores it
    processes=256,
    # Collecting the tests and starting the workers of pytest-xdist takes about as long as a few
    # tests.
    scaling=Scaling(cores=(1, 2, 4, 8, 16, 32), serial_share=0.2),
)

REASONING = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
END_OF_REASONING = re.compile(r"</think>\s*")

REWARDS = (EXACT_MATCH, MATH_EQUAL, PYTHON_TESTS)


def exact_match(arguments: Mapping[str, Any]) -> Outcome:
    """Score 1.0 where the answer equals an expected one letter by letter, else 0.0."""
    expected = {_normal(one, arguments) for one in expected_of(arguments)}
    answer = _normal(remove_reasoning(arguments["answer"]), arguments)
    return Outcome(reward=float(answer in expected))


def expected_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return the expected answers of `exact_match` and `math_equal`, each of which will do.

    Raises InvalidArguments where one is empty.
    """
    expected = arguments["expected"]
    expected = [expected] if isinstance(expected, str) else expected
    if not all(text.strip() for text in expected):
        raise InvalidArguments("expected", "is empty: give the right answer")
    return expected


def remove_reasoning(text: str) -> str:
    """Return a model's text without its reasoning: what stands between <think> and </think>, before
    a </think> whose <think> the chat template has written, or behind a <think> that does not
    end."""
    return END_OF_REASONING.split(REASONING.sub("", text))[-1]


def _normal(text: str, arguments: Mapping[str, Any]) -> str:
    if arguments.get("ignore_spaces", True):
        text = " ".join(text.split())
    return text.casefold() if arguments.get("ignore_case", False) else text
