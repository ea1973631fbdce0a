"""The rewards that compare an answer with expected ones: `exact_match` and `math_equal`.

Their arguments are described in builtin.py. Both score 1.0 or 0.0.
"""

from collections.abc import Mapping
from typing import Any

from treadle_tools.tool import InvalidArguments, Outcome


def exact_match(arguments: Mapping[str, Any]) -> Outcome:
    """Compare letter by letter."""
    expected = {_normal(one, arguments) for one in _expected(arguments)}
    return Outcome(reward=float(_normal(arguments["answer"], arguments) in expected))


def math_equal(arguments: Mapping[str, Any]) -> Outcome:
    """Read both sides with math-verify; sympy says whether they are equal. The sandbox's wall clock bounds it."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # slow: see the tool's `preload`

    formats = (LatexExtractionConfig(), ExprExtractionConfig())
    expected = []
    for text in _expected(arguments):
        # A bare LaTeX formula is read as one only between dollars.
        found = parse(text, formats, parsing_timeout=None) or parse(f"${text}$", formats, parsing_timeout=None)
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
