"""`treadle apply --kubernetes`: a real scheduler, and StatefulSets of a fake API server whose pods
register there."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.fake_engine_cluster import FakeEngineCluster
from support.scheduler import SchedulerClient, scheduler
from treadle.engine.v1.engine_pb2 import DecodeCurve
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_cli.apply import run_apply
from treadle_cli.exits import UsageProblem

MEASURED = DecodeCurve(base_s=0.02, per_sequence_s=0.001, prefill_tokens_per_s=9e4)
LONG_S = 300.0  # no test waits for it


def classes(**count_by_degree: int) -> dict[str, Any]:
    """A plan: tp1=2 is two engines of degree 1."""
    named = {"accelerator": "H200", "slots": 100}
    return {
        "engines": [
            {**named, "degree": int(key[-1]), "count": n} for key, n in count_by_degree.items()
        ]
    }


class Operator:
    """Runs the command; `said` is what it printed last."""

    def __init__(self, cluster: FakeEngineCluster, client: SchedulerClient, folder: Path) -> None:
        self.cluster, self.client, self._folder = cluster, client, folder
        self.said = ""

    async def apply(self, plan: object, *, dry_run: bool = False, start_s: float = LONG_S) -> int:
        """The exit code."""
        file = self._folder / "plan.json"
        file.write_text(json.dumps(plan))
        screen = io.StringIO()
        console = Console(file=screen, width=200)
        try:
            return await run_apply(
                file, self.client.address, "rollouts", dry_run, 0.0, start_s, console
            )
        finally:
            self.said = screen.getvalue()

    async def registered(self) -> set[str]:
        """Engines that the scheduler has."""
        return {
            each.info.engine_id
            for each in (await self.client.call("ListEngines", pb.ListEnginesRequest())).engines
        }


@asynccontextmanager
async def operator(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, measured: bool = True
) -> AsyncIterator[Operator]:
    """Two engines of degree 1 run; there are classes of degree 2 and 4 too."""
    cluster = FakeEngineCluster({"engine-tp1": 2, "engine-tp2": 0, "engine-tp4": 0})
    leases: dict[str, str] = {}
    async with (
        scheduler(nats_url, lease_ttl_s=LONG_S) as client,
        cluster.serve(tmp_path) as kubeconfig,
    ):
        monkeypatch.setattr(
            "kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(kubeconfig)
        )

        async def come(pod: str) -> None:
            curve = {"decode_curve": MEASURED} if measured else {}
            leases[pod] = (await client.register(pod, **curve)).lease_id

        async def go(pod: str) -> None:
            if lease_id := leases.pop(pod, ""):
                request = pb.DeregisterEngineRequest(
                    request_id=f"go-{pod}", lease_id=lease_id, engine_id=pod
                )
                await client.call("DeregisterEngine", request)

        cluster.come, cluster.go = come, go
        for index in range(2):
            await come(f"engine-tp1-{index}")
        yield Operator(cluster, client, tmp_path)


async def test_a_plan_keeps_engines_of_its_classes_and_scales_the_others(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Result: the API server tries every change before it makes one; the first engine of degree 1
    is never touched."""
    async with operator(nats_url, tmp_path, monkeypatch) as world:
        assert await world.apply(classes(tp1=1, tp2=1), dry_run=True) == 0
        assert world.said.splitlines() == [
            "keep: engine-tp1-0",
            "stop: engine-tp1-1",
            "start: 1 x 2 H200 with 100 slots",
        ]
        assert all(dry_run for _, _, dry_run in world.cluster.scaled)
        assert await world.apply(classes(tp1=1, tp2=1)) == 0
        assert [each[:2] for each in world.cluster.scaled if not each[2]] == [
            ("engine-tp1", 1),
            ("engine-tp2", 1),
        ]
        assert await world.registered() == {"engine-tp1-0", "engine-tp2-0"}
        assert "started: engine-tp2-0" in world.said


async def test_a_pod_that_does_not_start_is_named_with_its_log_and_all_is_as_before(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operator(nats_url, tmp_path, monkeypatch) as world:
        world.cluster.crashing.add("engine-tp4")
        assert await world.apply(classes(tp2=1, tp4=1)) == 1
        assert world.cluster.replicas == {"engine-tp1": 2, "engine-tp2": 0, "engine-tp4": 0}
        assert await world.registered() == {"engine-tp1-0", "engine-tp1-1"}
        assert (
            "because engine-tp4-0 did not come up: container engine: CrashLoopBackOff" in world.said
        )
        assert "RuntimeError: no such model" in world.said


async def test_an_engine_that_never_has_a_measured_curve_is_not_waited_for_longer_than_was_said(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operator(nats_url, tmp_path, monkeypatch, measured=False) as world:
        assert await world.apply(classes(tp1=2, tp2=1), start_s=1.0) == 1
        assert "engine-tp2-0 has no measured decode curve after 1 s" in world.said
        assert world.cluster.replicas["engine-tp2"] == 0


async def test_what_cannot_be_done_is_refused_before_anything_changes(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operator(nats_url, tmp_path, monkeypatch) as world:
        with pytest.raises(
            UsageProblem,
            match=r"plan.engines\[1\]: no StatefulSet has this class \(8 H200, 100 slots\)",
        ):
            await world.apply(classes(tp1=1, tp8=1))
        flags = {"engines": [{**classes(tp1=1)["engines"][0], "flags": ["--x"]}]}
        with pytest.raises(UsageProblem, match=r"plan.engines\[0\].flags: must be empty"):
            await world.apply(flags)
        await world.client.open("t")
        with pytest.raises(UsageProblem, match="trajectories are open"):
            await world.apply(classes(tp2=1))
        world.cluster.forbids = True
        with pytest.raises(UsageProblem, match="403 may not patch the scale of engine-tp1"):
            await world.apply(classes(tp2=1))
        assert world.cluster.replicas == {"engine-tp1": 2, "engine-tp2": 0, "engine-tp4": 0}
        assert not [each for each in world.cluster.scaled if not each[2]]
