"""The tools and rewards that come with the service, declared as in a user's own module."""

from treadle_tools.tool import MIB, Kind, Limits, Scaling, Tool

LARGEST_SEED = 2**32 - 1  # numpy's generators take no more
LARGEST_INDEX = 9999

SEED = {"type": "integer", "minimum": 0, "maximum": LARGEST_SEED}

PYTHON = Tool(
    name="python",
    kind=Kind.STATELESS,
    description="Runs Python: what it prints, then the value of the last expression. Nothing is kept between calls.",
    entry="treadle_tools.sandbox.inside.program:run_snippet",
    arguments_schema={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python source"}},
        "required": ["code"],
        "additionalProperties": False,
    },
)

FROZEN_LAKE = Tool(
    name="frozen_lake",
    kind=Kind.ENVIRONMENT,
    description="FrozenLake-v1 of gymnasium on a random map that can be solved: reach the goal around the holes.",
    entry="treadle_tools.environments.frozen_lake:FrozenLake",
    open_schema={
        "type": "object",
        "properties": {
            "seed": {**SEED, "default": 0, "description": "of the map and the slips"},
            "size": {"enum": [4, 8], "default": 4},
            "slippery": {"type": "boolean", "default": False},
        },
        "additionalProperties": False,
    },
    arguments_schema={
        "type": "object",
        "properties": {"action": {"enum": ["left", "down", "right", "up"]}},
        "required": ["action"],
        "additionalProperties": False,
    },
    limits=Limits(output_bytes=16 * 1024),
    reserve_bytes=16 * MIB,  # of which it takes a half
)

REASONING_GYM = Tool(
    name="reasoning_gym",
    kind=Kind.ENVIRONMENT,
    description="One question of a reasoning-gym task: run Python with `code` as often as needed, then `answer` once.",
    entry="treadle_tools.environments.reasoning:ReasoningTask",
    open_schema={
        "type": "object",
        "properties": {
            "task": {"type": "string", "minLength": 1, "description": "a dataset of reasoning-gym, e.g. leg_counting"},
            "seed": {**SEED, "default": 0},
            "index": {"type": "integer", "minimum": 0, "maximum": LARGEST_INDEX, "default": 0},
        },
        "required": ["task"],
        "additionalProperties": False,
    },
    arguments_schema={
        "type": "object",
        "properties": {
            "answer": {"type": "string", "description": "the final answer; ends the task"},
            "code": {"type": "string", "description": "Python source; files in /tmp stay until the task ends"},
        },
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": False,
    },
    limits=Limits(memory_bytes=1024 * MIB),
    reserve_bytes=32 * MIB,
)

TOOLS = (PYTHON, FROZEN_LAKE, REASONING_GYM)


TEXT = {"type": "string"}
EXPECTED = {
    "anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}],
    "description": "the right answer, or several of which any will do",
}

EXACT_MATCH = Tool(
    name="exact_match",
    kind=Kind.REWARD,
    description="1 where the answer is an expected one, letter by letter, else 0.",
    entry="treadle_tools.scoring.answers:exact_match",
    arguments_schema={
        "type": "object",
        "properties": {
            "answer": TEXT,
            "expected": EXPECTED,
            "ignore_case": {"type": "boolean", "default": False},
            "ignore_spaces": {"type": "boolean", "default": True, "description": "at the ends, and how many within"},
        },
        "required": ["answer", "expected"],
        "additionalProperties": False,
    },
)

MATH_EQUAL = Tool(
    name="math_equal",
    kind=Kind.REWARD,
    description="1 where the answer's last mathematical expression (LaTeX or plain) equals an expected one, else 0.",
    entry="treadle_tools.scoring.answers:math_equal",
    preload=("math_verify",),
    arguments_schema={
        "type": "object",
        "properties": {"answer": TEXT, "expected": EXPECTED},
        "required": ["answer", "expected"],
        "additionalProperties": False,
    },
    limits=Limits(wall_s=20.0),
)

PYTHON_TESTS = Tool(
    name="python_tests",
    kind=Kind.REWARD,
    description="The share of pytest tests that the files pass; with `all_or_nothing` 1 where all pass, else 0.",
    entry="treadle_tools.scoring.python_tests:score",
    arguments_schema={
        "type": "object",
        "properties": {
            "files": {
                "type": "object",
                "additionalProperties": TEXT,
                "minProperties": 1,
                "description": "path relative to the work folder: content; the agent's code",
            },
            "tests": {
                "type": "object",
                "additionalProperties": TEXT,
                "minProperties": 1,
                "description": "the same, of the tests; written last, so that no file of the agent replaces them",
            },
            "expected_tests": {"type": "integer", "minimum": 1, "description": "how many there are; missing ones fail"},
            "all_or_nothing": {"type": "boolean", "default": False},
        },
        "required": ["files", "tests"],
        "additionalProperties": False,
    },
    limits=Limits(cpu_cores=32, memory_bytes=4096 * MIB, wall_s=300.0),
    processes=256,
    # Collecting the tests and starting the workers of pytest-xdist takes about as long as a few tests.
    scaling=Scaling(cores=(1, 2, 4, 8, 16, 32), serial_share=0.2),
)

REWARDS = (EXACT_MATCH, MATH_EQUAL, PYTHON_TESTS)
