"""What the plays of `treadle bench fidelity` run on, live and simulated, and one pair of plays.

Invariants: a play begins with a control plane that was just started, so that no predictor knows an earlier play, and
with empty KV caches; the simulated play has the same policy, slots, declared curves and estimator. Nothing is fitted to
a play: the profile is measured before all of them, and scaled by pulses before and after each.
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
from treadle_core.model import Policy
from treadle_sim.engine_model import EngineModel
from treadle_sim.measured_profile import MeasuredEngine, fit_measured
from treadle_sim.systems import SYSTEMS
from treadle_sim.workload import Workload

from treadle_cli.bench.fidelity_control import Control, measure_control, registered
from treadle_cli.bench.fidelity_live import Play, listening, play
from treadle_cli.bench.fidelity_profile import measure, pulse
from treadle_cli.bench.fidelity_simulated import engine_models, simulate, slowed, slowness
from treadle_cli.bench.samples import Samples
from treadle_cli.machine_share import OtherPrograms
from treadle_cli.mesh import Mesh
from treadle_cli.startboard import StartBoard

CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A live play and the simulator's of the same. others_share: of the machine, that other programs took.

    slowness: of each engine, over its profile, around the play.
    """

    policy: str
    workload: Workload
    live: Play
    simulated: Play
    others_share: float
    slowness: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """The engines as they registered, were measured and are simulated, in this order."""

    mesh: Mesh
    engines: Sequence[pb.RegisteredEngine]
    measured: Sequence[MeasuredEngine]
    models: Sequence[EngineModel]
    control: Control

    @classmethod
    async def of(cls, mesh: Mesh, seed: int) -> Stage:
        """Measures everything, in about a minute. Raises TreadleError, AioRpcError, ValueError."""
        engines = await registered(mesh.where.scheduler)
        async with Client(mesh.where.scheduler) as client:
            async with listening(mesh.nats_url) as heard:
                profile = await measure(client, engines, seed)
            control = await measure_control(mesh, client, engines, profile.queue_s, Samples(heard.predict_s))
        measured = [fit_measured(profile.profiles[engine.info.engine_id]) for engine in engines]
        return cls(mesh, engines, measured, engine_models(engines, measured), control)

    async def slowness(self, seed: str) -> tuple[float, ...]:
        """Of each engine now, by a pulse."""
        async with Client(self.mesh.where.scheduler) as client:
            rows = await pulse(client, self.engines, seed)
        return tuple(
            slowness(measured, rows[engine.info.engine_id])
            for engine, measured in zip(self.engines, self.measured, strict=True)
        )

    async def pair(self, work: Workload, name: str, number: int) -> Pair:
        """The work under one of the simulator's systems, live and simulated. number: of the play, for fresh tokens."""
        system = SYSTEMS[name]
        before = await self.slowness(f"{name} {number} before")
        with StartBoard(Console(quiet=True)) as board:
            self.mesh.board = board
            await self.mesh.renew_control_plane(preempt=system.policy.preempt)
        await _set_policy(self.mesh.where.scheduler, system.policy)
        others = OtherPrograms()
        async with listening(self.mesh.nats_url) as heard:
            trajectories = await play(self.mesh.where.scheduler, work, f"{work.name} {name} {number}")
        share = others.share()
        after = await self.slowness(f"{name} {number} after")
        factors = tuple(fmean(pulses) for pulses in zip(before, after, strict=True))
        models = [slowed(model, factor) for model, factor in zip(self.models, factors, strict=True)]
        live = Play(trajectories, sum(move.moved for move in heard.migrations))
        return Pair(name, work, live, simulate(work, models, system, self.control), share, factors)


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
