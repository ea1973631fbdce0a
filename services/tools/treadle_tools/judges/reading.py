"""Between a judge and a chat API: the question, and the score in an answer. Pure."""

import json
import math
import re
import string
from collections.abc import Mapping
from typing import Any

from treadle_tools.judges.judge import Judge

AGAIN_TEMPERATURE = 0.7  # asked again at 0 a model says the same


class NoScore(Exception):  # noqa: N818 - what the answer has, as callers speak of it
    """The answer has no score, or one out of range; the message says which."""


def question(judge: Judge, arguments: Mapping[str, Any], *, again: bool = False) -> dict[str, Any]:
    """The body of a request to /v1/chat/completions."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    parts = {"system": judge.system, "user": judge.prompt}
    return {
        "model": judge.model,
        "messages": [
            {"role": role, "content": string.Template(template).substitute(texts)}
            for role, template in parts.items()
            if template
        ],
        "temperature": max(judge.temperature, AGAIN_TEMPERATURE) if again else judge.temperature,
        "max_tokens": judge.max_tokens,
    }


def answer_in(reply: Any) -> str:
    """The text of a chat completion. Raises NoScore for what is none."""
    try:
        text = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise NoScore("the server's answer is no chat completion") from None
    if not isinstance(text, str):
        raise NoScore("the judge said nothing")  # all its tokens went into reasoning, or into a call of a tool
    return text


def score_in(judge: Judge, text: str) -> float:
    """From 0 to 1. Raises NoScore."""
    found = list(re.finditer(judge.score, text))
    if not found:
        raise NoScore(f"the judge gave no score: {text[-200:]!r}")
    try:
        value = float(found[-1][1])
    except ValueError:
        raise NoScore(f"the judge's score is no number: {found[-1][1]!r}") from None
    if not (math.isfinite(value) and judge.low <= value <= judge.high):
        raise NoScore(f"the judge's score is not within {judge.low:g} and {judge.high:g}: {value:g}")
    return (value - judge.low) / (judge.high - judge.low)
