"""Scenarios of whole rollouts through Client.rollout, against fakes behind real servers."""

import asyncio

import grpc
import pytest
import treadle
from support.conditions import until
from support.fake_engine import Script, token_at
from support.fake_servicer import Refusal
from support.mesh_in_process import FakeMesh, fake_mesh, generate
from treadle.scheduler.v1 import scheduler_pb2

PROMPTS = [
    treadle.Prompt("p0", [1, 2], data="first"),
    treadle.Prompt("p1", [3, 4, 5], data="second"),
]


async def one_turn(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
    await generate(trajectory, 3)
    return float(trajectory.sample)


async def test_every_sample_comes_back_in_order_and_can_be_taken_as_a_batch(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    """Two prompts, three samples each, at most two at once.

    Result: six whole trajectories with their rewards in order; events tell of each; get_batch gives
    the same tokens.
    """
    events: list[treadle.RolloutEvent] = []
    at_once: list[int] = []

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        at_once.append(len(mesh.scheduler.open_trajectories))
        return await one_turn(trajectory, prompt)

    result = await client.rollout(
        PROMPTS, agent, samples_per_prompt=3, concurrency=2, on_event=events.append
    )
    assert [(t.prompt_id, t.sample) for t in result.trajectories] == [
        (p.id, s) for p in PROMPTS for s in range(3)
    ]
    assert max(at_once) <= 2
    for t in result.trajectories:
        prompt = next(p.tokens for p in PROMPTS if p.id == t.prompt_id)
        assert t.tokens == prompt + [token_at(prompt, i) for i in range(3)]
        assert len(t.tokens) == len(t.loss_mask) == len(t.logprobs)
        assert (t.outcome, t.reward, t.kept, t.error, t.drop_reason) == (
            "finished",
            float(t.sample),
            True,
            "",
            "",
        )
        assert [s.kind for s in t.spans] == ["queue", "prefill", "decode"]
    assert not mesh.scheduler.open_trajectories
    kinds = [event.kind for event in events]
    assert [kinds.count(kind) for kind in ("opened", "step", "closed", "settled")] == [6, 6, 6, 2]
    assert all(event.gen_tokens == 3 for event in events if event.kind == "closed")

    batch = await client.get_batch(result.rollout_id, max_groups=2)
    assert batch.exhausted
    taken = {(t.prompt_id, t.sample): t for group in batch.groups for t in group.trajectories}
    for t in result.trajectories:
        got = taken[t.prompt_id, t.sample]
        assert (got.tokens, got.loss_mask, got.logprobs) == (t.tokens, t.loss_mask, t.logprobs)
        assert (got.version_spans, got.reward, got.turns) == (t.version_spans, t.reward, 1)


async def test_a_batch_whose_stream_breaks_is_read_again_and_confirmed_once_it_is_whole(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    """The stream breaks before its last message, twice; the confirmation is refused, which costs
    nothing but time.

    Result: one batch under one request_id, each trajectory once.
    """
    lost = Refusal(grpc.StatusCode.UNAVAILABLE, "AWAY")
    result = await client.rollout(PROMPTS, one_turn, samples_per_prompt=2)
    mesh.rollout.refuse_next("StreamBatch", lost, lost)
    mesh.rollout.refuse_next("ConfirmBatch", Refusal(grpc.StatusCode.NOT_FOUND, "BATCH_NOT_FOUND"))
    batch = await client.get_batch(result.rollout_id, max_groups=2)
    taken = [t.trajectory_id for group in batch.groups for t in group.trajectories]
    assert sorted(taken) == sorted(t.trajectory_id for t in result.trajectories)
    [asked] = {request.request_id for request in mesh.rollout.requests("StreamBatch")}
    assert [r.batch_request_id for r in mesh.rollout.requests("ConfirmBatch")] == [asked]


@pytest.mark.parametrize("reason", ["PAYLOADS_FULL", "PAYLOADS_HELD"])
async def test_a_trajectory_that_finds_the_store_full_is_sent_again_as_often_as_it_takes(
    mesh: FakeMesh, client: treadle.Client, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    """Where no batch can free room, one warning says so."""
    full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, retry_after_s=0.02)
    mesh.rollout.refuse_next("SubmitTrajectory", *[full] * 5)
    result = await client.rollout(PROMPTS[:1], one_turn, samples_per_prompt=1)
    assert [(t.kept, t.error) for t in result.trajectories] == [(True, "")]
    assert len(mesh.rollout.requests("SubmitTrajectory")) == 6
    assert len(caplog.records) == (reason == "PAYLOADS_HELD")


async def test_an_agent_that_raises_fails_its_trajectory_and_no_other(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        if trajectory.sample == 1:
            raise ValueError("no move\nis legal")
        return await one_turn(trajectory, prompt)

    result = await client.rollout(PROMPTS, agent, samples_per_prompt=3)
    assert [t.outcome for t in result.trajectories] == ["finished", "failed", "finished"] * 2
    failed = result.trajectories[1]
    assert (failed.error, failed.kept, failed.drop_reason) == (
        "ValueError: no move is legal",
        False,
        "failed",
    )
    outcomes = list(mesh.scheduler.outcomes.values())
    assert outcomes.count(scheduler_pb2.OUTCOME_FAILED) == 2
    assert not mesh.scheduler.open_trajectories


async def test_a_trajectory_that_cannot_be_opened_fails_alone_and_its_group_hears_of_it(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    mesh.scheduler.refuse_next("OpenTrajectory", Refusal(grpc.StatusCode.PERMISSION_DENIED, "NO"))
    result = await client.rollout(PROMPTS[:1], one_turn, samples_per_prompt=2, concurrency=1)
    assert [t.outcome for t in result.trajectories] == ["failed", "finished"]
    assert result.trajectories[0].error.startswith("open: PERMISSION_DENIED NO")
    handed_in = [request.trajectory for request in mesh.rollout.requests("SubmitTrajectory")]
    assert [(t.sample, t.failed) for t in handed_in] == [(0, True), (1, False)]


async def test_the_first_k_settle_a_group_and_its_siblings_are_cancelled() -> None:
    """Four samples, two wanted; samples 2 and 3 hang in the middle of their step on an engine that
    holds.

    Result: the two are kept, the others are aborted on the engine and closed as cancelled, the
    other group is not touched.
    """
    async with fake_mesh("e0") as mesh, mesh.client() as client:
        engine = mesh.engines["e0"]
        engine.script = Script(hold_at=2, times=2, only_max_new_tokens=8)
        waiting = set()

        async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
            if prompt.id == "p0" and trajectory.sample >= 2:
                async for _ in trajectory.generate(treadle.Sampling(max_new_tokens=8)):
                    waiting.add(trajectory.sample)
            elif prompt.id == "p0":
                await until(lambda: waiting == {2, 3})
            return await one_turn(trajectory, prompt)

        result = await client.rollout(
            PROMPTS, agent, samples_per_prompt=4, keep_per_prompt=2, concurrency=4
        )
        first, second = result.trajectories[:4], result.trajectories[4:]
        assert [t.outcome for t in first] == ["finished", "finished", "cancelled", "cancelled"]
        assert [t.kept for t in first] == [True, True, False, False]
        assert [len(t.steps) for t in first] == [1, 1, 1, 1]
        assert all(t.steps[0].finish_reason == "aborted" for t in first[2:])
        assert len(engine.aborted) >= 2
        await until(lambda: not engine.running)
        assert sum(t.kept for t in second) == 2
        assert not mesh.scheduler.open_trajectories


async def test_a_cancelled_caller_leaves_no_trajectory_open_and_no_step_running(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    """All trajectories hang in a step; the caller is cancelled, and once more while it cleans up.

    Result: every trajectory is closed as cancelled, every step is aborted, the rollout service
    hears of it.
    """
    for engine in mesh.engines.values():
        engine.script = Script(hold_at=0, times=100)
    running = asyncio.ensure_future(client.rollout(PROMPTS, one_turn, samples_per_prompt=3))
    await until(lambda: sum(len(engine.running) for engine in mesh.engines.values()) == 6)
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(mesh.scheduler.outcomes) == 6
    assert set(mesh.scheduler.outcomes.values()) == {scheduler_pb2.OUTCOME_CANCELLED}
    assert not mesh.scheduler.open_trajectories
    assert mesh.rollout.cancelled == {"r-0"}
    await until(lambda: not any(engine.running for engine in mesh.engines.values()))
    assert sum(len(engine.aborted) for engine in mesh.engines.values()) == 6


async def test_a_cap_reached_counts_as_truncated_whether_the_agent_minds_it_or_not(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    async def greedy(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        while True:
            await one_turn(trajectory, prompt)

    result = await client.rollout(PROMPTS[:1], greedy, samples_per_prompt=2, max_total_tokens=5)
    assert [(t.outcome, sum(t.loss_mask), t.error) for t in result.trajectories] == [
        ("truncated", 5, "")
    ] * 2
    assert all(
        request.trajectory.truncated for request in mesh.rollout.requests("SubmitTrajectory")
    )


async def test_an_agent_may_say_the_outcome_itself_and_a_pin_reaches_the_scheduler(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> None:
        await one_turn(trajectory, prompt)
        await trajectory.close(reward=0.25, outcome="truncated")

    result = await client.rollout(
        PROMPTS[:1], agent, samples_per_prompt=2, pin=lambda prompt, sample: f"e{sample % 2}"
    )
    assert [(t.outcome, t.reward) for t in result.trajectories] == [("truncated", 0.25)] * 2
    pinned = {r.sample: r.pinned_engine_id for r in mesh.scheduler.requests("OpenTrajectory")}
    assert pinned == {0: "e0", 1: "e1"}


async def test_a_mesh_without_a_rollout_service_or_tools_says_so(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    mesh.scheduler.directory.Clear()
    for call, reason in (
        (client.rollout(PROMPTS, one_turn), "NO_ROLLOUT_SERVICE"),
        (client.score("t-1", "exact_match", {}), "NO_TOOLS_SERVICE"),
    ):
        with pytest.raises(treadle.TreadleError) as refused:
            await call
        assert (refused.value.code, refused.value.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            reason,
        )


async def test_an_error_of_a_callback_comes_out_as_itself_and_ends_the_rollout(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    """Not in an ExceptionGroup, although samples run in a task group."""

    def refuse_second(prompt: treadle.Prompt, sample: int) -> str:
        if sample == 1:
            raise ValueError("no engine is named")
        return "e0"

    with pytest.raises(ValueError, match="no engine is named"):
        await client.rollout(PROMPTS, one_turn, samples_per_prompt=3, pin=refuse_second)
    assert not mesh.scheduler.open_trajectories
    assert len(mesh.rollout.requests("CancelRollout")) == 1
