"""What a training run's rollouts learn from each other."""

from dataclasses import replace
from typing import Any

import pytest
from treadle_core.rollouts.buffer import Aborted, SampleBuffer
from treadle_core.rollouts.group import Sample
from treadle_core.rollouts.history import PROMPTS_KEPT, RolloutHistory, bias_of
from treadle_core.rollouts.length_cap import CapPolicy, CutReward
from treadle_core.rollouts.spec import Redundancy, RolloutSpec, RuleName, Selection

CAP = CapPolicy(
    ceiling_tokens=100,
    floor_tokens=10,
    least_successes=1,
    percentile=0.9,
    soft_percentile=0.5,
    most_cut_share=0.2,
)


def run(
    history: RolloutHistory,
    name: str,
    spec: RolloutSpec,
    lengths: dict[str, list[int]],
    **fields: Any,
) -> None:
    """A rollout whose samples have these lengths, in order."""
    buffer = SampleBuffer(history.begin(spec))
    for prompt, numbers in lengths.items():
        for index, length in enumerate(numbers):
            sample = Sample(
                f"{prompt}-{index}", prompt, index, length_tokens=length, reward=1.0, **fields
            )
            buffer.apply(buffer.decide_arrival(sample))
    history.fold(name, buffer)


def test_a_prompt_with_a_wider_spread_of_lengths_gets_the_samples_that_are_to_spare() -> None:
    history = RolloutHistory()
    spec = RolloutSpec(("p0", "p1"), 4, 2, history="h", redundancy=Redundancy(budget=1.5, most=4))
    assert history.begin(spec).samples == (3, 3), "nothing is known"
    run(history, "r0", spec, {"p0": [10, 90, 50], "p1": [30, 30, 30]})
    assert history.begin(spec).samples == (4, 2)


def test_a_rollout_is_counted_once_and_a_cancelled_one_never() -> None:
    history, spec = RolloutHistory(), RolloutSpec(("p0",), 1, 1, history="h")
    for _ in range(2):
        run(history, "r0", spec, {"p0": [10]})
    cancelled = SampleBuffer(spec)
    event = cancelled.decide_cancel()
    assert event is not None
    cancelled.apply(event)
    history.fold("r1", cancelled)
    assert (
        history.folded == ["r0"]
        and history.lengths.all.seen == 1
        and history.bias.sampled_tokens == 10
    )


def test_a_cap_is_learned_from_rollouts_without_one_and_bounds_the_next() -> None:
    """Lengths of 20; the cap goes from 100 towards 20 by a tenth of itself."""
    history, spec = RolloutHistory(), RolloutSpec(("p0",), 1, 1, history="h", cap=CAP)
    first = history.begin(spec)
    assert first.cut is not None and (first.limit_tokens, first.cut.in_force) == (100, False)
    run(history, "r0", spec, {"p0": [20]})
    second = history.begin(spec)
    assert second.cut is not None and (second.limit_tokens, second.cut.in_force) == (90, True)
    assert history.begin(RolloutSpec(("p0",), 1, 1, 0, 50, history="h", cap=CAP)).limit_tokens == 50
    other = replace(CAP, floor_tokens=95, cut_reward=CutReward.ZERO)
    changed = history.begin(RolloutSpec(("p0",), 1, 1, history="h", cap=other))
    assert changed.cut is not None and changed.cut.reward is CutReward.ZERO


def test_what_is_dropped_later_and_what_was_ended_early_count_as_sampled() -> None:
    """Of lengths 10, 20, 30 the ends are trained; a fourth sample was ended after 5 tokens, a fifth
    before it began."""
    spec = RolloutSpec(("p0",), 3, 2, selection=Selection(RuleName.DUAL_END, longest=1))
    buffer = SampleBuffer(spec)
    for index in range(3):
        sample = Sample(f"t{index}", "p0", index, length_tokens=10 * (index + 1), reward=1.0)
        buffer.apply(buffer.decide_arrival(sample))
    for tokens in (5, 0):
        buffer.apply(Aborted("p0", f"aborted-{tokens}", tokens))
    guard = bias_of(buffer)
    assert (guard.sampled_tokens, guard.trained_tokens) == (65, 40)
    assert guard.drops == {"not_chosen": 1, "aborted": 1}


def test_staleness_is_that_of_each_trained_token_when_its_group_was_taken() -> None:
    buffer = SampleBuffer(RolloutSpec(("p0",), 1, 1, max_staleness=2))
    sample = Sample(
        "t", "p0", 0, oldest_version=3, length_tokens=7, version_tokens=((3, 5), (4, 2))
    )
    buffer.apply(buffer.decide_arrival(sample))
    for event in (buffer.decide_version(5), buffer.decide_batch("b", 1, wait=False)):
        assert event is not None
        buffer.apply(event)
    assert bias_of(buffer).stale_tokens == {2: 5, 1: 2}


@pytest.mark.parametrize("fields", [{"redundancy": Redundancy(1.0, 1)}, {"cap": CAP}])
def test_what_needs_a_history_is_refused_without_one(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="history"):
        RolloutSpec(("p0",), 1, 1, **fields)


def test_prompts_that_were_seen_long_ago_are_forgotten() -> None:
    history = RolloutHistory()
    prompts = tuple(f"p{number}" for number in range(PROMPTS_KEPT))
    run(history, "r0", RolloutSpec(prompts, 1, 1), {prompt: [1] for prompt in prompts})
    run(history, "r1", RolloutSpec(("p0", "new"), 1, 1), {"p0": [1], "new": [1]})
    assert len(history.lengths.prompts) == PROMPTS_KEPT
    assert "p0" in history.lengths.prompts and "p1" not in history.lengths.prompts
