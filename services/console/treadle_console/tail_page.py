"""Answer the interactive page on long tails: play a rollout of given lengths, with a cap and with
more samples or without.

The core (`treadle_core.rollouts.tail`) computes the answer, for a seed that the page names, so that
two answers differ by what the user changed and not by chance.
"""

import math
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from treadle_core.rollouts.redundancy import LatencyCurve
from treadle_core.rollouts.tail import (
    Tail,
    TailQuestion,
    expected_longest,
    longest_by_formula,
    play_tail,
)

MOST_SAMPLES = 4_096  # most samples of all prompts: what a page draws, and a millisecond of work


class Asked(BaseModel):
    """Question that a page sends. oversample: samples that are started, over those that are
    trained. base_s, per_sequence_s: seconds of a decode step, and more for each sample in it."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompts: int = Field(8, ge=1, le=256)
    samples: int = Field(16, ge=1, le=256)
    mean_tokens: float = Field(800.0, ge=1, le=1e6)
    variation: float = Field(1.0, ge=0.01, le=5)
    cap_percentile: float = Field(1.0, gt=0.5, le=1)
    oversample: float = Field(1.0, ge=1, le=4)
    base_s: float = Field(0.012, ge=1e-5, le=1)
    per_sequence_s: float = Field(0.0002, ge=0, le=0.1)
    seed: int = Field(0, ge=0, le=2**32 - 1)


class QuestionError(Exception):
    """A question that has no answer; the message names the field and what would be right."""


def answer(words: dict[str, str]) -> dict[str, Any]:
    """Return the answer to a question. Raises QuestionError."""
    try:
        asked = Asked.model_validate(words)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise QuestionError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    started = math.ceil(round(asked.samples * asked.oversample, 9))
    if asked.prompts * started > MOST_SAMPLES:
        raise QuestionError(
            f"prompts: {asked.prompts} of {started} samples are more than {MOST_SAMPLES} together"
        )
    curve = LatencyCurve(
        (1.0, 2.0), (asked.base_s + asked.per_sequence_s, asked.base_s + 2.0 * asked.per_sequence_s)
    )
    normals = np.random.default_rng(asked.seed).standard_normal((asked.prompts, started))
    lengths = (asked.mean_tokens, asked.variation)
    patched = TailQuestion(
        asked.prompts, started, asked.samples, *lengths, asked.cap_percentile, curve
    )
    plain = TailQuestion(asked.prompts, asked.samples, asked.samples, *lengths, 1.0, curve)
    return {
        "asked": asked.model_dump(),
        "cap_tokens": None if math.isinf(patched.cap_tokens) else round(patched.cap_tokens),
        "patched": _view(play_tail(patched, normals)),
        "plain": _view(play_tail(plain, normals[:, : asked.samples])),
        "formula": longest_by_formula(asked.samples, asked.variation),
        "expected": expected_longest(asked.samples, asked.variation),
    }


def _view(tail: Tail) -> dict[str, Any]:
    return {
        "ends_s": np.round(tail.ends_s, 3).tolist(),
        "how": (tail.aborted + 2 * tail.cut).tolist(),  # 0 trained, 1 aborted, 2 cut at the cap
        "makespan_s": tail.makespan_s,
        "tax": tail.tax,
        "last_tenth": tail.last_tenth,
        "utilization": tail.utilization,
        "tokens": round(float(tail.tokens.sum())),
        "kept": tail.kept._asdict(),
    }
