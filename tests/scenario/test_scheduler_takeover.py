"""Several schedulers run, and one of them leads: it is killed, stopped, or asked to end, and
another one goes on.

Real processes: nats-server, schedulers, a migrator, sidecars in front of fake engines; the client
is in this process.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
import treadle
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.conditions import until, until_said
from support.facts import hear
from support.fake_migration_peers import MigratorCalls
from support.fake_sglang import expected, fake_sglang
from support.mesh_in_process import QUICK, generate
from support.nats_server import NatsServer
from support.processes import ServiceProcess, StartService, free_port, hold_still
from support.rpc import refusal_of, status_of
from support.scheduler import scheduler_client
from support.tcp_proxy import proxy
from treadle.common.v1 import status_pb2
from treadle.migrator.v1 import migrator_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_cli.mesh.scheduler import reach_scheduler
from treadle_runtime.buckets import entries_of
from treadle_runtime.bus import Bus
from treadle_runtime.server import ALIVE, TASK_FAILED_EXIT_CODE
from treadle_scheduler.lease import BUCKET, LEADER_KEY

TOKENS = 12
TURNS = 4
TRAJECTORIES = 16
SLOTS = 4  # of each of two engines: half of the steps wait for a ticket
OBSERVED = 9
DONE_S = 120.0
CALL_S = 10.0
LEAD_S = 5.0  # without a renewal, until another scheduler leads: more than a busy machine's pauses
LEASE_S = 6.0  # of engines and of jobs: an old leader finds them overdue when it goes on
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)

pytestmark = pytest.mark.timeout(300)


class Mesh:
    """Schedulers, the first of which led at first, and two engines with their sidecars."""

    def __init__(self, start: StartService) -> None:
        self._start = start
        self._settings = {
            f"TREADLE_SCHEDULER_{name}": str(LEASE_S) for name in ("LEASE_TTL_S", "JOB_LEASE_S")
        }
        self._settings["TREADLE_SCHEDULER_LEADER_TTL_S"] = str(LEAD_S)
        self._own: list[dict[str, str]] = []  # settings of each scheduler beside those of all
        self.schedulers: list[ServiceProcess] = []
        self.sidecars: list[ServiceProcess] = []

    @property
    def addresses(self) -> str:
        """Of the schedulers, as clients and sidecars take them."""
        return ",".join(process.address for process in self.schedulers)

    async def add_scheduler(self, nats_url: str = "") -> None:
        """Start one more. nats_url: where it reaches NATS, if not where the others do."""
        self._own.append({"TREADLE_NATS_URL": nats_url} if nats_url else {})
        address = f"127.0.0.1:{free_port()}"
        self.schedulers.append(await self._start_at(address, self._own[-1]))

    async def restart_scheduler(self, index: int) -> None:
        """Start one that has ended, at its address."""
        address = self.schedulers[index].address
        self.schedulers[index] = await self._start_at(address, self._own[index])

    async def add_engine(self, stack: AsyncExitStack) -> None:
        """Start a fake engine, and its sidecar, which follows the schedulers."""
        engine = await stack.enter_async_context(fake_sglang(token_s=0.02))
        settings = {
            "ENGINE_ID": f"e{len(self.sidecars)}",
            "ENGINE_URL": engine.url,
            "SCHEDULER": self.addresses,
            "SLOTS": str(SLOTS),
            "PROBE_S": "0",
        }
        environment = {f"TREADLE_SIDECAR_{name}": value for name, value in settings.items()}
        self.sidecars.append(await self._start("treadle_sidecar", environment))

    async def health(self, index: int, service: str = "") -> int:
        """As the scheduler says."""
        async with grpc.aio.insecure_channel(self.schedulers[index].address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            return int(
                (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=CALL_S)).status
            )

    async def until_leads(self, index: int) -> None:
        """Return once this scheduler serves."""
        await until_said(partial(self.health, index), lambda status: status == SERVING, DONE_S)

    async def let_first_lead(self) -> None:
        """Start all schedulers again, since another one has taken over, as on a busy machine the
        first may have been late."""
        others = range(1, len(self.schedulers))
        for process in self.schedulers:
            await process.end()
        await self.restart_scheduler(0)
        await self.until_leads(0)
        for index in others:
            await self.restart_scheduler(index)

    async def first_has(self, engines: int) -> bool:
        """Return once so many engines are registered at the first scheduler; False where it does
        not lead any more."""
        async with scheduler_client(self.schedulers[0].address) as calls:
            try:
                await calls.until_registered(engines)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                return False
        return True

    async def state(self, index: int) -> dict[str, Any]:
        """All that a scheduler answers about its state, but for what changes by itself."""
        async with scheduler_client(self.schedulers[index].address) as calls:
            listed = (
                await calls.call("ListTrajectories", pb.ListTrajectoriesRequest())
            ).trajectories
            return {
                "trajectories": {each.trajectory_id: each for each in listed},
                "engines": sorted(each.engine_id for each in await calls.engines()),
                "policy": await calls.call("GetPolicy", pb.GetPolicyRequest()),
            }

    async def _start_at(self, listen: str, settings: dict[str, str]) -> ServiceProcess:
        own = {**self._settings, "TREADLE_SCHEDULER_LISTEN": listen, **settings}
        return await self._start("treadle_scheduler", own)


@asynccontextmanager
async def mesh(
    start: StartService, schedulers: int = 2, engines: int = 2, first_nats_url: str = ""
) -> AsyncIterator[Mesh]:
    """The first scheduler leads, and the engines are registered."""
    made = Mesh(start)
    async with AsyncExitStack() as stack:
        for index in range(schedulers):
            await made.add_scheduler(first_nats_url if index == 0 else "")
            if index == 0:
                await made.until_leads(0)
        for _ in range(engines):
            await made.add_engine(stack)
        while not await made.first_has(engines):
            await made.let_first_lead()
        yield made


class Work:
    """TRAJECTORIES of one client, each with TURNS turns of TOKENS tokens."""

    def __init__(self, client: treadle.Client) -> None:
        self._client = client
        self.turns = 0

    async def run_all(self) -> None:
        """Return once all are closed, with the tokens of an undisturbed run."""
        async with asyncio.timeout(DONE_S), asyncio.TaskGroup() as group:
            for sample in range(TRAJECTORIES):
                group.create_task(self._run(sample))

    def has_run(self, turns: int) -> bool:
        """Whether so many turns are over, of all trajectories together."""
        return self.turns >= turns

    async def _run(self, sample: int) -> None:
        context = [5, 6, 10 + sample]
        trajectory = await self._client.open(prompt_id="p", sample=sample, prompt=context)
        for _ in range(TURNS):
            tokens = await generate(trajectory, TOKENS, ignore_eos=True)
            assert tokens == expected(context, TOKENS)
            context += [*tokens, OBSERVED]
            trajectory.observe([OBSERVED])
            self.turns += 1
        await trajectory.close()


async def until_all_is_counted(mesh: Mesh, index: int) -> None:
    """Every trajectory is finished, with all its tokens, once the last facts are heard."""
    finished = [(pb.TRAJECTORY_STATE_FINISHED, TURNS, TURNS * TOKENS)] * TRAJECTORIES

    async def said() -> list[tuple[int, int, int]]:
        state = await mesh.state(index)
        return [
            (each.state, each.next_turn, each.gen_tokens) for each in state["trajectories"].values()
        ]

    await until_said(said, lambda counted: counted == finished)


async def test_a_process_that_stands_by_is_alive_serves_nothing_and_says_who_leads(
    start_service: StartService,
) -> None:
    """Nobody waits for it when it hangs either."""
    async with mesh(start_service, engines=0) as made:
        first, second = made.schedulers
        assert [await made.health(index) for index in (0, 1)] == [SERVING, NOT_SERVING]
        assert [await made.health(index, ALIVE) for index in (0, 1)] == [SERVING, SERVING]
        async with scheduler_client(second.address) as calls:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await calls.open("t")
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            info = status_pb2.ErrorInfo.FromString(status_of(raised.value).details[0].value)
            assert (info.reason, dict(info.metadata)) == ("NOT_LEADER", {"leader": first.address})
            refused = await refusal_of(calls.call("GetPolicy", pb.GetPolicyRequest()))
            assert refused.reason == "NOT_LEADER" and refused.retry_after_s
        async with reach_scheduler(f"{second.address},{first.address}") as stub:
            await stub.GetPolicy(pb.GetPolicyRequest(), timeout=CALL_S)
        async with treadle.Client(f"{second.address}, {first.address}", retry=QUICK) as client:
            await client.open(prompt_id="p", sample=0, prompt=[1])
            hold_still(second.pid)
            await client.open(prompt_id="p", sample=1, prompt=[1])
        async with treadle.Client(f"{second.address},{first.address}", retry=QUICK) as client:
            await client.open(prompt_id="p", sample=2, prompt=[1])
        second.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_another_scheduler_goes_on_with_everything_when_the_leader_dies_hangs_or_is_asked_to_end(
    start_service: StartService, number: signal.Signals
) -> None:
    """While steps run and others wait for a ticket. Result: every trajectory has the tokens of an
    undisturbed run, and each is counted once; engines and policy are the same; the first scheduler
    stands by when it is there again."""
    async with mesh(start_service) as made, treadle.Client(made.addresses, seed=0) as client:
        async with scheduler_client(made.schedulers[0].address) as calls:
            await calls.set_policy(preempt=False)
        before = await made.state(0)
        work = Work(client)
        running = asyncio.create_task(work.run_all())
        await until(lambda: work.has_run(TRAJECTORIES), DONE_S)
        os.kill(made.schedulers[0].pid, number)
        await made.until_leads(1)
        await running
        await until_all_is_counted(made, 1)
        after = await made.state(1)
        assert (after["engines"], after["policy"]) == (before["engines"], before["policy"])
        if number == signal.SIGSTOP:
            os.kill(made.schedulers[0].pid, signal.SIGCONT)
        expected_code = {
            signal.SIGKILL: -signal.SIGKILL,
            signal.SIGSTOP: TASK_FAILED_EXIT_CODE,
            signal.SIGTERM: 0,
        }
        assert await made.schedulers[0].wait() == expected_code[number]
        await made.restart_scheduler(0)
        assert [await made.health(index) for index in (0, 1)] == [NOT_SERVING, SERVING]


async def test_a_leader_that_was_stopped_and_replaced_changes_nothing_when_it_goes_on(
    start_service: StartService, bus: Bus
) -> None:
    """By its own clock all leases are overdue then, and calls of clients wait in its socket.

    Result: it closes nothing, tells nobody anything, writes nothing, answers no call, and ends.
    """
    heard = await hear(bus)
    async with mesh(start_service) as made, treadle.Client(made.addresses, seed=0) as client:
        trajectory = await client.open(prompt_id="p", sample=0, prompt=[5, 6, 7])
        first = made.schedulers[0]
        async with scheduler_client(first.address) as calls:
            hold_still(first.pid)
            requests = {
                "OpenTrajectory": pb.OpenTrajectoryRequest(
                    request_id="late", prompt_id="p", prompt_tokens=3
                ),
                "GetTrajectory": pb.GetTrajectoryRequest(trajectory_id=trajectory.trajectory_id),
                "RenewJob": pb.RenewJobRequest(job_id="any"),
                "ListEngines": pb.ListEnginesRequest(),
            }
            late = [
                asyncio.create_task(refusal_of(getattr(calls.stub, rpc)(request, timeout=DONE_S)))
                for rpc, request in requests.items()
            ]
            await made.until_leads(1)
            await asyncio.sleep(LEASE_S + 1.0)
            told, before, stored = len(heard), await made.state(1), await revisions(bus)
            os.kill(first.pid, signal.SIGCONT)
            assert await first.wait() == TASK_FAILED_EXIT_CODE
            refusals = [await each for each in late]
        assert {refusal.code for refusal in refusals} <= {
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.CANCELLED,
        }
        assert {refusal.reason for refusal in refusals} <= {"NOT_LEADER", ""}, (
            "or the connection was closed"
        )
        assert "another scheduler leads: this one ends" in first.stderr_text()
        assert await revisions(bus) == stored
        assert await made.state(1) == before
        assert not heard[told:]
        assert await generate(trajectory, TOKENS, ignore_eos=True) == expected([5, 6, 7], TOKENS)


async def revisions(bus: Bus) -> dict[str, int | None]:
    """Of the keys that a scheduler writes about trajectories and jobs."""
    entries = await entries_of(await bus.key_value(BUCKET), keys_only=True)
    return {
        entry.key: entry.revision
        for entry in entries
        if entry.key.startswith(("trajectory.", "job."))
    }


async def test_a_trajectory_that_moves_while_no_scheduler_leads_is_moved(
    start_service: StartService,
) -> None:
    """The leader is killed, and the migrator begins a move before another one leads. Result: the
    move is switched at the second scheduler, and the next step runs at the target."""
    async with mesh(start_service) as made, treadle.Client(made.addresses, seed=0) as client:
        migrator = await start_service(
            "treadle_migrator", {"TREADLE_MIGRATOR_SCHEDULER": made.addresses}
        )
        trajectory = await client.open(prompt_id="p", sample=0, prompt=[5, 6, 7])
        context = [5, 6, 7, *await generate(trajectory, TOKENS, ignore_eos=True)]
        async with scheduler_client(made.schedulers[0].address) as calls:
            now = await until_said(
                partial(calls.trajectory, trajectory.trajectory_id),
                lambda said: said.next_turn == 1,
            )
            engines = {info.engine_id: info for info in await calls.engines()}
        source = engines.pop(now.engine_id)
        (target,) = engines.values()
        made.schedulers[0].kill()
        async with grpc.aio.insecure_channel(migrator.address) as channel:
            moves = MigratorCalls(channel)
            request = migrator_pb2.StartMigrationRequest(
                request_id="move",
                trajectory_id=trajectory.trajectory_id,
                source=migrator_pb2.Endpoint(engine_id=source.engine_id, address=source.address),
                target=migrator_pb2.Endpoint(engine_id=target.engine_id, address=target.address),
                expected_revision=now.revision,
                cache_salt=source.weight_version,
                allow_prefill=True,
                give_up_after=Duration(seconds=60),
            )
            ended = await moves.ended((await moves.start(request)).migration_id)
        assert ended.state == migrator_pb2.MIGRATION_STATE_DONE
        trajectory.observe([OBSERVED])
        assert await generate(trajectory, TOKENS, ignore_eos=True) == expected(
            [*context, OBSERVED], TOKENS
        )
        assert trajectory.steps[-1].engine_ids[-1] == target.engine_id


async def test_after_nats_was_away_the_same_scheduler_leads_and_all_work_is_finished(
    start_service: StartService, nats_server: NatsServer
) -> None:
    """Twice, in the middle of trajectories, for longer than the lead lasts. Result: nobody has
    taken over or ended."""
    async with mesh(start_service) as made, treadle.Client(made.addresses, seed=0) as client:
        work = Work(client)
        running = asyncio.create_task(work.run_all())
        for turns in (TRAJECTORIES, 2 * TRAJECTORIES):
            await until(partial(work.has_run, turns), DONE_S)
            nats_server.kill()
            await asyncio.sleep(4.0)
            nats_server.start()
            await made.until_leads(0)
            await asyncio.sleep(4.0)
            assert [await made.health(index) for index in (0, 1)] == [SERVING, NOT_SERVING]
        await running
        await until_all_is_counted(made, 0)
        assert [process.returncode for process in made.schedulers] == [None, None]


async def test_a_scheduler_alone_that_was_stopped_for_longer_than_all_leases_ends_none_of_them(
    start_service: StartService,
) -> None:
    async with (
        mesh(start_service, schedulers=1) as made,
        treadle.Client(made.addresses, seed=0) as client,
    ):
        trajectory = await client.open(prompt_id="p", sample=0, prompt=[5, 6, 7])
        await generate(trajectory, TOKENS, ignore_eos=True)
        process = made.schedulers[0]
        hold_still(process.pid)
        await asyncio.sleep(LEASE_S + 3.0)
        os.kill(process.pid, signal.SIGCONT)
        trajectory.observe([OBSERVED])
        await generate(trajectory, TOKENS, ignore_eos=True)
        await trajectory.close(reward=1.0)
        state = await made.state(0)
        assert state["engines"] == ["e0", "e1"]
        assert [each.state for each in state["trajectories"].values()] == [
            pb.TRAJECTORY_STATE_FINISHED
        ]
        assert trajectory.steps[0].engine_ids == trajectory.steps[1].engine_ids
        assert process.returncode is None


async def test_a_leader_that_only_nats_cannot_reach_is_replaced_and_stores_nothing_more(
    start_service: StartService, nats_server: NatsServer
) -> None:
    """Clients still reach it. Result: their calls go to the one that leads then, which finishes all
    work, and the first stores nothing when it is back, and ends."""
    port = int(nats_server.url.rpartition(":")[2])
    async with (
        proxy(port) as between,
        mesh(start_service, first_nats_url=f"nats://127.0.0.1:{between.port}") as made,
        treadle.Client(made.addresses, seed=0) as client,
    ):
        work = Work(client)
        running = asyncio.create_task(work.run_all())
        await until(partial(work.has_run, TRAJECTORIES), DONE_S)
        between.cut()
        await made.until_leads(1)
        await until_said(partial(made.health, 0), lambda status: status == NOT_SERVING)
        await running
        await until_all_is_counted(made, 1)
        before = await made.state(1)
        between.join()
        assert await made.schedulers[0].wait() == TASK_FAILED_EXIT_CODE
        assert await made.state(1) == before


async def test_a_process_that_is_killed_as_soon_as_it_has_taken_over_leaves_all_to_the_next(
    start_service: StartService, bus: Bus
) -> None:
    bucket = await bus.key_value(BUCKET)
    async with (
        mesh(start_service, schedulers=3) as made,
        treadle.Client(made.addresses, seed=0) as client,
    ):
        work = Work(client)
        running = asyncio.create_task(work.run_all())
        await until(partial(work.has_run, TRAJECTORIES), DONE_S)
        killed = {made.schedulers[0].address}
        made.schedulers[0].kill()

        async def successor() -> str:
            entry = await bucket.get(LEADER_KEY)
            return str(json.loads(entry.value or b"{}")["address"])

        await until_said(successor, lambda address: address not in killed, DONE_S)
        address = await successor()
        (index,) = (at for at, each in enumerate(made.schedulers) if each.address == address)
        made.schedulers[index].kill()
        last = ({0, 1, 2} - {0, index}).pop()
        await made.until_leads(last)
        await running
        await until_all_is_counted(made, last)
