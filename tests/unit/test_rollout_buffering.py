"""The rollout service over a real nats-server: verdicts, batches, payloads, watching."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from math import inf

import grpc
import pytest
from nats.js.api import StreamState
from support.finished_trajectories import CALL_S, RolloutCalls, finished, members, rollout_service
from support.rpc import refusal_of
from treadle.rollout.v1 import rollout_pb2 as pb
from treadle_core.rollouts.group import Group, Sample
from treadle_core.rollouts.spec import RolloutSpec
from treadle_rollout.convert import settled_fact
from treadle_rollout.rollouts import BatchRequest, Rollout, Rollouts
from treadle_rollout.running import TokenRoom
from treadle_rollout.storage import (
    HISTORY_BUCKET,
    LOG_BUCKET,
    PAYLOAD_BUCKET,
    HistoryStore,
    PayloadStore,
    RolloutLog,
)
from treadle_runtime.bus import Bus
from treadle_runtime.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted


@pytest.fixture
async def calls(nats_url: str) -> AsyncIterator[RolloutCalls]:
    async with rollout_service(nats_url) as calls:
        yield calls


async def test_the_first_k_samples_are_kept_and_come_back_whole(calls: RolloutCalls) -> None:
    """Two of three samples are wanted.

    They come back token for token, and the third is told that its group has settled.
    """
    created = await calls.create(samples=3, keep=2)
    assert created.state == pb.ROLLOUT_STATE_RUNNING
    first, second = finished("a", sample=0), finished("b", sample=1, versions=("0", "1"))
    assert not (await calls.submit(first)).group_settled
    assert (await calls.submit(second)).group_settled
    third = await calls.submit(finished("c", sample=2))
    assert (third.kept, third.drop_reason) == (False, pb.DROP_REASON_GROUP_SETTLED)
    batch = await calls.batch("b")
    assert list(batch.groups[0].trajectories) == [first, second]
    assert batch.exhausted
    rollout = await calls.get()
    assert rollout.state == pb.ROLLOUT_STATE_FINISHED
    assert (rollout.taken_trajectories, rollout.buffered_trajectories) == (2, 0)
    assert [(d.reason, d.count) for d in rollout.drops] == [(pb.DROP_REASON_GROUP_SETTLED, 1)]
    assert [(g.received, g.kept, g.settled) for g in rollout.groups] == [(3, 2, True)]


@pytest.mark.parametrize("tokens", [40_000, 300_000])
async def test_a_trajectory_larger_than_a_nats_message_comes_back_whole(
    calls: RolloutCalls, tokens: int
) -> None:
    """300,000 tokens are 2.7 MB, beyond NATS's 1 MiB: they travel in chunks."""
    trajectory = finished("long", sampled=tokens)
    await calls.create()
    assert (await calls.submit(trajectory)).kept
    batch = await calls.batch("b")
    assert batch.groups[0].trajectories[0] == trajectory


async def test_a_group_too_large_for_a_message_is_left_to_the_streamed_batch(nats_url: str) -> None:
    """GetBatch refuses the group and takes nothing; StreamBatch takes it, and GetBatch cannot
    repeat that."""
    async with rollout_service(nats_url, max_message_bytes=200_000) as calls:
        await calls.create(samples=2)
        group = [finished(f"t{sample}", sample=sample, sampled=10_000) for sample in range(2)]
        assert [(await calls.submit(trajectory)).kept for trajectory in group] == [True, True]
        refusal = await refusal_of(calls.batch("b"))
        assert refusal[:2] == (grpc.StatusCode.FAILED_PRECONDITION, "GROUP_TOO_LARGE")
        batch = await calls.stream("b", wait=True)
        assert list(batch.groups[0].trajectories) == group and batch.exhausted
        assert (await refusal_of(calls.batch("b", wait=True))).reason == "BATCH_TOO_LARGE"
        assert await calls.stream("b", wait=True) == batch


async def test_a_batch_is_repeated_by_either_rpc_until_it_is_confirmed(calls: RolloutCalls) -> None:
    await calls.create(prompts=2)
    for index in range(2):
        await calls.submit(finished(f"t{index}", f"p{index}"))
    batch = await calls.batch("b", 1)
    assert await calls.stream("b", 1) == batch
    await calls.confirm("b")
    for repeat in (calls.batch("b", 1), calls.stream("b", 1)):
        assert (await refusal_of(repeat)).reason == "BATCH_EXPIRED"
    assert (await refusal_of(calls.confirm("never"))).reason == "BATCH_NOT_FOUND"
    assert members(await calls.stream("b1", 1)) == [["t1"]]


async def test_a_batch_stops_at_the_message_limit_and_the_rest_comes_with_the_next(
    nats_url: str,
) -> None:
    async with rollout_service(nats_url, max_message_bytes=200_000) as calls:
        await calls.create(prompts=2)
        for index in range(2):
            await calls.submit(finished(f"t{index}", f"p{index}", sampled=10_000))
        assert members(await calls.batch("b0", 2, wait=True)) == [["t0"]]
        last = await calls.batch("b1", 2, wait=True)
    assert members(last) == [["t1"]] and last.exhausted


async def test_trajectories_beyond_the_bound_are_dropped_measured_from_their_oldest_token(
    calls: RolloutCalls,
) -> None:
    """Bound 1, trainer at 5: sampled under 3 and 5 is too old by its first tokens, under 4 and 5 is
    not."""
    await calls.create(samples=2, staleness=1)
    await calls.submit(finished("old", sample=0, versions=("3", "5")))
    await calls.submit(finished("new", sample=1, versions=("4", "5")))
    assert members(await calls.batch("b", version=5)) == [["new"]]
    rollout = await calls.get()
    assert [(d.reason, d.count) for d in rollout.drops] == [(pb.DROP_REASON_STALE, 1)]


async def test_a_repeated_submission_gets_its_first_verdict_and_counts_once(
    calls: RolloutCalls,
) -> None:
    await calls.create(samples=3, keep=1)
    first = await calls.submit(finished("a"), "one")
    assert await calls.submit(finished("a"), "one") == first
    assert await calls.submit(finished("a", sampled=9), "another") == first
    rollout = await calls.get()
    batch = await calls.batch("b")
    assert rollout.groups[0].received == 1
    assert batch.groups[0].trajectories[0] == finished("a")


async def test_concurrent_batches_never_share_a_group_and_a_repeat_gives_the_same_one(
    calls: RolloutCalls,
) -> None:
    await calls.create(prompts=12)
    for index in range(12):
        await calls.submit(finished(f"t{index}", f"p{index}"))
    ids = [f"b{index}" for index in range(6)]
    batches = await asyncio.gather(*(calls.batch(request_id, 2) for request_id in [*ids, *ids]))
    assert batches[:6] == batches[6:]
    taken = [
        trajectory for batch in batches[:6] for group in members(batch) for trajectory in group
    ]
    assert sorted(taken) == sorted(f"t{index}" for index in range(12))


async def test_a_waiting_batch_is_answered_when_it_is_full_and_takes_nothing_before(
    calls: RolloutCalls,
) -> None:
    await calls.create(prompts=3)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(calls.batch("b", 2, wait=True))
        await calls.submit(finished("t0", "p0"))
        assert (await calls.get()).taken_trajectories == 0
        await calls.submit(finished("t1", "p1"))
    assert members(waiting.result()) == [["t0"], ["t1"]]


async def test_a_batch_whose_deadline_passes_takes_nothing(calls: RolloutCalls) -> None:
    await calls.create(prompts=2)
    await calls.submit(finished("t0", "p0"))
    late = await refusal_of(calls.batch("b", 2, wait=True, timeout_s=0.3))
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert (await calls.get()).buffered_trajectories == 1
    await calls.submit(finished("t1", "p1"))
    assert members(await calls.batch("b", 2, wait=True)) == [["t0"], ["t1"]]


async def test_cancelling_ends_the_wait_of_a_batch(calls: RolloutCalls) -> None:
    await calls.create(prompts=2)
    await calls.submit(finished("t0", "p0"))
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(calls.batch("b", 2, wait=True))
        request = pb.CancelRolloutRequest(request_id="cancel", rollout_id="r")
        cancelled = await calls.stub.CancelRollout(request, timeout=CALL_S)
        assert await calls.stub.CancelRollout(request, timeout=CALL_S) == cancelled
    late = await calls.submit(finished("t1", "p1"))
    assert cancelled.rollout.state == pb.ROLLOUT_STATE_CANCELLED
    assert members(waiting.result()) == [["t0"]] and waiting.result().exhausted
    assert late.drop_reason == pb.DROP_REASON_CANCELLED and late.group_settled


async def test_a_watch_sends_the_rollout_once_and_then_the_groups_that_changed(
    calls: RolloutCalls,
) -> None:
    """A group gets one sample of two, which no watch sends, and another group settles; then all
    settle, one by one.

    Result: each message after the first names the changed groups alone; what a reader makes of them
    is the rollout.
    """
    await calls.create(prompts=3, samples=2)
    watch = calls.stub.WatchRollout(pb.WatchRolloutRequest(rollout_id="r"), timeout=CALL_S)
    first = await anext(states := aiter(watch))
    assert not first.changes and first.rollout == await calls.get()
    groups = {group.prompt_id: group for group in first.rollout.groups}
    await calls.submit(finished("early", "p1"))
    for prompt_id, samples, changed in (
        ("p0", (0, 1), ["p0", "p1"]),
        ("p1", (1,), ["p1"]),
        ("p2", (0, 1), ["p2"]),
    ):
        for sample in samples:
            await calls.submit(finished(f"{prompt_id}-{sample}", prompt_id, sample))
        message = await anext(states)
        assert message.changes and not message.rollout.HasField("spec")
        assert [group.prompt_id for group in message.rollout.groups] == changed
        groups.update((group.prompt_id, group) for group in message.rollout.groups)
    rollout = await calls.get()
    for group in rollout.groups:
        del group.samples[:]  # which no watch sends
    assert list(groups.values()) == list(rollout.groups)
    assert message.rollout.state == rollout.state == pb.ROLLOUT_STATE_FINISHED
    assert [message async for message in watch] == []


async def stores(bus: Bus, room_bytes: int | None = None) -> tuple[RolloutLog, PayloadStore]:
    log, payloads = (
        await bus.key_value(LOG_BUCKET),
        await bus.key_value(PAYLOAD_BUCKET, max_bytes=room_bytes),
    )
    store = PayloadStore(payloads, bus.jetstream, bus.max_payload_bytes, room_bytes or inf)
    return RolloutLog(log, bus.jetstream), store


async def stored(bus: Bus) -> StreamState:
    return (await bus.jetstream.stream_info(f"KV_{PAYLOAD_BUCKET}")).state


ROOM_BYTES = 2_000_000


async def history_store(bus: Bus) -> HistoryStore:
    return HistoryStore(await bus.key_value(HISTORY_BUCKET))


async def tell_nobody(_rollout: Rollout, _group: Group) -> None:
    """Of settled groups."""


def asks(request_id: str, fingerprint: str = "f") -> BatchRequest:
    return BatchRequest(request_id, fingerprint, max_groups=1, weight_version=0, wait=False)


async def test_two_processes_over_one_log_never_hand_a_group_out_twice(bus: Bus) -> None:
    """Both hold the same rollout. One takes a group; the other has not heard of it and wants the
    same one.

    Result: the other loses the position in its log, reads it again and answers with an empty batch.
    """
    log, payloads = await stores(bus)
    histories = await history_store(bus)
    one, other = (
        Rollouts(log, payloads, histories, TokenRoom(0), tell_nobody),
        Rollouts(log, payloads, histories, TokenRoom(0), tell_nobody),
    )
    await one.create("r", RolloutSpec(("p0",), 1, 1), "req")
    here, there = await one.find("r"), await other.find("r")
    await here.submit(Sample("t0", "p0", 0), b"tokens")
    await there.submit(Sample("t0", "p0", 0), b"tokens")
    assert there.buffer.revision == 1
    first = await here.take(asks("b0"))
    second = await there.take(asks("b1"))
    assert (len(first.groups), len(second.groups)) == (1, 0)


async def test_no_two_groups_are_told_by_one_fact(bus: Bus) -> None:
    """Rollout r-1 with prompt 2, and rollout r with prompt 1-2, are two groups."""
    rollouts = Rollouts(*await stores(bus), await history_store(bus), TokenRoom(0), tell_nobody)
    ids = set()
    for rollout_id, prompt_id in (("r-1", "2"), ("r", "1-2")):
        rollout = await rollouts.create(
            rollout_id, RolloutSpec((prompt_id,), 1, 1), f"req-{rollout_id}"
        )
        ids.add(settled_fact(rollout, rollout.buffer.groups[prompt_id]).fact_id)
    assert len(ids) == 2


async def test_groups_that_settled_last_are_told_again_by_the_next_process(bus: Bus) -> None:
    """Two of three groups have settled, and the process ends before it has told anybody.

    Result: the next one tells these two, and the third when the rollout is cancelled; each once.
    """
    told: list[str] = []

    async def tell(_rollout: Rollout, group: Group) -> None:
        told.append(group.prompt_id)

    log, payloads = await stores(bus)
    histories = await history_store(bus)
    first = await Rollouts(log, payloads, histories, TokenRoom(0), tell_nobody).create(
        "r", RolloutSpec(("p0", "p1", "p2"), 1, 1), "req"
    )
    for number in range(2):
        await first.submit(Sample(f"t{number}", f"p{number}", 0), b"tokens")
    following = Rollouts(log, payloads, histories, TokenRoom(0), tell)
    await following.load()
    assert told == ["p0", "p1"]
    rollout = await following.find("r")
    await rollout.cancel()
    await rollout.tell_settled()
    assert told == ["p0", "p1", "p2"]


async def test_tokens_that_find_no_room_leave_nothing_behind_and_fit_once_others_are_released(
    bus: Bus,
) -> None:
    """2 MB have room. 1.5 MB of another trajectory do not fit, nor does anything until the first
    are released."""
    _, store = await stores(bus, ROOM_BYTES)
    await store.put("r", "first", b"x" * 1_000_000)
    for size_bytes in (1_500_000, 1):
        with pytest.raises(ResourceExhausted):
            await store.put("r", "second", b"y" * size_bytes)
    state = await stored(bus)
    assert state.messages == 2 and state.bytes < 1_010_000
    await store.release("r", "first")
    name = await store.put("r", "second", b"y" * 1_500_000)
    assert (
        b"".join([chunk async for chunk, _ in store.chunks("r", "second", name)])
        == b"y" * 1_500_000
    )


async def test_tokens_that_fit_exactly_are_stored_and_one_byte_more_is_refused_for_good(
    bus: Bus,
) -> None:
    _, store = await stores(bus, ROOM_BYTES)
    await store.put("r", "t", b"x" * 1_000_000)
    beside = (await stored(bus)).bytes - 1_000_000  # of two chunks
    await store.release("r", "t")
    most = ROOM_BYTES - 2 * beside  # in four chunks
    with pytest.raises(InvalidArgument, match=r"trajectory: .*TREADLE_ROLLOUT_PAYLOAD_BYTES"):
        await store.put("r", "t", b"x" * (most + 1))
    await store.put("r", "t", b"x" * most)


@pytest.mark.parametrize("settled", [True, False])
async def test_a_full_store_says_whether_batches_can_free_it(bus: Bus, settled: bool) -> None:
    """A group holds most of it, and has settled or not."""
    rollouts = Rollouts(
        *await stores(bus, ROOM_BYTES), await history_store(bus), TokenRoom(0), tell_nobody
    )
    rollout = await rollouts.create("r", RolloutSpec(("p0", "p1"), 2, 2), "req")
    await rollout.submit(Sample("t0", "p0", 0), b"x" * 1_500_000)
    if settled:
        await rollout.submit(Sample("t1", "p0", 1), b"x")
    with pytest.raises(ResourceExhausted) as full:
        await rollout.submit(Sample("t2", "p1", 0), b"x" * 1_000_000)
    assert full.value.retry_after_s
    assert full.value.reason == ("PAYLOADS_FULL" if settled else "PAYLOADS_HELD")
    assert ("take batches" in str(full.value)) is settled


async def test_a_sweep_removes_what_nobody_can_ask_for_and_nothing_else(bus: Bus) -> None:
    """One trajectory taken, one waiting. Past the time of repeats the taken one's tokens go, the
    other's stay; past the retention the whole rollout goes."""
    log, payloads = await stores(bus)
    histories = await history_store(bus)
    rollouts = Rollouts(log, payloads, histories, TokenRoom(0), tell_nobody)
    sweep = partial(rollouts.sweep, batch_replay_s=60.0, retention_s=1000.0)
    rollout = await rollouts.create("r", RolloutSpec(("p0", "p1"), 1, 1), "req")
    for index in range(2):
        await rollout.submit(Sample(f"t{index}", f"p{index}", 0), b"tokens")
    batch = await rollout.take(asks("b0"))
    now_s = rollout.touched_at_s
    await sweep(now_s + 59.0)
    assert await rollout.payloads_of(batch) == {"t0": b"tokens"}
    await sweep(now_s + 61.0)
    with pytest.raises(ExceptionGroup) as lost:
        await rollout.payloads_of(batch)
    assert lost.group_contains(FailedPrecondition)
    following = await rollout.take(asks("b1"))
    assert await rollout.payloads_of(following) == {"t1": b"tokens"}
    await sweep(now_s + 5000.0)
    with pytest.raises(NotFound):
        await rollouts.find("r")
    assert [entry async for entry in log.everything()] == []
