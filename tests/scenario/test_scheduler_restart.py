"""The scheduler is killed in the middle of many trajectories, and comes back: nothing is lost,
nothing runs twice."""

import asyncio
import uuid
from collections import Counter
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from support.conditions import until, until_said
from support.fake_engine import FakeEngine, leased_engines
from support.processes import ServiceProcess, StartService, free_port
from support.rpc import refusal_of
from support.scheduler import generate
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_runtime.bus import Bus

TRAJECTORIES = 24
TURNS = 6
TOKENS = 4
CALL_TIMEOUT_S = 2.0
RETRY_S = 0.05
ALL_DONE_S = 150.0
# The last: it waits for room on an engine, and is to ask again.
TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
RECONNECTS = (("grpc.max_reconnect_backoff_ms", 200), ("grpc.min_reconnect_backoff_ms", 100))


class Loop:
    """A client as simple as it may be: each call is repeated with the same request_id until it is
    answered."""

    def __init__(self, scheduler: grpc.aio.Channel) -> None:
        self.scheduler = scheduler_pb2_grpc.SchedulerServiceStub(scheduler)
        self.channels: dict[str, grpc.aio.Channel] = {}
        self.tickets: Counter[str] = Counter()
        self.retries = 0
        self.steps = 0

    def has_run(self, steps: int) -> bool:
        """Whether so many steps are over."""
        return self.steps >= steps

    async def call(self, rpc: str, request: object) -> Any:
        """Answered, after as many tries as it takes."""
        while True:
            try:
                return await getattr(self.scheduler, rpc)(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in TRANSIENT:
                    raise
                self.retries += 1
            await asyncio.sleep(RETRY_S)

    async def run(self, number: int) -> None:
        """One trajectory from opening to closing."""
        request = pb.OpenTrajectoryRequest(
            request_id=uuid.uuid4().hex, prompt_id=f"p{number % 4}", prompt_tokens=10
        )
        name = (await self.call("OpenTrajectory", request)).trajectory.trajectory_id
        for turn in range(TURNS):
            step = pb.ScheduleStepRequest(
                request_id=uuid.uuid4().hex,
                trajectory_id=name,
                turn=turn,
                context_tokens=10 + turn * TOKENS,
                max_new_tokens=TOKENS,
            )
            ticket = (await self.call("ScheduleStep", step)).ticket
            self.tickets[ticket.ticket_id] += 1
            await self.generate(ticket)
            self.steps += 1
            await asyncio.sleep(0.01)
        await self.call(
            "CloseTrajectory",
            pb.CloseTrajectoryRequest(
                request_id=uuid.uuid4().hex, trajectory_id=name, outcome=pb.OUTCOME_FINISHED
            ),
        )

    async def generate(self, ticket: Ticket) -> None:
        """Reads the step's stream to its end."""
        if ticket.engine_address not in self.channels:
            self.channels[ticket.engine_address] = grpc.aio.insecure_channel(ticket.engine_address)
        await generate(ticket, TOKENS, self.channels[ticket.engine_address])

    async def close(self) -> None:
        """Of the channels to sidecars."""
        for channel in self.channels.values():
            await channel.close()


@pytest.mark.timeout(300)
async def test_a_killed_scheduler_comes_back_and_every_trajectory_finishes_with_no_step_run_twice(
    bus: Bus, start_service: StartService
) -> None:
    """Result: each (trajectory, turn) ran once, each ticket was issued for one step, all closings
    are known with all tokens."""
    port = {
        "TREADLE_SCHEDULER_LISTEN": f"127.0.0.1:{free_port()}",
        "TREADLE_SCHEDULER_LEASE_TTL_S": "5",
    }
    process: ServiceProcess = await start_service("treadle_scheduler", port)
    async with (
        grpc.aio.insecure_channel(process.address, options=RECONNECTS) as channel,
        leased_engines(bus, process.address, ["e0", "e1"]) as engines,
    ):
        loop = Loop(channel)
        async with asyncio.timeout(ALL_DONE_S), asyncio.TaskGroup() as group:
            for number in range(TRAJECTORIES):
                group.create_task(loop.run(number))
            for kill_after in (
                TRAJECTORIES,
                3 * TRAJECTORIES,
            ):  # in the first turns, and half through
                await until(partial(loop.has_run, kill_after), ALL_DONE_S)
                process.kill()
                process = await start_service("treadle_scheduler", port)
        await loop.close()
        assert loop.retries > 0, "the clients felt the outage"
        check_each_step_ran_once(loop, engines)
        await check_every_trajectory_is_finished(loop)


def check_each_step_ran_once(loop: Loop, engines: list[FakeEngine]) -> None:
    """By the engines' own count, and by the tickets."""
    ran = sum((engine.ran for engine in engines), Counter[tuple[str, int]]())
    assert len(ran) == TRAJECTORIES * TURNS
    assert set(ran.values()) == {1}
    assert len(loop.tickets) == TRAJECTORIES * TURNS
    assert set(loop.tickets.values()) == {1}
    assert not [refused for engine in engines for refused in engine.refused]
    assert all(engine.ran for engine in engines), "both engines had work"


async def check_every_trajectory_is_finished(loop: Loop) -> None:
    """All tokens are counted once the last facts are heard."""

    async def listed() -> list[pb.Trajectory]:
        return list(
            (await loop.call("ListTrajectories", pb.ListTrajectoriesRequest())).trajectories
        )

    all_counted = [TURNS * TOKENS] * TRAJECTORIES
    found = await until_said(listed, lambda said: [each.gen_tokens for each in said] == all_counted)
    assert {(each.state, each.next_turn) for each in found} == {
        (pb.TRAJECTORY_STATE_FINISHED, TURNS)
    }


async def test_an_orderly_end_stores_what_was_opened_just_before(
    start_service: StartService,
) -> None:
    """SIGTERM in place of SIGKILL. Result: the process ends with 0, and the next one lists the same
    trajectories."""
    env = {"TREADLE_SCHEDULER_LISTEN": f"127.0.0.1:{free_port()}"}
    process = await start_service("treadle_scheduler", env)
    async with grpc.aio.insecure_channel(process.address, options=RECONNECTS) as channel:
        loop = Loop(channel)
        for number in range(5):
            opening = pb.OpenTrajectoryRequest(
                request_id=f"o{number}", prompt_id="p", prompt_tokens=5
            )
            await loop.call("OpenTrajectory", opening)
        before = await loop.call("ListTrajectories", pb.ListTrajectoriesRequest())
        process.terminate()
        assert await process.wait() == 0
        await start_service("treadle_scheduler", env)
        assert await loop.call("ListTrajectories", pb.ListTrajectoriesRequest()) == before


async def test_a_request_made_before_the_kill_gets_the_same_answer_after_it(
    start_service: StartService,
) -> None:
    """OpenTrajectory, ScheduleStep, CloseTrajectory, SetPolicy and RegisterEngine, each repeated
    after a SIGKILL."""
    env = {"TREADLE_SCHEDULER_LISTEN": f"127.0.0.1:{free_port()}"}
    process = await start_service("treadle_scheduler", env)
    engine = engine_pb2.EngineInfo(
        engine_id="e0", address="127.0.0.1:1", slot_limit=2, weight_version="v0"
    )
    policy = pb.Policy(ordering=pb.ORDERING_FCFS, placement=pb.PLACEMENT_RULE_PINNED)
    requests = [
        ("SetPolicy", pb.SetPolicyRequest(request_id="p", policy=policy)),
        ("RegisterEngine", pb.RegisterEngineRequest(request_id="e", info=engine)),
        (
            "OpenTrajectory",
            pb.OpenTrajectoryRequest(request_id="o1", prompt_id="p", prompt_tokens=5),
        ),
        (
            "OpenTrajectory",
            pb.OpenTrajectoryRequest(
                request_id="o", trajectory_id="t", prompt_id="p", prompt_tokens=5
            ),
        ),
        (
            "ScheduleStep",
            pb.ScheduleStepRequest(
                request_id="s", trajectory_id="t", turn=0, context_tokens=5, max_new_tokens=3
            ),
        ),
    ]
    async with grpc.aio.insecure_channel(process.address, options=RECONNECTS) as channel:
        loop = Loop(channel)
        before = [await loop.call(rpc, request) for rpc, request in requests]
        process.kill()
        await start_service("treadle_scheduler", env)
        after = [await loop.call(rpc, request) for rpc, request in requests]
        assert after[:2] == before[:2]
        assert after[4] == before[4], "the same ticket"
        for one, other in zip(before[2:4], after[2:4], strict=True):
            assert one.trajectory.trajectory_id == other.trajectory.trajectory_id
        current = await loop.call("GetPolicy", pb.GetPolicyRequest())
        assert current == pb.GetPolicyResponse(
            policy=pb.Policy(**{**_fields(policy), "objective": pb.OBJECTIVE_MAKESPAN})
        )
        other_request = pb.ScheduleStepRequest(**{**_fields(requests[4][1]), "request_id": "other"})
        assert (
            await refusal_of(loop.call("ScheduleStep", other_request))
        ).reason == "STEP_IN_FLIGHT"


def _fields(message: Any) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}
