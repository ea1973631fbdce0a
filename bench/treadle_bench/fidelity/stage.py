"""What the plays of `treadle bench fidelity` run on, live and simulated.

Invariants: a play begins with a control plane that was just started, so that no predictor knows an earlier play, and
with tokens that no cache holds; the simulated play has the same policy, slots, declared curves and estimator. Nothing
is fitted to a play: the profile is measured before all of them, and scaled by the mean of pulses between them.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import grpc.aio
from rich.console import Console
from treadle import Client
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2_grpc
from treadle_cli.mesh.checks import OtherPrograms
from treadle_cli.mesh.mesh import Mesh, StartBoard
from treadle_core.model import Policy
from treadle_sim.engine_model import EngineModel
from treadle_sim.fitting.curves import MeasuredEngine, fit_measured
from treadle_sim.systems import SYSTEMS
from treadle_sim.workloads.workload import Workload

from treadle_bench.fidelity.control import Control, measure_control, registered
from treadle_bench.fidelity.live import Play, listening, play
from treadle_bench.fidelity.profile import measure, pulse
from treadle_bench.fidelity.simulated import engine_models, simulate, slowed, slowness
from treadle_bench.samples import Samples

CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class LivePlay:
    """One play. others_share: of the machine, that other programs took meanwhile."""

    play: Play
    others_share: float


@dataclass(frozen=True, slots=True)
class Case:
    """Live plays of one work under one policy, and the simulator's."""

    policy: str
    workload: Workload
    lives: tuple[LivePlay, ...]
    simulated: Play

    @property
    def plays(self) -> list[Play]:
        """The live ones."""
        return [live.play for live in self.lives]


@dataclass(frozen=True, slots=True)
class Stage:
    """The engines as they registered, were measured and are simulated, in this order."""

    mesh: Mesh
    engines: Sequence[pb.RegisteredEngine]
    measured: Sequence[MeasuredEngine]
    models: Sequence[EngineModel]
    control: Control
    slowness: Sequence[list[float]]  # of each engine over its profile, a factor a pulse

    @classmethod
    async def of(cls, mesh: Mesh, seed: int) -> Stage:
        """Measures everything, in about a minute. Raises TreadleError, AioRpcError, ValueError."""
        engines = await registered(mesh.where.scheduler)
        async with Client(mesh.where.scheduler) as client:
            async with listening(mesh.nats_url) as heard:
                profile = await measure(client, engines, seed)
            control = await measure_control(mesh, client, engines, profile.queue_s, Samples(heard.predict_s))
        measured = [fit_measured(profile.profiles[engine.info.engine_id]) for engine in engines]
        return cls(mesh, engines, measured, engine_models(engines, measured), control, [[] for _ in engines])

    async def pulse(self, number: int) -> None:
        """Notes how fast the engines are now: a shared machine is not always as fast as while its profile was taken."""
        async with Client(self.mesh.where.scheduler) as client:
            rows = await pulse(client, self.engines, str(number))
        for measured, engine, factors in zip(self.measured, self.engines, self.slowness, strict=True):
            factors.append(slowness(measured, rows[engine.info.engine_id]))

    async def play(self, work: Workload, name: str, number: int) -> LivePlay:
        """The work under one of the simulator's systems, live. number: of the play, for fresh tokens."""
        system = SYSTEMS[name]
        with StartBoard(Console(quiet=True)) as board:
            self.mesh.board = board
            await self.mesh.renew_control_plane(preempt=system.policy.preempt)
        await _set_policy(self.mesh.where.scheduler, system.policy)
        others = OtherPrograms()
        async with listening(self.mesh.nats_url) as heard:
            trajectories = await play(self.mesh.where.scheduler, work, f"{work.name} {name} {number}")
        return LivePlay(Play(trajectories, sum(move.moved for move in heard.migrations)), others.share())

    def simulated(self, work: Workload, name: str) -> Play:
        """The same in the simulator, on engines as fast as all pulses say on average."""
        models = [slowed(model, fmean(factors)) for model, factors in zip(self.models, self.slowness, strict=True)]
        return simulate(work, models, SYSTEMS[name], self.control)


async def _set_policy(scheduler: str, policy: Policy) -> None:
    async with grpc.aio.insecure_channel(scheduler) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = pb.SetPolicyRequest(request_id=uuid.uuid4().hex, policy=policy_message(policy))
        await stub.SetPolicy(request, timeout=CALL_TIMEOUT_S)


def policy_message(policy: Policy) -> pb.Policy:
    """The simulator's policy as the live scheduler takes it."""
    return pb.Policy(
        ordering=pb.Ordering.Value(f"ORDERING_{policy.ordering.name}"),
        objective=pb.Objective.Value(f"OBJECTIVE_{policy.objective.name}"),
        placement=pb.PlacementRule.Value(f"PLACEMENT_RULE_{policy.placement.name}"),
        migrate=policy.migrate,
        preempt=policy.preempt,
        replanning=pb.Replanning.Value(f"REPLANNING_{policy.replanning.name}"),
        reserve=policy.reserve,
    )
