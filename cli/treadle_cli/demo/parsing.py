"""What a small model's words mean as an action. Forgiving. Pure."""

import re
from dataclasses import dataclass
from typing import Literal

DIRECTIONS = ("left", "down", "right", "up")

_DIRECTION = re.compile(rf"\b({'|'.join(DIRECTIONS)})\b", re.IGNORECASE)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"answer\s*(?:is|:|=)\s*\**\s*([^\n*]+)", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_MARKUP = " \t*`$\"'"


@dataclass(frozen=True)
class PuzzleMove:
    """Python to run, or an answer to be scored."""

    kind: Literal["code", "answer"]
    text: str


def direction(text: str) -> str | None:
    """The first direction named, in lower case; None where there is none. What follows is the model's excuse."""
    found = _DIRECTION.search(text)
    return found.group(1).lower() if found else None


def puzzle_move(text: str) -> PuzzleMove | None:
    """Whichever comes first of a fenced block of Python (closed or cut off) and "answer: ..." or \\boxed{...}; else
    None.
    """
    blocks = [(match.start(), match.group(1).rstrip()) for match in _FENCE.finditer(text)]
    moves = [(start, PuzzleMove("code", code)) for start, code in blocks if code]
    # An "answer:" inside a block of code is a string or a comment, not the answer.
    prose = _FENCE.sub(lambda match: " " * len(match.group(0)), text)
    for pattern in (_ANSWER, _BOXED):
        for match in pattern.finditer(prose):
            answer = match.group(1).strip(_MARKUP).rstrip(".").strip(_MARKUP)
            if answer:
                moves.append((match.start(), PuzzleMove("answer", answer)))
    return min(moves, key=lambda move: move[0])[1] if moves else None


def last_words(text: str) -> str:
    """What to score when the turns are used up and no answer was marked: the last line that says anything."""
    lines = [line.strip(_MARKUP) for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")
