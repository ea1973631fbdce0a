"""The tools that come with the service. Written as a user's own module would be: a list called TOOLS."""

from treadle_tools.tool import MIB, Kind, Limits, Tool

LARGEST_SEED = 2**32 - 1  # numpy's generators take no more
LARGEST_INDEX = 9999

SEED = {"type": "integer", "minimum": 0, "maximum": LARGEST_SEED}

PYTHON = Tool(
    name="python",
    kind=Kind.STATELESS,
    description="Runs Python: what it prints, then the value of the last expression. Nothing is kept between calls.",
    entry="treadle_tools.sandbox.inside.snippet:run_tool",
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
