"""The tools and rewards that come with the service, declared as in a user's own module."""

from collections.abc import Mapping
from typing import Any

from treadle_tools.tool import MIB, Kind, Limits, Scaling, Tool

LARGEST_SEED = 2**32 - 1  # numpy's generators take no more
LARGEST_INDEX = 9999

SEED = {"type": "integer", "minimum": 0, "maximum": LARGEST_SEED}
TEXT = {"type": "string"}
SHARE = (0.0, 1.0)


def _object(properties: Mapping[str, Any], *required: str, **more: int) -> dict[str, Any]:
    """The schema of arguments that are these properties and no others."""
    schema = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    return {**schema, "required": list(required)} if required else schema


PYTHON = Tool(
    name="python",
    kind=Kind.STATELESS,
    description="Runs Python: what it prints, then the value of the last expression. Nothing is kept between calls.",
    entry="treadle_tools.sandbox.inside.program:run_snippet",
    arguments_schema=_object({"code": {**TEXT, "description": "Python source"}}, "code"),
    runs_code=True,
)

FROZEN_LAKE = Tool(
    name="frozen_lake",
    kind=Kind.ENVIRONMENT,
    description="FrozenLake-v1 of gymnasium on a random map that can be solved: reach the goal around the holes.",
    entry="treadle_tools.builtin.frozen_lake:FrozenLake",
    open_schema=_object(
        {
            "seed": {**SEED, "default": 0, "description": "of the map and the slips"},
            "size": {"enum": [4, 8], "default": 4},
            "slippery": {"type": "boolean", "default": False},
        }
    ),
    arguments_schema=_object({"action": {"enum": ["left", "down", "right", "up"]}}, "action"),
    limits=Limits(output_bytes=16 * 1024),
    reward_range=SHARE,
    reserve_bytes=16 * MIB,  # of which it takes a half
)

REASONING_GYM = Tool(
    name="reasoning_gym",
    kind=Kind.ENVIRONMENT,
    description="One question of a reasoning-gym task: run Python with `code` as often as needed, then `answer` once.",
    entry="treadle_tools.builtin.reasoning:ReasoningTask",
    open_schema=_object(
        {
            "task": {**TEXT, "minLength": 1, "description": "a dataset of reasoning-gym, e.g. leg_counting"},
            "seed": {**SEED, "default": 0},
            "index": {"type": "integer", "minimum": 0, "maximum": LARGEST_INDEX, "default": 0},
        },
        "task",
    ),
    arguments_schema=_object(
        {
            "answer": {**TEXT, "description": "the final answer; ends the task"},
            "code": {**TEXT, "description": "Python source; files in /tmp stay until the task ends"},
        },
        minProperties=1,
        maxProperties=1,
    ),
    limits=Limits(memory_bytes=1024 * MIB),
    reward_range=SHARE,
    reserve_bytes=32 * MIB,
)

TOOLS = (PYTHON, FROZEN_LAKE, REASONING_GYM)

EXPECTED = {
    "anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}],
    "description": "the right answer, or several of which any will do",
}

FILES = {"type": "object", "additionalProperties": TEXT, "minProperties": 1}

EXACT_MATCH = Tool(
    name="exact_match",
    kind=Kind.REWARD,
    description="1 where the answer is an expected one, letter by letter, else 0.",
    entry="treadle_tools.rewards.answers:exact_match",
    arguments_schema=_object(
        {
            "answer": TEXT,
            "expected": EXPECTED,
            "ignore_case": {"type": "boolean", "default": False},
            "ignore_spaces": {"type": "boolean", "default": True, "description": "at the ends, and how many within"},
        },
        "answer",
        "expected",
    ),
    reward_range=SHARE,
)

MATH_EQUAL = Tool(
    name="math_equal",
    kind=Kind.REWARD,
    description="1 where the answer's last mathematical expression (LaTeX or plain) equals an expected one, else 0.",
    entry="treadle_tools.rewards.answers:math_equal",
    preload=("math_verify",),
    arguments_schema=_object({"answer": TEXT, "expected": EXPECTED}, "answer", "expected"),
    limits=Limits(wall_s=20.0),
    reward_range=SHARE,
)

PYTHON_TESTS = Tool(
    name="python_tests",
    kind=Kind.REWARD,
    description="The share of pytest tests that the files pass; with `all_or_nothing` 1 where all pass, else 0.",
    entry="treadle_tools.rewards.python_tests:score",
    arguments_schema=_object(
        {
            "files": {**FILES, "description": "path relative to the work folder: content; the agent's code"},
            "tests": {
                **FILES,
                "description": "the same, of the tests; written last, so that no file of the agent replaces them",
            },
            "expected_tests": {"type": "integer", "minimum": 1, "description": "how many there are; missing ones fail"},
            "all_or_nothing": {"type": "boolean", "default": False},
        },
        "files",
        "tests",
    ),
    limits=Limits(cpu_cores=32, memory_bytes=4096 * MIB, wall_s=300.0),
    reward_range=SHARE,
    processes=256,
    # Collecting the tests and starting the workers of pytest-xdist takes about as long as a few tests.
    scaling=Scaling(cores=(1, 2, 4, 8, 16, 32), serial_share=0.2),
)

REWARDS = (EXACT_MATCH, MATH_EQUAL, PYTHON_TESTS)
