"""Simulated training steps: rounds end when enough groups have settled, schemes do what they say,
and the model of learning follows GRPO's gradient."""

from dataclasses import replace

import numpy as np
import pytest
from support.simulated import LoneEngine, engine, engine_step, trajectory
from treadle_core.rollouts.group import Candidate, DualEnd, FirstK, ShortestFirst
from treadle_core.rollouts.length_cap import CapPolicy
from treadle_core.rollouts.redundancy import BudgetPolicy
from treadle_sim.workloads.workload import TrajectoryWork

from treadle_bench.shaping.asynchrony import Asynchronous, AsyncResult, AsyncSetting
from treadle_bench.shaping.population import LIMIT_TOKENS, Policy, Prompts, make_prompts
from treadle_bench.shaping.rounds import GroupWork, Round, RoundResult, single_turn
from treadle_bench.shaping.schemes import (
    FORWARD_SHARE,
    Leftovers,
    Played,
    Scheme,
    Setting,
    Streaming,
    Training,
    with_training,
)

# Cancelling on an engine.


def test_an_aborted_step_leaves_the_engine_to_the_others() -> None:
    alone = LoneEngine(slots=2)
    steps = [engine_step(name, 100, 200, index=at) for at, name in enumerate("abc")]
    stopped = []
    alone.timeline.at(1.0, lambda: stopped.extend(alone.engine.cancel(["a", "c", "unknown"])))
    alone.run(*((0.0, step, 0.0) for step in steps))
    assert set(alone.finished) == {"b"}
    assert [step.step_id for step in stopped] == ["a", "c"]
    assert 0 < steps[0].done < 200 and steps[2].done == 0, "one decoded, one waited"
    assert alone.engine.cancel(["b"]) == [], "it has ended"


def test_an_aborted_step_that_waits_for_kv_never_runs() -> None:
    alone = LoneEngine(kv_tokens=1_000)
    alone.timeline.at(0.5, alone.engine.cancel, ["b"])
    steps = [engine_step(name, 500, 200, index=at) for at, name in enumerate("abc")]
    alone.run(*((0.0, step, 0.0) for step in steps))
    assert set(alone.finished) == {"a", "c"}


def test_a_prefill_without_steps_ends() -> None:
    alone = LoneEngine()
    alone.timeline.at(0.5, alone.engine.cancel, ["long"])
    alone.run(
        (0.0, engine_step("long", 100_000, 10), 0.0),
        (0.6, engine_step("next", 100, 2, index=1), 0.0),
    )
    assert alone.finished["next"] < 1.0
    assert alone.engine.busy_s < 0.5 + alone.finished["next"] - 0.6 + 1e-9


# Rounds.


def of_lengths(prompt: str, *lengths: int) -> tuple[TrajectoryWork, ...]:
    return tuple(
        single_turn(prompt, at, 100, length, 1.0, False) for at, length in enumerate(lengths)
    )


def play(
    *groups: GroupWork, needed: int = 99, engines: int = 1, barrier: bool = False
) -> RoundResult:
    return Round(engine(), engines, groups, needed, barrier=barrier).run()


def test_a_round_waits_for_all_or_for_as_many_groups_as_are_needed() -> None:
    groups = [
        GroupWork("a", of_lengths("a", 50, 90), FirstK(2)),
        GroupWork("b", of_lengths("b", 60, 900), FirstK(2)),
    ]
    whole, part = play(*groups), play(*groups, needed=1)
    assert [result.trained for result in whole.groups] == [("0", "1")] * 2
    assert whole.sampled_tokens == 50 + 90 + 60 + 900
    assert part.seconds < whole.seconds
    assert part.groups[1].settled_s < 0.0 and part.groups[1].trained == ()
    assert [each.key for each in part.groups[1].candidates] == ["0"]
    assert 80 < part.groups[1].running_tokens[1] < 100
    assert part.sampled_tokens == 50 + 90 + 60 + part.groups[1].running_tokens[1]


def test_a_settled_group_is_aborted_and_the_others_go_on_faster() -> None:
    long = of_lengths("a", 50, 2_000, 2_000, 2_000)
    pruned = play(
        GroupWork("a", long, ShortestFirst(1)), GroupWork("b", of_lengths("b", 1_000), FirstK(1))
    )
    waits = play(
        GroupWork("a", long, DualEnd(1, 0)), GroupWork("b", of_lengths("b", 1_000), FirstK(1))
    )
    assert pruned.groups[0].trained == waits.groups[0].trained == ("0",)
    assert set(pruned.groups[0].running_tokens) == {1, 2, 3}
    assert pruned.groups[1].settled_s < waits.groups[1].settled_s


def test_a_sample_goes_on_from_the_tokens_of_an_earlier_round() -> None:
    works = of_lengths("a", 50, 400)
    fresh = play(GroupWork("a", works, FirstK(2)))
    resumed = play(GroupWork("a", works, FirstK(2), (Candidate("0", 50),), {1: 300}))
    assert resumed.groups[0].trained == ("0", "1")
    assert resumed.sampled_tokens == 100
    assert resumed.seconds < 0.5 * fresh.seconds


def test_turns_wait_for_their_environments_and_at_a_barrier_for_all() -> None:
    quick, slow = (
        trajectory(0, [(10, 5, 0.0), (10, 5, 0.0)]),
        trajectory(1, [(10, 5, 3.0), (10, 5, 0.0)]),
    )
    groups = [GroupWork(work.prompt_id, (work,), FirstK(1)) for work in (quick, slow)]
    free, held = play(*groups), play(*groups, barrier=True)
    assert free.groups[0].settled_s < 3.0 < free.groups[1].settled_s
    assert held.groups[0].settled_s > 3.0
    assert held.sampled_tokens == free.sampled_tokens == 40


# The model of learning.


def alike(best: float, count: int = 2) -> Prompts:
    return Prompts(
        np.full(count, 7.0), np.full(count, 0.5), np.full(count, 0.0), np.full(count, best)
    )


def test_a_group_moves_lengths_by_its_covariance_with_rewards() -> None:
    policy = Policy(alike(0.0), rate=0.1, generalise=0.0)
    normal, rewards = np.array([-1.0, -0.5, 0.5, 2.0]), np.array([1.0, 1.0, 0.0, 0.0])
    policy.learn([(0, normal, rewards)])
    # Advantages are 1, 1, -1, -1. The one group of the batch stands for both prompts.
    assert policy.shift == pytest.approx([0.1 * 2 * (-1.0 - 0.5 - 0.5 - 2.0) / 4, 0.0])
    squares = normal**2 - 1.0
    assert policy.log_spread[0] == pytest.approx(
        0.1 * 2 * (squares[:2].sum() - squares[2:].sum()) / 8
    )
    shared = Policy(alike(0.0), rate=0.1, generalise=1.0)
    shared.learn([(0, normal, rewards)])
    assert shared.shift == pytest.approx([-0.1] * 2), "what is shared moves every prompt"


def test_choosing_short_samples_shortens_nothing_unless_the_policy_imitates() -> None:
    """Rewards that do not go with lengths: the advantages of the short ones add up to 0."""
    normal, rewards = np.array([-1.0, -1.0, -1.0, -1.0]), np.array([1.0, 0.0, 1.0, 0.0])
    gradient, imitating = Policy(alike(0.0), 0.1), Policy(alike(0.0), 0.1, imitation=0.5)
    for policy in (gradient, imitating):
        policy.learn([(0, normal, rewards)])
        policy.learn([(0, normal, np.ones(4))])  # no advantage, nothing learned
    assert gradient.shift == pytest.approx([0.0, 0.0])
    assert (imitating.shift < 0.0).all()


def test_training_on_everything_finds_the_length_that_succeeds_most() -> None:
    rng = np.random.default_rng(0)
    for best in (-1.5, 1.5):
        policy = Policy(alike(best), rate=0.05)
        for _ in range(600):
            answers = [
                policy.sample(at, rng.standard_normal(16), rng.random(16)) for at in range(2)
            ]
            policy.learn([(at, each.normal, each.rewards) for at, each in enumerate(answers)])
        assert policy.shift.mean() == pytest.approx(best, abs=0.5)


def test_a_limit_cuts_answers_and_their_rewards() -> None:
    policy = Policy(make_prompts(4, 0), 0.0)
    answers = policy.sample(0, np.array([-9.0, 0.0, 9.0]), np.zeros(3), limit_tokens=1_000)
    assert answers.tokens.max() == 1_000 and answers.truncated[2] and answers.rewards[2] == 0.0
    assert policy.sample(0, np.array([99.0]), np.zeros(1)).tokens[0] == LIMIT_TOKENS


# Schemes.

SETTING = Setting(
    engine(slots=64), 2, make_prompts(32, 0, median=200.0), groups=8, keep=4, steps=8, seed=0
)


def train(scheme: Scheme, **changed: float) -> Played:
    return Training(replace(SETTING, **changed), scheme).run()  # type: ignore[arg-type]


def test_every_step_trains_as_many_groups_and_all_of_their_samples() -> None:
    schemes = [
        Scheme("verl"),
        Scheme("dual", started=6, dual_end=1),
        Scheme("darts", dual_end=1, budget=BudgetPolicy(0.01)),
        Scheme("tail", oversampled=1.5, leftovers=Leftovers.DEFER),
        Scheme("partial", oversampled=1.5, leftovers=Leftovers.RESUME),
        Scheme("first", started=6),
    ]
    played = {scheme.name: train(scheme) for scheme in schemes}
    assert all(row.trained == 32 for each in played.values() for row in each.rows)
    assert played["verl"].guard.kept.value == 1.0
    assert all(row.started == 48 for row in played["dual"].rows)
    assert played["first"].step_s < played["verl"].step_s < played["dual"].step_s
    assert sum(row.stale_tokens for row in played["partial"].rows) > 0
    assert not sum(row.stale_tokens for row in played["tail"].rows)
    waste = {
        name: sum(row.sampled_tokens - row.trained_tokens for row in each.rows)
        for name, each in played.items()
    }
    assert waste["verl"] == 0 < waste["partial"] < 0.5 * waste["tail"], (
        "what is resumed is not sampled again"
    )
    deferred = [row.deferred for row in played["tail"].rows]
    assert any(deferred), "prompts that did not settle come back"
    kept_long = max(row.mean_log_length for row in played["tail"].rows if row.deferred)
    assert kept_long > max(row.mean_log_length for row in played["tail"].rows if not row.deferred)
    assert sum(row.pruned for row in played["darts"].rows) > 0
    assert all(32 <= row.started <= 64 for row in played["darts"].rows)
    mixed = train(Scheme("mixed", started=6, mixed=True))
    assert min(row.trained for row in mixed.rows) < 32, "groups of one outcome are dropped"


def test_forward_passes_overlap_with_the_rollout_where_they_are_streamed() -> None:
    token_s = with_training(SETTING, 0.7)
    waits, samples, tokens = (
        train(Scheme("verl", streaming=how), train_token_s=token_s).rows for how in Streaming
    )
    share = sum(row.rollout_s for row in waits) / sum(row.seconds for row in waits)
    assert share == pytest.approx(0.7, abs=0.05)
    for none, sample, token in zip(waits, samples, tokens, strict=True):
        assert none.rollout_s == sample.rollout_s == token.rollout_s
        assert token.train_s == pytest.approx((1.0 - FORWARD_SHARE) * none.train_s)
        assert token.train_s < sample.train_s < none.train_s


def test_a_cap_shortens_steps_and_schemes_meet_the_same_answers() -> None:
    policy = CapPolicy(
        ceiling_tokens=LIMIT_TOKENS,
        floor_tokens=50,
        percentile=0.9,
        soft_percentile=0.8,
        step_share=0.9,
        least_successes=10,
        most_cut_share=0.3,
        most_truncated_share=1.0,
    )
    free, capped = train(Scheme("verl")), train(Scheme("cap", cap=policy))
    assert free.rows[0] == capped.rows[0], "the first step has no cap"
    assert capped.rows[-1].longest_tokens < free.rows[-1].longest_tokens
    assert capped.step_s < free.step_s
    learned = train(Scheme("verl"), rate=0.1)
    assert (
        learned.rows[0] == free.rows[0]
        and learned.rows[-1].mean_tokens != free.rows[-1].mean_tokens
    )
    assert train(Scheme("verl")) == free


# Asynchronous training.


def test_a_looser_bound_aborts_less_and_shortens_steps() -> None:
    def play(bound: int, train_token_s: float = 1e-4) -> AsyncResult:
        rng = np.random.default_rng(0)
        setting = AsyncSetting(
            engine(slots=16),
            2,
            groups=4,
            in_flight=8,
            bound=bound,
            train_token_s=1e-4,
            update_s=0.1,
        )
        return Asynchronous(
            setting, lambda: rng.lognormal(5.0, 0.8, 4).astype(np.int64) + 1, 12, 2
        ).run()

    tight, loose, free = play(1), play(3), play(100)
    assert tight.aborted_share > loose.aborted_share > free.aborted_share == 0.0
    assert tight.step_s > free.step_s
    assert tight.staleness <= 1.0 < free.staleness
    assert play(0, train_token_s=1e-2).staleness == 0.0, (
        "all that runs is started again with each update"
    )
