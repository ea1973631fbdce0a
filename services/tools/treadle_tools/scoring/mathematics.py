"""The `math_equal` reward: math-verify reads both sides, sympy says whether they are equal."""

from collections.abc import Mapping
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from treadle_tools.tool import InvalidArguments, Outcome

ANSWER = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
EXPECTED = (LatexExtractionConfig(), ExprExtractionConfig())


def score(arguments: Mapping[str, Any]) -> Outcome:
    """1.0 or 0.0; see builtin_rewards.py for the arguments. The sandbox's wall clock bounds it, so no timeout here."""
    expected = arguments["expected"]
    wanted = [_expected(one) for one in ([expected] if isinstance(expected, str) else expected)]
    answer = parse(arguments["answer"], ANSWER, parsing_timeout=None)
    right = any(verify(one, answer, timeout_seconds=None) for one in wanted)
    return Outcome(output=str(answer[0]) if answer else "", reward=float(right))


def _expected(text: str) -> list[Any]:
    # A bare LaTeX formula is read as one only between dollars.
    read: list[Any] = parse(text, EXPECTED, parsing_timeout=None) or parse(f"${text}$", EXPECTED, parsing_timeout=None)
    if not read:
        raise InvalidArguments("expected", f"is no mathematical expression: {text[:80]!r}")
    return read
