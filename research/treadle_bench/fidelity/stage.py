"""Plays of `treadle bench fidelity` and `live`: live ones on a mesh, and simulated ones on the
engines as they were measured.

Invariants: a live play begins with a new control plane, so that no predictor knows an earlier play,
unless it is asked to keep what was learned; and with tokens that no cache holds. The simulated play
has the same policy, slots, declared curves and estimator. Nothing is fitted to a play: the profile
is measured before all plays, and scaled by the mean of the pulses between them. A profile's
prefills are those of a quiet engine; with each pulse, a round of short turns on full engines, of
its own work, tells how much longer each pass takes beside others and the mesh. The simulated
planner uses the decode curve that each sidecar declares, as the live one does, not the measured
curve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Self

import treadle
from treadle import Client, Span
from treadle.jobs import policy_message
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.scheduler.v1.scheduler_pb2 import RegisteredEngine
from treadle_cli.demo.collect import CollectedFacts, collect_facts
from treadle_cli.exits import Terminal
from treadle_cli.mesh.checks import OtherPrograms
from treadle_cli.mesh.mesh import Mesh, StartBoard
from treadle_core.model import DecodeCurve, Policy
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.fitting import MeasuredEngine, fit_measured
from treadle_sim.outcome import Times
from treadle_sim.predictors import Oracle, Siblings
from treadle_sim.systems import SYSTEMS, System
from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload

from treadle_bench.fidelity.live import Play, Played, play_live
from treadle_bench.fidelity.profile import Control, measure_control, measure_engines, measure_pulse

# The round of short turns: a trajectory for each slot, without tools.
SHORT_TURNS, SHORT_STEP, SHORT_PROMPT_TOKENS = (
    8,
    Step(gen_tokens=10, obs_tokens=24, tool_s=0.0),
    100,
)
APPROXIMATIONS = 8  # of the seconds of a pass
SECONDS_OF_A_CURVE = (
    "per_kv_token_s",
    "prefill_fixed_s",
    "prefill_token_s",
    "prefill_pair_s",
    "prefill_square_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredCurve(StepCurve):
    """A measured curve, with the sidecar's declared curve for planners."""

    declared: DecodeCurve

    def linear(self, slots: int) -> DecodeCurve:
        """The declared curve."""
        return self.declared


def engine_models(
    engines: Sequence[RegisteredEngine], measured: Sequence[MeasuredEngine]
) -> list[EngineModel]:
    """The engines for the simulator; `measured` in the order of `engines`."""
    models = []
    for engine, fitted in zip(engines, measured, strict=True):
        said, model = engine.info.decode_curve, fitted.engine
        declared = DecodeCurve(
            *(
                said.base_s,
                said.per_sequence_s,
                said.per_kv_token_s,
                said.prefill_tokens_per_s,
                said.prefill_pair_s,
            )
        )
        curve = DeclaredCurve(**asdict(model.curve), declared=declared)
        models.append(replace(model, curve=curve, host_kv_tokens=engine.info.host_kv_tokens))
    return models


def slowness_of(measured: MeasuredEngine, rows: Sequence[Mapping[str, float]]) -> float:
    """Seconds of the steps of `rows` over the profile's, as a mean factor. Raises ValueError
    without rows."""
    curve = measured.engine.curve
    return fmean(
        row["step_s"] / (curve.decode_s(row["batch"]) + curve.per_kv_token_s * row["kv_tokens"])
        for row in rows
    )


def slow_down(model: EngineModel, factor: float) -> EngineModel:
    """Return the engine on which everything takes `factor` times as long; its declared curve
    stays."""
    curve = model.curve
    slower = {name: factor * getattr(curve, name) for name in SECONDS_OF_A_CURVE}
    return replace(
        model,
        curve=replace(curve, step_s=tuple(factor * each_s for each_s in curve.step_s), **slower),
    )


def short_turns(slots: int) -> Workload:
    """The round of short turns on engines with so many slots in all."""
    steps = (SHORT_STEP,) * SHORT_TURNS
    works = (
        TrajectoryWork(f"short{number}", 0, SHORT_PROMPT_TOKENS, steps) for number in range(slots)
    )
    return Workload("short-turns", tuple(works))


def find_pass_s(
    work: Workload, models: Sequence[EngineModel], control: Control, lived_s: float
) -> float:
    """Seconds to add to every prefill pass, so that `work` lasts as long in the simulator as it did
    (`lived_s`); negative where the passes of the profile are too long."""
    passes, found_s = SHORT_TURNS * models[0].slots, 0.0
    least_s = -min(model.curve.prefill_fixed_s for model in models)
    for _ in range(APPROXIMATIONS):
        slower = [delay_prefills(model, found_s) for model in models]
        late_s = lived_s - simulate_play(work, slower, SYSTEMS["verl"], control).makespan_s
        found_s = max(found_s + late_s / passes, least_s)
    return found_s


def delay_prefills(model: EngineModel, seconds: float) -> EngineModel:
    """The same engine with so many more seconds for each prefill pass; its declared curve stays."""
    fixed_s = max(model.curve.prefill_fixed_s + seconds, 0.0)
    return replace(model, curve=replace(model.curve, prefill_fixed_s=fixed_s))


def simulate_play(
    workload: Workload,
    models: Sequence[EngineModel],
    system: System,
    control: Control,
    earlier: Sequence[TrajectoryWork] = (),
    *,
    told: bool = False,
) -> Play:
    """One rollout under the system's policy. earlier: trajectories that its predictor knows, oldest
    first; told: it knows every length."""
    cluster = Cluster(tuple(models), link=control.link, latencies=control.latencies)
    predictor = Oracle(workload) if told else Siblings(workload, earlier)
    outcome = Driver(workload, cluster, system.policy, system.tuning, predictor, record=True).run()
    return Play(tuple(_played(times) for times in outcome.times), outcome.migrations)


def _played(times: Times) -> Played:
    """A step ends with its tool call, so the tool calls before a span count its turn."""
    spans, turn = [], 0
    for span in sorted(times.spans, key=lambda span: (span.start_s, span.end_s)):
        spans.append(Span(span.what, span.start_s, span.end_s, f"engine-{span.engine}", turn))  # type: ignore[arg-type]
        turn += span.what == "tool"
    return Played(times.finished_s, tuple(spans), times.preemptions)


def predict_seconds(facts: CollectedFacts) -> list[float]:
    """Seconds from a step's end to each prediction that followed it."""
    return [
        came_s - ended_s
        for came_s, predicted in facts.forecasts
        if (ended_s := facts.finished_s.get((predicted.trajectory_id, predicted.turn - 1)))
        is not None
    ]


@dataclass(frozen=True, slots=True)
class Case:
    """Live plays of one work under one policy, and the simulator's."""

    policy: str
    workload: Workload
    plays: Sequence[Play]
    simulated: Play


@dataclass(frozen=True, slots=True)
class Stage:
    """The engines, in one order: as registered, as measured, and as simulated. Each pulse adds a
    factor to the slowness of each engine (its seconds over those of its profile) and a value of
    find_pass_s to passes_s."""

    mesh: Mesh
    engines: Sequence[pb.RegisteredEngine]
    measured: Sequence[MeasuredEngine]
    models: Sequence[EngineModel]
    control: Control
    slowness: Sequence[list[float]]
    passes_s: list[float]

    @classmethod
    async def measure(cls, mesh: Mesh, seed: int) -> Self:
        """Measure engines and control plane; takes about a minute. Raises TreadleError,
        AioRpcError, ValueError."""
        engines = await mesh.list_engines()
        # Where the scheduler moves nothing itself: a move that is timed fails where another came
        # before it.
        await mesh.set_policy(live_policy(SYSTEMS["sticky"].policy))
        async with Client(mesh.where.scheduler) as client:
            async with collect_facts(mesh.nats_url, mesh.board.note) as facts:
                profiles, queue_s = await measure_engines(client, engines, seed)
            control = await measure_control(mesh, client, engines, queue_s, predict_seconds(facts))
        measured = [fit_measured(profiles[engine.info.engine_id]) for engine in engines]
        models = engine_models(engines, measured)
        return cls(mesh, engines, measured, models, control, [[] for _ in engines], [])

    @property
    def pass_s(self) -> float:
        """Seconds to add to a prefill pass: the mean of all pulses. Raises StatisticsError before
        the first."""
        return fmean(self.passes_s)

    async def pulse(self, number: int) -> None:
        """Measure how fast the engines are now, because the speed of a shared machine changes.
        Takes about 20 s. The control plane is a new one after it: what it had learned is lost."""
        async with Client(self.mesh.where.scheduler) as client:
            rows = await measure_pulse(client, self.engines, str(number))
        for measured, engine, factors in zip(
            self.measured, self.engines, self.slowness, strict=True
        ):
            factors.append(slowness_of(measured, rows[engine.info.engine_id]))
        models = [
            slow_down(model, factors[-1])
            for model, factors in zip(self.models, self.slowness, strict=True)
        ]
        work = short_turns(sum(model.slots for model in models))
        lived_s = (await self.play(work, "verl", number)).makespan_s
        self.passes_s.append(find_pass_s(work, models, self.control, lived_s))

    async def play(self, work: Workload, name: str, number: int, *, renew: bool = True) -> Play:
        """The work under one of the simulator's systems, live. number: of the play, for fresh
        tokens. renew: with a new control plane."""
        policy = live_policy(SYSTEMS[name].policy)
        with StartBoard(Terminal(quiet=True)) as board:
            self.mesh.board = board
            if renew:
                await self.mesh.renew_control_plane(policy)
            else:
                await self.mesh.forget_caches()
                await self.mesh.set_policy(policy)
        others = OtherPrograms()
        async with collect_facts(self.mesh.nats_url, self.mesh.board.note) as facts:
            trajectories = await play_live(
                self.mesh.where.scheduler, work, f"{work.name} {name} {number}"
            )
        return Play(trajectories, sum(move.moved for move in facts.migrations), others.share())

    def simulate(
        self,
        work: Workload,
        name: str,
        earlier: Sequence[TrajectoryWork] = (),
        *,
        told: bool = False,
    ) -> Play:
        """Simulate the play on engines as fast as the mean of all pulses. earlier, told: see
        simulate_play."""
        models, control = self.slowed_models(), self.control
        return simulate_play(work, models, SYSTEMS[name], control, earlier, told=told)

    def slowed_models(self) -> list[EngineModel]:
        """Return the engines as fast as the mean of all pulses."""
        slowed = (
            slow_down(model, fmean(factors))
            for model, factors in zip(self.models, self.slowness, strict=True)
        )
        return [delay_prefills(model, self.pass_s) for model in slowed]


def live_policy(policy: Policy) -> pb.Policy:
    """Return the simulator's policy as a message for the live scheduler."""
    return policy_message(
        treadle.Policy(
            ordering=policy.ordering.name.lower(),
            objective=policy.objective.name.lower(),
            placement=policy.placement.name.lower(),
            migrate=policy.migrate,
            preempt=policy.preempt,
            reserve=policy.reserve,
        )
    )
