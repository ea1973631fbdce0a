"""The scheduler among others: facts in and out, predictions, priorities, leases, an outage of
NATS."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from support.conditions import until, until_said
from support.facts import hear
from support.fake_engine import FakeEngine, leased_engines
from support.nats_server import NatsServer
from support.processes import StartService
from support.rpc import answer_of, error_of, refusal_of, refused
from support.scheduler import SchedulerClient, generate, scheduler, scheduler_client
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_predictor.config import PredictorSettings
from treadle_predictor.wire import wire as predictor_wire
from treadle_runtime.bus import Bus, open_bus
from treadle_runtime.server import serving


class Mesh:
    """A scheduler with two fake sidecars, and all facts of the bus."""

    def __init__(
        self, client: SchedulerClient, engines: list[FakeEngine], heard: list[Any]
    ) -> None:
        self.client, self._heard = client, heard
        self.engines = {engine.engine_id: engine for engine in engines}

    def heard(self, kind: str) -> list[Any]:
        """The facts of a kind."""
        return [fact for fact in self._heard if type(fact).__name__ == kind]


@asynccontextmanager
async def mesh(nats_url: str, bus: Bus, **settings: Any) -> AsyncIterator[Mesh]:
    """Up for the time of the block, both engines registered."""
    heard = await hear(bus)
    async with (
        scheduler(nats_url, **settings) as client,
        leased_engines(bus, client.address, ["e0", "e1"]) as engines,
    ):
        world = Mesh(client, engines, heard)
        await until(lambda: len(world.heard("EngineJoined")) == 2, what="both engines joined")
        yield world


async def test_a_trajectory_is_told_to_the_world_from_opening_to_closing(
    nats_url: str, bus: Bus
) -> None:
    async with mesh(nats_url, bus) as world:
        await world.client.open("t", rollout_id="r", prompt_id="p1", sample=3, prompt_tokens=10)
        for turn in range(2):
            await generate(await world.client.step("t", turn), 5)
        await world.client.close("t", outcome=pb.OUTCOME_TRUNCATED, reward=0.5)
        await until(lambda: world.heard("TrajectoryClosed"), what="the closing is told")
        (closed,) = world.heard("TrajectoryClosed")
        (opened,) = world.heard("TrajectoryOpened")
        assert (opened.trajectory_id, opened.rollout_id, opened.prompt_id, opened.sample) == (
            "t",
            "r",
            "p1",
            3,
        )
        assert closed.outcome == pb.OUTCOME_TRUNCATED
        assert (closed.gen_tokens, closed.turns, closed.prompt_tokens) == (10, 2, 10)
        engine = world.engines[(await world.client.trajectory("t")).engine_id]
        await until(
            lambda: engine.requests("ReleasePrefix"), what="the engine may forget the context"
        )


async def test_predictions_come_after_each_step_and_are_published(nats_url: str, bus: Bus) -> None:
    async with (
        serving(
            PredictorSettings(nats_url=nats_url, listen="127.0.0.1:0"), predictor_wire
        ) as predictor,
        mesh(nats_url, bus, predictor=predictor.address) as world,
    ):
        await world.client.open("t", prompt_id="p", max_total_tokens=400)
        first = await until_said(
            lambda: world.client.trajectory("t"), lambda t: t.HasField("predicted_remaining_tokens")
        )
        assert first.predicted_remaining_tokens.p50 <= 400
        await generate(await world.client.step("t", 0), 6)
        await until(
            lambda: [f for f in world.heard("TrajectoryPredicted") if f.turn == 1],
            what="asked again",
        )
        later = await world.client.trajectory("t")
        assert later.predicted_remaining_tokens.p50 <= 394
        assert later.prediction_model_version
        directory = await world.client.call("GetDirectory", pb.GetDirectoryRequest())
        assert directory == pb.GetDirectoryResponse(predictor_address=predictor.address)


async def test_a_policy_that_does_not_preempt_issues_tickets_of_steps_that_cannot_be_evicted(
    nats_url: str, bus: Bus
) -> None:
    async with mesh(nats_url, bus) as world:
        await world.client.open("evictable")
        await world.client.set_policy(preempt=False)
        await world.client.open("firm")
        assert (await world.client.step("evictable", 0)).preemptible
        ticket = await world.client.step("firm", 0)
        assert ticket.HasField("preemptible")
        assert not ticket.preemptible


async def test_an_engine_that_falls_silent_is_lost_and_its_steps_go_on_elsewhere(
    nats_url: str, bus: Bus
) -> None:
    async with mesh(nats_url, bus, lease_ttl_s=1.0) as world:
        for number in range(4):
            await world.client.open(f"t{number}")
        tickets = [await world.client.step(f"t{number}", 0) for number in range(4)]
        silent = world.engines["e0"]
        silent.silent = True
        await until(lambda: world.heard("EngineLost"), what="the lease runs out")
        (lost,) = world.heard("EngineLost")
        assert (lost.engine_id, lost.reason) == ("e0", "LEASE_EXPIRED")
        for number, ticket in enumerate(tickets):
            if ticket.engine_id == "e0":
                again = await world.client.step(
                    f"t{number}", 0, replaces_ticket_id=ticket.ticket_id, resumed_tokens=2
                )
                assert (again.engine_id, again.revision) == ("e1", ticket.revision + 1)
        silent.silent = False
        await until(
            lambda: len(world.heard("EngineJoined")) == 3, what="it registers again by itself"
        )


async def test_a_sidecar_takes_its_engine_away(nats_url: str) -> None:
    async with scheduler(nats_url) as client:
        lease = await client.register("e0")
        listed = await client.call("ListEngines", pb.ListEnginesRequest())
        assert [engine.info.engine_id for engine in listed.engines] == ["e0"]
        request = pb.DeregisterEngineRequest(
            request_id="d", lease_id=lease.lease_id, engine_id="e0"
        )
        for _ in range(2):  # a repeat is answered from the record
            await client.call("DeregisterEngine", request)
        assert not (await client.call("ListEngines", pb.ListEnginesRequest())).engines


async def test_the_switch_is_a_compare_and_swap(nats_url: str) -> None:
    """Of two migrators with the same revision in hand one wins; its repeat gets the same answer."""
    async with scheduler(nats_url) as client:
        for engine_id in ("e0", "e1", "e2"):
            await client.register(engine_id)
        before = await client.open("t")
        switches = [
            pb.SwitchEngineRequest(
                request_id=f"s-{target}",
                trajectory_id="t",
                expected_revision=before.revision,
                target_engine_id=target,
            )
            for target in ("e1", "e2")
        ]
        answers = await asyncio.gather(
            *[client.call("SwitchEngine", s) for s in switches], return_exceptions=True
        )
        won = [answer for answer in answers if isinstance(answer, pb.SwitchEngineResponse)]
        (lost,) = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert [answer.revision for answer in won] == [before.revision + 1]
        assert error_of(lost).reason == "REVISION_MISMATCH"
        winner = switches[0] if isinstance(answers[0], pb.SwitchEngineResponse) else switches[1]
        assert (await client.call("SwitchEngine", winner)).revision == before.revision + 1
        assert (await client.step("t", 0)).engine_id == winner.target_engine_id


@pytest.mark.usefixtures("impatient")
async def test_while_nats_is_away_no_ticket_is_given_that_a_restart_could_forget(
    nats_server: NatsServer,
) -> None:
    """Result: UNAVAILABLE during the outage, and afterwards one ticket for the same request."""
    async with scheduler(nats_server.url) as client:
        await answer_of(lambda: client.register("e0"))
        await answer_of(lambda: client.open("t", request_id="o"))
        nats_server.kill()
        for _ in range(2):
            assert (
                await refusal_of(client.step("t", 0, request_id="s"))
            ).code is grpc.StatusCode.UNAVAILABLE
        nats_server.start()
        ticket = await answer_of(lambda: client.step("t", 0, request_id="s"))
        assert ticket.turn == 0
    async with scheduler(nats_server.url) as restarted:
        assert await restarted.step("t", 0, request_id="s") == ticket


async def test_while_nats_is_away_no_opening_is_answered_that_a_restart_could_forget(
    nats_server: NatsServer, start_service: StartService
) -> None:
    """No engine is there, and the scheduler is killed as soon as it has answered. Result:
    UNAVAILABLE during the outage, afterwards one trajectory for the same request, and the next
    scheduler gives it the first engine."""
    request = pb.OpenTrajectoryRequest(request_id="o", prompt_id="p", prompt_tokens=10)
    process = await start_service("treadle_scheduler")
    async with scheduler_client(process.address) as client:
        nats_server.kill()
        for _ in range(2):
            assert (
                await refusal_of(client.call("OpenTrajectory", request))
            ).code is grpc.StatusCode.UNAVAILABLE
        nats_server.start()
        opened = await answer_of(lambda: client.call("OpenTrajectory", request))
        process.kill()
    async with scheduler_client((await start_service("treadle_scheduler")).address) as restarted:
        # It listens at another address, and leads once the lease of the killed one has ended.
        again = await answer_of(lambda: restarted.call("OpenTrajectory", request))
        assert again.trajectory.trajectory_id == opened.trajectory.trajectory_id
        await restarted.register("e0")
        assert (await restarted.step(opened.trajectory.trajectory_id, 0)).engine_id == "e0"
        listed = await restarted.call("ListTrajectories", pb.ListTrajectoriesRequest())
        assert len(listed.trajectories) == 1


@pytest.mark.usefixtures("impatient")
async def test_engines_and_jobs_keep_their_leases_while_nats_is_away(
    nats_server: NatsServer,
) -> None:
    """For two leases, in which no renewal is taken. Result: no engine has had to register again,
    and the job's trajectory is open."""
    lease_s = 5.0
    async with (
        open_bus(nats_server.url, "test") as bus,
        scheduler(nats_server.url, lease_ttl_s=lease_s, job_lease_s=lease_s) as client,
        leased_engines(bus, client.address, ["e0", "e1"]) as engines,
    ):
        await until(lambda: all(engine.lease_id for engine in engines))
        leases = [engine.lease_id for engine in engines]
        job = await client.call("OpenJob", pb.OpenJobRequest(request_id="j"))
        await client.open("t", job_id=job.job_id)
        nats_server.kill()
        await asyncio.sleep(2 * lease_s)
        with refused(
            "NOT_LEADER", grpc.StatusCode.UNAVAILABLE, says="it is not known which scheduler leads"
        ):
            await client.call("RenewJob", pb.RenewJobRequest(job_id=job.job_id))
        nats_server.start()
        await answer_of(lambda: client.call("RenewJob", pb.RenewJobRequest(job_id=job.job_id)))
        await asyncio.sleep(lease_s / 2)
        assert len(await client.engines()) == 2
        assert [engine.lease_id for engine in engines] == leases
        assert (await client.trajectory("t")).state == pb.TRAJECTORY_STATE_IDLE
