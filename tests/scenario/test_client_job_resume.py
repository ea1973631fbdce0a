"""A client with `resume` is killed in the middle of a rollout, and another process goes on with
it."""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
import treadle
from support.client_process import Processes
from support.conditions import until, until_said
from support.mesh_in_process import QUICK
from support.mesh_of_processes import Mesh, mesh
from support.nats_server import NatsServer
from support.processes import StartService, hold_still
from treadle.rollout.v1 import rollout_pb2, rollout_pb2_grpc

WITHIN_S = 90.0
SLOTS = 16
PROMPTS = ["p0", "p1", "p2"]
SAMPLES = 3


class Job:
    """Runs of the same program, in one folder."""

    def __init__(self, m: Mesh, folder: Path, processes: Processes) -> None:
        self._mesh, self._folder, self._processes = m, folder, processes
        self.done = [folder / f"done-{number}" for number in range(2)]

    def start(self, number: int) -> Any:
        """A process with the same job, prompts and parameters; its result goes to done[number]."""
        return self._processes(
            self._mesh.scheduler.address,
            client={"job": "run-7", "resume": True},
            prompts=PROMPTS,
            tokens=40,  # and twice, three times as many for the samples after the first
            rollout={"samples_per_prompt": SAMPLES},
            started=str(self._folder / "started"),
            done=str(self.done[number]),
        )

    def started(self) -> Counter[str]:
        """How often the agent of each sample has begun."""
        file = self._folder / "started"
        return Counter(file.read_text().splitlines() if file.exists() else [])

    async def until_some_are_submitted(self) -> set[str]:
        """Some of the samples are at the rollout service, and others run. Returns those that are
        there."""
        opened = await until_said(self._mesh.trajectories, len, WITHIN_S)
        request = rollout_pb2.GetRolloutRequest(rollout_id=opened[0].rollout_id)
        async with grpc.aio.insecure_channel(self._mesh.other.address) as channel:
            rollouts = rollout_pb2_grpc.RolloutServiceStub(channel)
            said = await until_said(
                lambda: rollouts.GetRollout(request, timeout=WITHIN_S),
                lambda said: any(group.received for group in said.rollout.groups),
                WITHIN_S,
            )
        return {
            f"{group.prompt_id} {each.sample}"
            for group in said.rollout.groups
            for each in group.samples
        }

    async def result(self, number: int) -> dict[str, Any]:
        """What the process got, once it is done."""
        await until(self.done[number].exists, WITHIN_S)
        await until(lambda: self.done[number].read_text().endswith("}"), WITHIN_S)
        return dict(json.loads(self.done[number].read_text()))


async def check_whole(m: Mesh, result: dict[str, Any]) -> None:
    """Each sample is in the result and in the batch once."""
    samples = [(each["prompt_id"], each["sample"]) for each in result["trajectories"]]
    assert samples == [(prompt_id, sample) for prompt_id in PROMPTS for sample in range(SAMPLES)]
    assert [each["error"] for each in result["trajectories"]] == [""] * len(samples)
    assert all(each["kept"] for each in result["trajectories"])
    async with treadle.Client(m.scheduler.address, retry=QUICK) as client:
        batch = await client.get_batch(result["rollout_id"], max_groups=len(PROMPTS))
    submitted = [(t.prompt_id, t.sample) for group in batch.groups for t in group.trajectories]
    assert sorted(submitted) == samples
    kept = {t.trajectory_id for group in batch.groups for t in group.trajectories}
    assert kept == {each["trajectory_id"] for each in result["trajectories"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", ["client", "scheduler", "rollout", "nats"])
async def test_a_resumed_client_finishes_the_rollout_and_runs_no_submitted_sample_again(
    start_service: StartService,
    client_processes: Processes,
    nats_server: NatsServer,
    tmp_path: Path,
    killed: str,
) -> None:
    """With the client, a service or NATS may be killed; the rollout service and NATS are back once
    the next client has connected. Result: nothing lost, nothing doubled, no trajectory of the
    killed client open. The same program after that runs a rollout of its own, as the one before has
    ended."""
    async with mesh(start_service, "treadle_rollout", SLOTS) as m:
        job = Job(m, tmp_path, client_processes)
        first = job.start(0)
        submitted = await job.until_some_are_submitted()
        first.kill()
        if killed == "scheduler":
            m.scheduler.kill()
            await start_service("treadle_scheduler", m.settings)
        elif killed == "rollout":
            m.other.kill()
        elif killed == "nats":
            nats_server.kill()
        second = psutil.Process(job.start(1).pid)
        await until(second.net_connections, WITHIN_S)
        if killed == "rollout":
            await start_service("treadle_rollout", m.other_settings)
        elif killed == "nats":
            nats_server.start()
        result = await job.result(1)
        assert not job.done[0].exists()
        await check_whole(m, result)
        before = {
            f"{each['prompt_id']} {each['sample']}"
            for each in result["trajectories"]
            if each["submitted_before"]
        }
        assert 0 < len(before) < len(result["trajectories"])
        # What was on its way when the client was killed may arrive after the next client has begun
        # that sample.
        assert submitted <= before
        assert {job.started()[sample] for sample in submitted} == {1}
        assert not await m.trajectories(open_only=True)
        job.start(0)
        again = await job.result(0)
        assert again["rollout_id"] != result["rollout_id"]
        assert not any(each["submitted_before"] for each in again["trajectories"])


@pytest.mark.timeout(300)
async def test_a_client_that_was_stopped_and_replaced_submits_nothing_when_it_wakes(
    start_service: StartService, client_processes: Processes, tmp_path: Path
) -> None:
    """SIGSTOP, another process resumes the job, SIGCONT. Result: the first one ends with
    JOB_TAKEN_OVER and no sample of the rollout has failed."""
    async with mesh(start_service, "treadle_rollout", SLOTS) as m:
        job = Job(m, tmp_path, client_processes)
        first = job.start(0)
        await job.until_some_are_submitted()
        hold_still(first.pid)
        job.start(1)
        await until(lambda: max(job.started().values()) > 1, WITHIN_S)
        first.send_signal(signal.SIGCONT)
        await until(lambda: first.poll() is not None, WITHIN_S)
        assert first.returncode != 0
        assert not job.done[0].exists()
        await check_whole(m, await job.result(1))
