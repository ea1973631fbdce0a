"""How long the prompts of a probe are."""

import math

import pytest
from treadle_sidecar.probe import CONTEXTS, PREFILL_S, lengthen

NEW_TOKENS = CONTEXTS[-1] - CONTEXTS[-2]


@pytest.mark.parametrize(
    ("first_s", "longest"),
    [
        (PREFILL_S, 512),
        (2.0 * PREFILL_S, 512),
        (math.inf, 512),
        (PREFILL_S / 8, 8 * NEW_TOKENS),
        (0.001, 8_192),
    ],
)
def test_the_longest_prompt_takes_as_long_as_a_step_may_wait(first_s: float, longest: int) -> None:
    assert lengthen(CONTEXTS, first_s, 8_192)[-1] == longest


def test_lengths_keep_their_proportion_and_never_shrink() -> None:
    longer = lengthen(CONTEXTS, PREFILL_S / 100, 4_096)
    assert longer == (512, 2_048, 4_096)
    assert lengthen(longer, PREFILL_S, 4_096) == longer
    assert lengthen(CONTEXTS, 0.001, 300) == CONTEXTS, "an engine with little room"
