"""Find in a text the words that an environment takes as an action."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

A = TypeVar("A")
ReadAction = Callable[[str], Any]  # of a reply's text; None where it names no action

# Neither pattern reads a text twice, which a policy may repeat without end.
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
# Reasoning has no <think> where the chat template has written it.
_REASONING = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)


def first_of(actions: Mapping[str, A]) -> Callable[[str], A | None]:
    """Make a function that finds the first word of a text that names an action, in upper or lower
    case.

    Text within <think>, or before a </think> without a beginning, does not count. Raises ValueError
    where there are no actions.
    """
    if not actions:
        raise ValueError("actions must have a word at least, such as {'left': 0}")
    longest_first = sorted(actions.items(), key=lambda item: len(item[0]), reverse=True)
    words = "|".join(f"({re.escape(word)})" for word, _ in longest_first)
    pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)

    def read(text: str) -> A | None:
        found = pattern.search(_REASONING.sub(" ", text))
        return longest_first[found.lastindex - 1][1] if found and found.lastindex else None

    return read


def answer_of(text: str) -> str:
    """Return the text of the last <answer>, or else all of the text after its reasoning."""
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else _REASONING.sub("", text)).strip()
