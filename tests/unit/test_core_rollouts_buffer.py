"""The sample buffer: first-K verdicts of each group; whole groups out, oldest first, each trajectory once."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_core.rollouts.buffer import (
    Advanced,
    Batch,
    DropReason,
    Event,
    GroupTooLargeError,
    RolloutSpec,
    RolloutState,
    Sample,
    SampleBuffer,
    SampleTakenError,
    Verdict,
)

ROOMY = 1 << 30


def buffer_of(prompts: int, samples: int = 1, keep: int = 1, bound: int | None = None) -> SampleBuffer:
    return SampleBuffer(RolloutSpec(tuple(f"p{i}" for i in range(prompts)), samples, keep, bound))


def hand_in(buffer: SampleBuffer, trajectory: str, prompt: str = "p0", index: int = 0, **fields: Any) -> Verdict:
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
    assert take(buffer, "b0", 3, wait=True, max_bytes=100) == Batch("b0", (("p0", ("a",)),), exhausted=False)
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
        st.tuples(st.just("in"), st.integers(0, 3), st.integers(0, 3), st.booleans(), st.integers(0, 6)),
        st.tuples(st.just("take"), st.integers(1, 3), st.integers(0, 6), st.booleans()),
        st.tuples(st.just("cancel")),
    ),
    max_size=40,
)


@given(commands=COMMANDS, keep=st.integers(1, 4), bound=st.one_of(st.none(), st.integers(0, 3)))
def test_every_kept_trajectory_leaves_once_within_the_bound_and_a_replay_gives_the_same_buffer(
    commands: list[tuple[object, ...]], keep: int, bound: int | None
) -> None:
    buffer = buffer_of(4, samples=4, keep=keep, bound=bound)
    replay = buffer_of(4, samples=4, keep=keep, bound=bound)
    taken: list[str] = []
    ids = itertools.count()

    def happen(event: Event | None) -> None:
        if event is not None:
            buffer.apply(event)
            replay.apply(event)

    for command in commands:
        match command:
            case ("in", int(prompt), int(index), bool(failed), int(version)):
                trajectory = f"p{prompt}-{index}"
                sample = Sample(trajectory, f"p{prompt}", index, failed, version)
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
                    assert trajectory_ids == tuple(s.trajectory_id for s in buffer.groups[prompt_id].kept)
                    assert 1 <= len(trajectory_ids) <= keep
                    newest = buffer.newest_version
                    oldest = [buffer.samples[t].oldest_version for t in trajectory_ids]
                    assert bound is None or newest is None or all(newest - o <= bound for o in oldest if o is not None)
                    taken.extend(trajectory_ids)
            case _:
                happen(buffer.decide_cancel())
        assert len(taken) == len(set(taken)) == buffer.taken_total
        assert buffer.taken_total + buffer.buffered + sum(buffer.drops.values()) == len(buffer.samples)
        waiting = sum(len(group.kept) for group in buffer.groups.values() if not group.taken)
        assert waiting == buffer.buffered
    assert vars(replay) == vars(buffer)


def test_a_group_settles_when_enough_samples_are_kept_and_drops_the_rest() -> None:
    """Two of three samples are wanted. The second settles the group; the third is dropped as GROUP_SETTLED.

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
    [((), 1, 1, None, None), (("p", "p"), 1, 1, None, None), (("p",), 2, 0, None, None), (("p",), 2, 3, None, None),
     (("p",), 1, 1, -1, None), (("p",), 1, 1, None, 0)],
)  # fmt: skip
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
