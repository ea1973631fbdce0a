"""Declare the tools and environments that come with the service, as a user's own module does.

The sandbox alone imports the modules of this folder, because their libraries (extra `tools`) are
slow to import. The function of `python` is in `sandbox/inside/child.py`. Rewards have a folder of
their own.
"""

from treadle_tools.tool import MIB, TEXT, Kind, Limits, Tool, object_schema

LARGEST_SEED = 2**32 - 1  # numpy's generators take no more
LARGEST_INDEX = 9999

SEED = {"type": "integer", "minimum": 0, "maximum": LARGEST_SEED}
FROM_0_TO_1 = (0.0, 1.0)

PYTHON = Tool(
    name="python",
    kind=Kind.STATELESS,
    description="Runs Python: what it prints, then the value of the last expression. Nothing is "
    "kept between calls.",
    entry="treadle_tools.sandbox.inside.child:run_snippet",
    arguments_schema=object_schema({"code": {**TEXT, "description": "Python source"}}, "code"),
    runs_code=True,
)

FROZEN_LAKE = Tool(
    name="frozen_lake",
    kind=Kind.ENVIRONMENT,
    description="FrozenLake-v1 of gymnasium on a random map that can be solved: reach the goal "
    "around the holes.",
    entry="treadle_tools.builtin.frozen_lake:FrozenLake",
    open_schema=object_schema(
        {
            "seed": {**SEED, "default": 0, "description": "of the map and the slips"},
            "size": {"enum": [4, 8], "default": 4},
            "slippery": {"type": "boolean", "default": False},
        }
    ),
    arguments_schema=object_schema({"action": {"enum": ["left", "down", "right", "up"]}}, "action"),
    limits=Limits(output_bytes=16 * 1024),
    reward_range=FROM_0_TO_1,
    reserve_bytes=16 * MIB,  # of which it takes a half
)

REASONING_GYM = Tool(
    name="reasoning_gym",
    kind=Kind.ENVIRONMENT,
    description="One question of a reasoning-gym task: run Python with `code` as often as needed, "
    "then `answer` once.",
    entry="treadle_tools.builtin.reasoning:ReasoningTask",
    open_schema=object_schema(
        {
            "task": {
                **TEXT,
                "minLength": 1,
                "description": "a dataset of reasoning-gym, e.g. leg_counting",
            },
            "seed": {**SEED, "default": 0},
            "index": {"type": "integer", "minimum": 0, "maximum": LARGEST_INDEX, "default": 0},
        },
        "task",
    ),
    arguments_schema=object_schema(
        {
            "answer": {**TEXT, "description": "the final answer; ends the task"},
            "code": {
                **TEXT,
                "description": "Python source; files in /tmp stay until the task ends",
            },
        },
        minProperties=1,
        maxProperties=1,
    ),
    limits=Limits(memory_bytes=1024 * MIB),
    reward_range=FROM_0_TO_1,
    reserve_bytes=32 * MIB,
)

TOOLS = (PYTHON, FROZEN_LAKE, REASONING_GYM)
