"""The rewards that come with the service. Written as a user's own module would be: tools of kind REWARD."""

from treadle_tools.tool import MIB, Kind, Limits, Scaling, Tool

TEXT = {"type": "string"}
EXPECTED = {
    "anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}],
    "description": "the right answer, or several of which any will do",
}

EXACT_MATCH = Tool(
    name="exact_match",
    kind=Kind.REWARD,
    description="1 where the answer is an expected one, letter by letter, else 0.",
    entry="treadle_tools.scoring.exact:score",
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
    entry="treadle_tools.scoring.mathematics:score",
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
