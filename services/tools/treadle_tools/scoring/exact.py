"""The `exact_match` reward."""

from collections.abc import Mapping
from typing import Any

from treadle_tools.tool import Outcome


def score(arguments: Mapping[str, Any]) -> Outcome:
    """1.0 or 0.0; see builtin_rewards.py for the arguments."""
    expected = arguments["expected"]
    wanted = {_normal(one, arguments) for one in ([expected] if isinstance(expected, str) else expected)}
    return Outcome(reward=float(_normal(arguments["answer"], arguments) in wanted))


def _normal(text: str, arguments: Mapping[str, Any]) -> str:
    if arguments.get("ignore_spaces", True):
        text = " ".join(text.split())
    return text.casefold() if arguments.get("ignore_case", False) else text
