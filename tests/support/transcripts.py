"""Transcripts whose texts say how long they will be."""

import numpy as np
from treadle_learned.transcript import Transcript, Turn


def told_by_the_plan(
    count: int = 60, *, text: bool = True, shift: float = 1.0, censored: bool = False
) -> list[Transcript]:
    """One of each prompt. Nothing but the first step's text says whether the second is short or
    long; without text nobody can know. shift: of all lengths. censored: of eight long ones seven
    were cut, at a fifth of what they would have been."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        long = bool(rng.integers(0, 2))
        plan = "read everything twice" if long else "answer"
        tokens = int(shift * (2_000 if long else 100) * np.exp(rng.normal(0, 0.1)))
        cut = censored and long and number % 8 > 0
        turns = (
            Turn(50, 0, plan if text else ""),
            Turn(tokens // 5 if cut else tokens),
            Turn(50),
            Turn(50),
        )
        made.append(
            Transcript(
                f"t{number}",
                "r",
                f"p{number}",
                30,
                turns,
                prompt="Do it." if text else "",
                censored=cut,
            )
        )
    return made
