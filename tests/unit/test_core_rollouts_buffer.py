"""The sample buffer: first-K verdicts of each group; whole groups out, oldest first, each
trajectory once."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.rollouts.buffer import (
    Advanced,
    Batch,
    Event,
    GroupTooLargeError,
    RolloutState,
    SampleBuffer,
    SampleTakenError,
)
from treadle_core.rollouts.group import DropReason, Sample, Verdict
from treadle_core.rollouts.pacing import Admission
from treadle_core.rollouts.spec import RolloutSpec, RuleName, Selection

ROOMY = 1 << 30


def buffer_of(
    prompts: int, samples: int = 1, keep: int = 1, bound: int | None = None
) -> SampleBuffer:
    return SampleBuffer(RolloutSpec(tuple(f"p{i}" for i in range(prompts)), samples, keep, bound))


def hand_in(
    buffer: SampleBuffer, trajectory: str, prompt: str = "p0", index: int = 0, **fields: Any
) -> Verdict:
    arrived = buffer.decide_arrival(Sample(trajectory, prompt, index, **fields))
    if trajectory not in buffer.samples:
        buffer.apply(arrived)
    return arrived.verdict


def take(
    buffer: SampleBuffer, batch_id: str, max_groups: int, wait: bool = False, max_bytes: int = ROOMY
) -> Batch | None:
    batch = buffer.decide_batch(batch_id, max_groups, wait, max_bytes)
    if batch is not None and batch_id not in buffer.batches:
        buffer.apply(batch)
    return batch


def advance(buffer: SampleBuffer, version: int) -> Advanced | None:
    advanced = buffer.decide_version(version)
    if advanced is not None:
        buffer.apply(advanced)
    return advanced


def test_groups_go_out_whole_and_only_once_settled() -> None:
    buffer = buffer_of(2, samples=2, keep=2)
    hand_in(buffer, "a0")
    assert take(buffer, "b0", 2) == Batch("b0", (), exhausted=False)
    hand_in(buffer, "a1", index=1)
    assert take(buffer, "b1", 2) == Batch("b1", (("p0", ("a0", "a1")),), exhausted=False)
    assert take(buffer, "b2", 2) == Batch("b2", (), exhausted=False)
    assert (buffer.buffered, buffer.taken_total) == (0, 2)


def test_groups_with_the_oldest_tokens_go_first_then_those_that_settled_first() -> None:
    """p0 settles first but p2 carries the oldest tokens; p1 has none to be old.

    Result: p2, p0, then p1.
    """
    buffer = buffer_of(3, bound=5)
    for number, version in enumerate((4, None, 1)):
        hand_in(buffer, "abc"[number], f"p{number}", oldest_version=version)
    batch = take(buffer, "b", 3)
    assert batch is not None
    assert [prompt for prompt, _ in batch.groups] == ["p2", "p0", "p1"]
    assert batch.exhausted


def test_the_bound_is_measured_from_the_oldest_token_and_drops_are_counted_once() -> None:
    buffer = buffer_of(2, samples=2, keep=2, bound=1)
    hand_in(buffer, "old", oldest_version=3)
    hand_in(buffer, "new", index=1, oldest_version=5)
    assert advance(buffer, 5) == Advanced(5, ("old",))
    assert buffer.decide_version(5) is buffer.decide_version(3) is None, "no news"
    batch = take(buffer, "b", 2)
    assert batch is not None and batch.groups == (("p0", ("new",)),)
    assert buffer.drops == {DropReason.STALE: 1}
    hand_in(buffer, "late", "p1", oldest_version=5)
    assert take(buffer, "b", 2) == batch, "a batch id gives the same batch for ever"


def test_an_unsettled_group_that_loses_a_stale_sample_takes_another_one() -> None:
    buffer = buffer_of(1, samples=3, keep=2, bound=0)
    hand_in(buffer, "old", oldest_version=1)
    advance(buffer, 2)
    assert hand_in(buffer, "x", index=1, oldest_version=2).group_settled is False
    assert hand_in(buffer, "y", index=2, oldest_version=2).group_settled is True
    batch = take(buffer, "b", 1)
    assert batch is not None and batch.groups == (("p0", ("x", "y")),)


def test_a_waiting_batch_comes_when_full_or_when_nothing_more_can_come() -> None:
    buffer = buffer_of(2, samples=2, keep=1)
    hand_in(buffer, "a")
    assert take(buffer, "b", 2, wait=True) is None
    hand_in(buffer, "c", "p1", failed=True)
    assert take(buffer, "b", 2, wait=True) is None
    hand_in(buffer, "d", "p1", 1, failed=True)
    assert buffer.state is RolloutState.FINISHED
    assert take(buffer, "b", 2, wait=True) == Batch("b", (("p0", ("a",)),), exhausted=True)


def test_a_batch_is_full_at_its_byte_limit_and_a_group_beyond_it_is_an_error() -> None:
    buffer = buffer_of(3)
    for number, size in enumerate((60, 60, 30)):
        hand_in(buffer, "abc"[number], f"p{number}", payload_bytes=size)
    assert take(buffer, "b0", 3, wait=True, max_bytes=100) == Batch(
        "b0", (("p0", ("a",)),), exhausted=False
    )
    assert take(buffer, "b1", 3, wait=True, max_bytes=100) == Batch(
        "b1", (("p1", ("b",)), ("p2", ("c",))), exhausted=True
    )
    small = buffer_of(1)
    hand_in(small, "a", payload_bytes=60)
    with pytest.raises(GroupTooLargeError):
        take(small, "b", 1, max_bytes=50)
    assert small.buffered == 1


def test_cancelling_drops_partial_groups_and_leaves_settled_ones_to_be_taken() -> None:
    buffer = buffer_of(2, samples=2, keep=2)
    for index in range(2):
        hand_in(buffer, f"a{index}", index=index)
    hand_in(buffer, "c", "p1")
    cancelled = buffer.decide_cancel()
    assert cancelled is not None
    buffer.apply(cancelled)
    assert buffer.state is RolloutState.CANCELLED
    assert buffer.drops == {DropReason.CANCELLED: 1}
    late = hand_in(buffer, "d", "p1", 1)
    assert late.drop_reason is DropReason.CANCELLED and late.group_settled
    assert take(buffer, "b", 5, wait=True) == Batch("b", (("p0", ("a0", "a1")),), exhausted=True)
    assert buffer.decide_cancel() is None


def test_a_foreign_prompt_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        buffer_of(1).decide_arrival(Sample("a", "elsewhere", 0))


COMMANDS = st.lists(
    st.one_of(
        st.tuples(
            st.just("in"), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(0, 6)
        ),
        st.tuples(st.just("take"), st.integers(1, 3), st.integers(0, 6), st.booleans()),
        st.tuples(st.just("cancel")),
    ),
    max_size=40,
)


PROMPTS = tuple(f"p{number}" for number in range(4))


@st.composite
def specs(draw: st.DrawFn) -> RolloutSpec:
    """Of four prompts with four or more samples each: every rule, bound and kind of redundancy."""
    bound = draw(st.one_of(st.none(), st.integers(0, 3)))
    keep = draw(st.integers(1, 4))
    rule = draw(
        st.sampled_from([each for each in RuleName if keep > 1 or each is not RuleName.MIXED])
    )
    replace = draw(st.booleans()) and bound is not None
    paced = draw(st.booleans()) and bound is not None
    return RolloutSpec(
        PROMPTS,
        samples_per_prompt=4,
        keep_per_prompt=keep,
        max_staleness=bound,
        selection=Selection(
            rule, longest=draw(st.integers(0, keep)), saturated_at=draw(st.sampled_from([0, 5]))
        ),
        samples=draw(st.sampled_from([(), (4, 5, 4, 6)])),
        keep_groups=None if replace or paced else draw(st.one_of(st.none(), st.integers(1, 4))),
        max_open_groups=draw(st.one_of(st.none(), st.integers(1, 4))),
        replace_stale=replace,
        batch_groups=draw(st.integers(1, 3)) if paced else None,
        samples_in_flight=draw(st.one_of(st.none(), st.integers(1, 12))) if paced else None,
    )


@given(commands=COMMANDS, spec=specs())
def test_every_kept_trajectory_leaves_once_within_the_bound_and_a_replay_gives_the_same_buffer(
    commands: list[tuple[object, ...]], spec: RolloutSpec
) -> None:
    keep, bound = spec.keep_per_prompt, spec.max_staleness
    buffer, replay = SampleBuffer(spec), SampleBuffer(spec)
    admitted = 0
    taken: list[str] = []
    ids = itertools.count()

    admission = Admission(buffer) if spec.batch_groups is not None else None
    again = Admission(replay) if spec.batch_groups is not None else None
    now = itertools.count()

    def happen(event: Event | None) -> bool:
        if event is not None:
            at_s = float(next(now))
            buffer.apply(event)
            replay.apply(event)
            if admission is not None and again is not None:
                admission.note(event, at_s)
                again.note(event, at_s)
        return event is not None

    for command in commands:
        while admission is not None and happen(admission.decide_drop()):
            pass
        if admission is not None:
            happen(admission.decide_admission(float(next(now))))
        match command:
            case ("in", int(prompt), int(index), bool(failed), int(version)):
                trajectory = f"p{prompt}-{index}"
                fields: dict[str, Any] = {
                    "length_tokens": (prompt + 3 * index) % 5,
                    "reward": float(index % 2),
                }
                sample = Sample(trajectory, f"p{prompt}", index, failed, version, **fields)
                arrived = buffer.decide_arrival(sample)
                if trajectory in buffer.samples:
                    assert arrived.verdict == buffer.groups[f"p{prompt}"].verdicts[trajectory]
                else:
                    happen(arrived)
            case ("take", int(max_groups), int(version), bool(wait)):
                happen(buffer.decide_version(version))
                batch = buffer.decide_batch(f"b{next(ids)}", max_groups, wait, ROOMY)
                happen(batch)
                for prompt_id, trajectory_ids in batch.groups if batch is not None else ():
                    assert trajectory_ids == tuple(
                        s.trajectory_id for s in buffer.groups[prompt_id].kept
                    )
                    assert 1 <= len(trajectory_ids) <= keep
                    newest = buffer.newest_version
                    oldest = [buffer.samples[t].oldest_version for t in trajectory_ids]
                    assert (
                        bound is None
                        or newest is None
                        or all(newest - o <= bound for o in oldest if o is not None)
                    )
                    taken.extend(trajectory_ids)
            case _:
                happen(buffer.decide_cancel())
        assert admitted <= buffer.groups_admitted, "what may have begun stays so"
        admitted = buffer.groups_admitted
        assert len(taken) == len(set(taken)) == buffer.taken_total
        assert buffer.taken_total + buffer.buffered + sum(buffer.drops.values()) == len(
            buffer.samples
        )
        waiting = sum(len(group.kept) for group in buffer.groups.values() if not group.taken)
        assert waiting == buffer.buffered
    assert vars(replay) == vars(buffer)
    if admission is not None and again is not None:
        late_s = float(next(now))
        assert again.decide_admission(late_s) == admission.decide_admission(late_s)
        assert again.wait_s(late_s) == admission.wait_s(late_s)


def buffer_with(
    prompts: int = 1, per_prompt: int = 4, keep: int = 2, **fields: Any
) -> SampleBuffer:
    return SampleBuffer(RolloutSpec(PROMPTS[:prompts], per_prompt, keep, **fields))


def kept_of(buffer: SampleBuffer, prompt: str = "p0") -> list[str]:
    return [sample.trajectory_id for sample in buffer.groups[prompt].kept]


def test_dual_end_sampling_waits_for_all_samples_and_drops_those_in_the_middle() -> None:
    """Of lengths 30, 10, 40 and 20, one of each end is trained.

    Result: all are kept until the last, with which the two in the middle, itself among them, are
    dropped.
    """
    buffer = buffer_with(selection=Selection(RuleName.DUAL_END, longest=1))
    verdicts = [
        hand_in(buffer, name, index=index, length_tokens=length)
        for index, (name, length) in enumerate({"a": 30, "b": 10, "c": 40, "d": 20}.items())
    ]
    assert [each.kept for each in verdicts] == [True, True, True, False]
    assert verdicts[-1] == Verdict(DropReason.NOT_CHOSEN, group_settled=True)
    assert kept_of(buffer) == ["b", "c"] and buffer.drops == {DropReason.NOT_CHOSEN: 2}


def test_a_saturated_prompt_is_pruned_once_enough_short_samples_are_in() -> None:
    selection = Selection(RuleName.DUAL_END, longest=1, saturated_at=5)
    buffer = buffer_with(prompts=2, per_prompt=5, selection=selection, samples=(5, 4))
    for prompt in ("p0", "p1"):
        for index in range(2):
            last = hand_in(buffer, f"{prompt}-{index}", prompt, index, length_tokens=10 + index)
        assert last.group_settled is (prompt == "p0")


def test_a_mixed_group_settles_with_a_success_and_a_failure_and_a_uniform_one_is_dropped() -> None:
    buffer = buffer_with(prompts=2, selection=Selection(RuleName.MIXED))
    rewards = {"p0": (1.0, 1.0, 0.0), "p1": (1.0, 1.0, 1.0, 1.0)}
    for prompt, values in rewards.items():
        for index, reward in enumerate(values):
            last = hand_in(buffer, f"{prompt}-{index}", prompt, index, reward=reward)
        assert last.group_settled
    assert kept_of(buffer, "p0") == ["p0-0", "p0-2"]
    assert kept_of(buffer, "p1") == [] and buffer.state is RolloutState.FINISHED
    assert buffer.drops == {DropReason.NOT_CHOSEN: 5}


def test_groups_beyond_those_that_are_kept_are_withdrawn() -> None:
    """Two of three groups are needed. When the second has settled, what came of the third is
    dropped.

    Result: the rollout is over, and what comes later is withdrawn too.
    """
    buffer = buffer_with(prompts=3, per_prompt=2, keep_groups=2)
    hand_in(buffer, "c0", "p2")
    for prompt in ("p0", "p1"):
        for index in range(2):
            hand_in(buffer, f"{prompt}-{index}", prompt, index)
    assert buffer.state is RolloutState.FINISHED and not buffer.groups["p2"].settled
    assert kept_of(buffer, "p2") == [] and buffer.drops == {DropReason.WITHDRAWN: 1}
    assert hand_in(buffer, "c1", "p2", 1) == Verdict(DropReason.WITHDRAWN, group_settled=True)
    batch = take(buffer, "b", 3, wait=True)
    assert (
        batch is not None
        and [prompt for prompt, _ in batch.groups] == ["p0", "p1"]
        and batch.exhausted
    )


def test_a_group_in_which_nothing_is_left_does_not_count_as_one_of_those_that_are_kept() -> None:
    buffer = buffer_with(prompts=2, per_prompt=1, keep=1, keep_groups=1)
    hand_in(buffer, "a", "p0", failed=True)
    assert not buffer.over
    hand_in(buffer, "b", "p1")
    assert kept_of(buffer, "p1") == ["b"] and buffer.state is RolloutState.FINISHED


def test_a_sample_that_grew_too_old_is_replaced_by_one_more_and_its_group_leaves_whole() -> None:
    """Both samples settle the group; the trainer goes on, and one of them is too old by then.

    Result: the group opens again for a sample with the next number, and leaves with two.
    """
    buffer = buffer_with(per_prompt=2, max_staleness=0, replace_stale=True)
    hand_in(buffer, "old", index=0, oldest_version=1)
    hand_in(buffer, "new", index=1, oldest_version=2)
    advance(buffer, 2)
    assert not buffer.groups["p0"].settled and buffer.groups["p0"].started == 3
    assert not buffer.over and take(buffer, "b0", 1, wait=True) is None
    assert hand_in(buffer, "again", index=2, oldest_version=2).group_settled
    batch = take(buffer, "b1", 1, wait=True)
    assert batch == Batch("b1", (("p0", ("new", "again")),), exhausted=True)
    assert buffer.state is RolloutState.FINISHED


def test_a_sample_that_comes_too_old_is_replaced_too() -> None:
    buffer = buffer_with(per_prompt=2, max_staleness=0, replace_stale=True)
    advance(buffer, 3)
    assert hand_in(buffer, "old", index=0, oldest_version=2) == Verdict(
        DropReason.STALE, group_settled=False
    )
    assert not hand_in(buffer, "a", index=1, oldest_version=3).group_settled
    assert hand_in(buffer, "b", index=2, oldest_version=3).group_settled


def test_only_so_many_groups_are_begun_before_one_is_taken() -> None:
    """Two may be open at a time: a group that is taken, or that settled with nothing, makes room
    for the next."""
    buffer = buffer_with(prompts=4, per_prompt=1, keep=1, max_open_groups=2)
    assert buffer.groups_admitted == 2
    hand_in(buffer, "b", "p1")
    assert buffer.groups_admitted == 2, "it waits to be taken"
    take(buffer, "batch", 1)
    assert buffer.groups_admitted == 3
    hand_in(buffer, "a", "p0", failed=True)
    assert buffer.groups_admitted == 4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"samples": (4, 4)}, "samples"),
        ({"samples": (1,)}, "samples"),
        ({"keep_groups": 2}, "keep_groups"),
        ({"max_open_groups": 0}, "max_open_groups"),
        ({"replace_stale": True}, "replace_stale"),
        ({"replace_stale": True, "max_staleness": 1, "keep_groups": 1}, "replace_stale"),
        ({"selection": Selection(RuleName.DUAL_END, longest=3)}, "longest"),
    ],
)
def test_a_spec_whose_numbers_do_not_fit_together_is_refused(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        buffer_with(**fields)


def test_a_group_settles_when_enough_samples_are_kept_and_drops_the_rest() -> None:
    """Two of three samples are wanted. The second settles the group; the third is dropped as
    GROUP_SETTLED.

    Result: kept, kept and settled, dropped.
    """
    buffer = buffer_of(1, samples=3, keep=2)
    first, second, third = (hand_in(buffer, name, index=index) for index, name in enumerate("abc"))
    assert (first.kept, first.group_settled) == (True, False)
    assert (second.kept, second.group_settled) == (True, True)
    assert (third.drop_reason, third.group_settled) == (DropReason.GROUP_SETTLED, True)
    assert [sample.trajectory_id for sample in buffer.groups["p0"].kept] == ["a", "b"]


def test_a_failed_sample_is_dropped_and_a_group_with_failures_settles_once_all_are_in() -> None:
    buffer = buffer_of(1, samples=2, keep=2)
    first = hand_in(buffer, "a", failed=True)
    assert first.drop_reason is DropReason.FAILED and not first.group_settled
    second = hand_in(buffer, "b", index=1)
    assert second.kept and second.group_settled
    assert buffer.groups["p0"].ready


def test_a_sample_index_belongs_to_the_first_trajectory_that_hands_it_in() -> None:
    buffer = buffer_of(1, samples=3, keep=2)
    hand_in(buffer, "a")
    with pytest.raises(SampleTakenError) as refused:
        hand_in(buffer, "b")
    assert refused.value.trajectory_id == "a"


@pytest.mark.parametrize(
    ("oldest", "newest", "bound", "stale"),
    [
        (3, 5, 1, True),
        (4, 5, 1, False),
        (9, 5, 0, False),
        (0, 99, None, False),
        (None, 99, 0, False),
        (0, None, 0, False),
    ],
)
def test_a_sample_whose_oldest_token_lags_too_far_behind_the_newest_version_is_stale_on_arrival(
    oldest: int | None, newest: int | None, bound: int | None, stale: bool
) -> None:
    buffer = buffer_of(1, samples=2, keep=2, bound=bound)
    if newest is not None:
        advance(buffer, newest)
    verdict = hand_in(buffer, "a", oldest_version=oldest)
    assert verdict.drop_reason is (DropReason.STALE if stale else None)


@pytest.mark.parametrize(
    ("prompts", "samples", "keep", "bound", "cap"),
    [
        ((), 1, 1, None, None),
        (("p", "p"), 1, 1, None, None),
        (("p",), 2, 0, None, None),
        (("p",), 2, 3, None, None),
        (("p",), 1, 1, -1, None),
        (("p",), 1, 1, None, 0),
    ],
)
def test_a_spec_no_group_could_satisfy_is_refused(
    prompts: tuple[str, ...], samples: int, keep: int, bound: int | None, cap: int | None
) -> None:
    with pytest.raises(ValueError, match="must be"):
        RolloutSpec(prompts, samples, keep, bound, cap)


@given(keep=st.integers(1, 5), extra=st.integers(0, 4), fates=st.lists(st.booleans(), max_size=12))
def test_a_group_never_keeps_more_than_k_and_settles_exactly_when_it_has_k_or_everything(
    keep: int, extra: int, fates: list[bool]
) -> None:
    buffer = buffer_of(1, samples=keep + extra, keep=keep)
    group = buffer.groups["p0"]
    for index, failed in enumerate(fates[: keep + extra]):
        was_settled = group.settled
        verdict = hand_in(buffer, f"t{index}", index=index, failed=failed)
        assert len(group.kept) <= keep
        assert group.settled == (len(group.kept) == keep or group.received == keep + extra)
        assert group.settled or not was_settled
        assert verdict.group_settled == group.settled


def test_a_group_is_dropped_whole_and_never_twice() -> None:
    buffer = buffer_of(2, samples=2, keep=2)
    hand_in(buffer, "a0")
    dropped = buffer.decide_drop("p0", DropReason.LATE)
    assert dropped is not None and dropped.dropped == ("a0",)
    buffer.apply(dropped)
    assert buffer.drop_reason_of("a0") is DropReason.LATE
    assert buffer.groups["p0"].gone and buffer.decide_drop("p0", DropReason.LATE) is None
    assert hand_in(buffer, "a1", index=1).drop_reason is DropReason.GROUP_SETTLED
    hand_in(buffer, "b0", "p1")
    hand_in(buffer, "b1", "p1", index=1)
    batch = take(buffer, "b", 2)
    assert batch is not None and batch.groups == (("p1", ("b0", "b1")),) and batch.exhausted
    assert buffer.decide_drop("p1", DropReason.LATE) is None, "it is taken"
