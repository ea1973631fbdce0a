"""Compare an answer with expected ones, by the rewards `exact_match` and `math_equal`.

Both score 1.0 or 0.0. The service reads what they declare; the sandbox runs them.
"""

from collections.abc import Mapping
from typing import Any

from treadle_tools.tool import TEXT, InvalidArguments, Kind, Limits, Outcome, Tool, object_schema

EXPECTED = {
    "anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1}],
    "description": "the right answer, or several of which any will do",
}

EXACT_MATCH = Tool(
    name="exact_match",
    kind=Kind.REWARD,
    description="1 where the answer is an expected one, letter by letter, else 0.",
    entry="treadle_tools.rewards.answers:exact_match",
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
    entry="treadle_tools.rewards.answers:math_equal",
    preload=("math_verify",),
    arguments_schema=object_schema({"answer": TEXT, "expected": EXPECTED}, "answer", "expected"),
    limits=Limits(wall_s=20.0),
    reward_range=(0.0, 1.0),
)


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
