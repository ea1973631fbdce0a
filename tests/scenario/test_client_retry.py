"""Scenarios of calls that fail and are tried again, against fakes behind real servers."""

import asyncio
import socket

import grpc
import pytest
import treadle
from support.conditions import until
from support.fake_servicer import Refusal
from support.mesh_in_process import QUICK, fake_mesh, generate, one_trajectory
from support.processes import free_port

PROMPT = [1, 2, 3]
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def test_an_answer_lost_on_the_way_back_is_asked_for_again_under_the_same_request_id() -> (
    None
):
    """Each mutation is done, and then its answer is lost.

    Result: the repeat carries the same request_id and nothing is done twice.
    """
    async with fake_mesh("e0") as mesh, mesh.client() as client:
        lost = Refusal(UNAVAILABLE, "AWAY", after=True)
        for method in ("OpenTrajectory", "ScheduleStep", "CloseTrajectory"):
            mesh.scheduler.refuse_next(method, lost, lost)
        mesh.tools.refuse_next("OpenSession", lost)
        mesh.tools.refuse_next("Invoke", lost)
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        await generate(t, 4)
        session = await t.open_session("count", {})
        assert (await session.step({"action": 1})).output == "1"
        await t.close(reward=0.5)
        for method in ("OpenTrajectory", "ScheduleStep", "CloseTrajectory"):
            ids = [request.request_id for request in mesh.scheduler.requests(method)]
            assert len(ids) == 3
            assert len(set(ids)) == 1
        assert len(mesh.scheduler.trajectories) == 1
        assert len({request.request_id for request in mesh.tools.requests("OpenSession")}) == 1
        assert len(mesh.engines["e0"].requests("Generate")) == 1


async def test_a_step_that_is_held_in_line_has_the_whole_deadline_with_each_attempt() -> None:
    """The scheduler answers time and again that the step waits for room: it may for longer than the
    deadline, which is for a scheduler that says nothing."""
    schedule_s, held = (
        30.0,
        Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "STEP_HELD", retry_after_s=0.08),
    )
    timeouts = treadle.Timeouts(schedule_s=schedule_s)
    async with one_trajectory("e0", prompt=PROMPT, timeouts=timeouts) as (mesh, t):
        mesh.scheduler.refuse_next("ScheduleStep", *[held] * 6)
        await generate(t, 4)
        attempts = [call for call in mesh.scheduler.calls if call.method == "ScheduleStep"]
        assert len({attempt.request.request_id for attempt in attempts}) == 1
        assert attempts[-1].time_s - attempts[0].time_s >= 6 * 0.08
        assert attempts[-1].deadline_s is not None
        assert attempts[-1].deadline_s > schedule_s - 6 * 0.08


async def test_a_wait_that_would_pass_the_deadline_is_not_begun() -> None:
    async with (
        fake_mesh() as mesh,
        mesh.client(timeouts=treadle.Timeouts(control_s=20.0)) as client,
    ):
        mesh.scheduler.refuse_next(
            "OpenTrajectory", Refusal(UNAVAILABLE, "AWAY", retry_after_s=21.0)
        )
        with pytest.raises(treadle.TreadleError) as away:
            await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        assert (away.value.reason, away.value.retry_after_s, away.value.domain) == (
            "AWAY",
            21.0,
            "fake.treadle",
        )
        assert len(mesh.scheduler.requests("OpenTrajectory")) == 1


@pytest.mark.parametrize(
    ("refusals", "told"), [([], 1), ([Refusal(UNAVAILABLE, "AWAY", retry_after_s=60.0)], 0)]
)
async def test_a_client_waits_once_for_a_scheduler_that_is_away_at_its_end(
    refusals: list[Refusal], told: int
) -> None:
    """It has an open trajectory. Result: where that cannot be closed, the job's end is not told
    either, which would take as long again: the lease ends both."""
    async with fake_mesh("e0") as mesh:
        async with mesh.client() as client:
            await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
            mesh.scheduler.refuse_next("CloseTrajectory", *refusals)
        assert [len(mesh.scheduler.requests(each)) for each in ("OpenJob", "CloseTrajectory")] == [
            1,
            1,
        ]
        assert len(mesh.scheduler.requests("CloseJob")) == told


async def test_every_call_carries_a_deadline() -> None:
    async with one_trajectory("e0", prompt=PROMPT) as (mesh, t):
        async for _ in t.generate(treadle.Sampling(max_new_tokens=4)):
            break
        await t.tool("echo", {})
        await t.close()
        servicers = (mesh.scheduler, mesh.tools, mesh.engines["e0"])
        calls = [call for servicer in servicers for call in servicer.calls]
        assert {
            "OpenTrajectory",
            "ScheduleStep",
            "Generate",
            "Abort",
            "Invoke",
            "CloseTrajectory",
        } <= {c.method for c in calls}
        assert all(call.deadline_s is not None for call in calls)


@pytest.mark.parametrize("silent", [False, True], ids=["refuses connections", "says nothing"])
async def test_a_call_in_flight_and_a_later_one_say_that_their_client_was_closed(
    silent: bool,
) -> None:
    """Result: neither raises an error of gRPC, nor a CancelledError in a task that nobody has
    cancelled."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1] if silent else free_port()
        client = treadle.Client(f"127.0.0.1:{port}", retry=QUICK)
        await client.__aenter__()
        asked = asyncio.create_task(client.open(prompt_id="p0", sample=0, prompt=PROMPT))
        await asyncio.sleep(0.1)
        await client.__aexit__(None, None, None)
        with pytest.raises(treadle.TreadleError, match="CLIENT_CLOSED"):
            await asked
        with pytest.raises(treadle.TreadleError, match="CLIENT_CLOSED"):
            await client.open(prompt_id="p0", sample=0, prompt=PROMPT)


async def test_a_client_that_closes_does_not_wait_for_a_stream_that_never_ends() -> None:
    """Its step waits in a queue, and the sidecar answers all questions and ends no stream."""
    timeouts = treadle.Timeouts(cleanup_s=0.3)
    async with fake_mesh("e0") as mesh:
        client = await mesh.client(timeouts=timeouts).__aenter__()
        mesh.engines["e0"].slot.close()
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        running = asyncio.create_task(generate(t, 4))
        await until(lambda: mesh.engines["e0"].slot.waiting)
        async with asyncio.timeout(30.0):
            await client.__aexit__(None, None, None)
            assert await running == []


async def test_a_lease_is_renewed_again_after_a_renewal_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("support.fake_scheduler.JOB_LEASE_S", 0.3)
    async with fake_mesh("e0") as mesh, mesh.client() as client:
        mesh.scheduler.refuse_next(
            "RenewJob", Refusal(grpc.StatusCode.INTERNAL, "INTERNAL"), Refusal(UNAVAILABLE, "AWAY")
        )
        await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        await until(lambda: len(mesh.scheduler.requests("RenewJob")) >= 4)
