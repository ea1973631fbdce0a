"""Asynchronous training on two live engines: Treadle against what frameworks do, and the simulator
beside it.

Each engine has a core of its own. Lengths, turns, tools' answers and tool times are forced from
traces in --data, scaled as in `treadle bench live`. A batch has SAMPLES_A_SLOT samples for each
slot, and trains for as long as full engines decode one in the simulator: the trainer only waits,
and then has both engines load the same weights under the next version. `bound`: versions by which
a group's first token may be behind. Frameworks begin groups of GROUP samples while `fill` samples
a slot have room, counted by groups or by samples, place a trajectory on the engine with the least
live steps, and leave order and batching to SGLang. Each repeat plays other samples of the same
prompts, all ways after each other, and the simulator plays them on the engines as measured.

Keys: `cells`: of each bound, medians over the repeats. `neutral_h`: trained tokens an hour over the
workload's mean length, by way. `best_baseline`: the one of the highest median. `ratio`: of
Treadle's over its in the same repeat; `spread`: its range. `ratio_samples`: of trained samples.
`simulated_ratio`: of the same two in the simulator. `staleness_mean`: versions, of Treadle.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from treadle import Client
from treadle_cli.demo.run import warm_engines
from treadle_cli.exits import UsageProblem
from treadle_core.model import Policy
from treadle_core.tuning import Tuning
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.systems import STICKY, TREADLE, TREADLE_ASYNCHRONOUS
from treadle_sim.training import Counted, Trained, TrainingPlan
from treadle_sim.workloads.resample import resample
from treadle_sim.workloads.workload import TrajectoryWork, Workload

from treadle_bench.async_live.drive import Framework, LivePlan, Taken, train_with_treadle
from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.fidelity.live import token_ids
from treadle_bench.fidelity.stage import Stage, live_policy
from treadle_bench.live.measure import SOURCES, scale_of
from treadle_bench.processes import run_mesh
from treadle_bench.public_traces import read_public
from treadle_bench.summary import rounded

ENGINES, GROUP, SAMPLES_A_SLOT = 2, 4, 2
TRACE = "swebench"
BOUNDS = (1, 2)
BATCHES, WARM_UP = 8, 3
SPARE_GROUPS = 2.2  # groups that a workload has, over those of its batches
ENDLESS = 1_000_000  # a bound that nothing misses
OURS = "treadle"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to drive a rollout. fill: samples for each slot."""

    fill: float
    by_samples: bool


BASELINES = {"groups": Way(1.0, False), "groups_2": Way(2.0, False), "samples": Way(1.0, True)}
# Treadle's fill is what its client asks for; here the simulator is told it.
WAYS: Mapping[str, Way] = {OURS: Way(1.3, True), **BASELINES}


@dataclass(frozen=True, slots=True)
class Score:
    """Result of one training, see the keys above."""

    samples_h: float
    neutral_h: float
    staleness: float


@dataclass
class Trainings:
    """Trainings on the engines, live and in the simulator. slots: of all engines. version: of the
    weights that the engines serve. publish_s: that they need for new ones, in the mean so far."""

    stage: Stage
    slots: int
    version: int = 0
    publish_s: float = 0.0
    published: int = 0

    @property
    def batch_groups(self) -> int:
        """Groups of a batch."""
        return SAMPLES_A_SLOT * self.slots // GROUP

    def workload(self, works: Sequence[TrajectoryWork], seed: int, epoch: int) -> Workload:
        """Groups for one training, none of which comes twice, scaled to what a CPU can play."""
        count = round(self.batch_groups * (BATCHES + WARM_UP + 3) * SPARE_GROUPS)
        sampled = resample(works, count, GROUP, seed, epoch=epoch).trajectories
        scale = scale_of(sampled)
        return Workload(f"{TRACE}-{epoch}", tuple(map(scale.apply, sampled)))

    async def publish(self, version: int) -> None:
        """Serve the same weights as this version. Raises RuntimeError where an engine cannot."""
        began_s = time.monotonic()
        path = self.stage.mesh.model_path
        async with self._client() as client:
            errors = await client.update_weights(path, str(version))
        if errors:
            raise RuntimeError(f"engines could not load version {version}: {errors}")
        self.published += 1
        self.publish_s += (time.monotonic() - began_s - self.publish_s) / self.published
        self.version = version

    async def play(self, name: str, work: Workload, bound: int, train_s: float) -> Score:
        """Play one training live. Raises TreadleError, RuntimeError."""
        mesh, way = self.stage.mesh, WAYS[name]
        await mesh.forget_caches()
        await mesh.set_policy(live_policy((TREADLE if name == OURS else STICKY).policy))
        plan = LivePlan(self.batch_groups, train_s, bound, BATCHES, WARM_UP)
        salt = f"{work.name} {name} {self.version}"
        in_flight = round(way.fill * self.slots)
        async with self._client() as client:
            if name == OURS:
                taken = await train_with_treadle(
                    client, work, salt, plan, self.version, self.publish
                )
            else:
                driver = Framework(
                    client, work, salt, plan, in_flight, way.by_samples, self.version
                )
                taken = await driver.train(self.publish)
        return _score(taken, work)

    def _client(self) -> Client:
        return Client(self.stage.mesh.where.scheduler)

    def simulate(self, name: str, work: Workload, bound: int, train_s: float) -> Score:
        """Play the same training in the simulator."""
        system, way = TREADLE_ASYNCHRONOUS if name == OURS else STICKY, WAYS[name]
        counted = Counted.SAMPLES if way.by_samples else Counted.GROUPS
        plan = TrainingPlan(
            *(self.batch_groups, train_s, round(way.fill * self.slots), bound, BATCHES, WARM_UP),
            pause_s=self.publish_s,
            counted=counted,
            paced=name == OURS,
        )
        trained = self._simulate(work, system.policy, plan, paced=system.paced)
        return Score(trained.samples_h, trained.neutral_h, trained.staleness)

    def full_batch_s(self, work: Workload) -> float:
        """Return the seconds in which engines that are always full decode a batch, simulated."""
        plan = TrainingPlan(
            *(self.batch_groups, 0.0, 3 * self.slots, ENDLESS, BATCHES, WARM_UP), pause_s=0.0
        )
        return self._simulate(work, STICKY.policy, plan, paced=False).step_s

    def _simulate(
        self, work: Workload, policy: Policy, plan: TrainingPlan, *, paced: bool
    ) -> Trained:
        control = self.stage.control
        cluster = Cluster(
            tuple(self.stage.slowed_models()), link=control.link, latencies=control.latencies
        )
        driver = Driver(work, cluster, policy, Tuning(), None, paced=paced, training=plan)
        driver.run()
        assert driver.training is not None
        return driver.training.result()


def _score(taken: Sequence[Taken], work: Workload) -> Score:
    counted = taken[WARM_UP:]
    hours = (taken[-1].at_s - taken[WARM_UP - 1].at_s) / 3600.0
    tokens = [each for batch in counted for each in batch.tokens]
    mean_tokens = fmean(each.gen_tokens for each in work.trajectories)
    behind = [each for batch in counted for each in batch.behind]
    return Score(len(tokens) / hours, sum(tokens) / mean_tokens / hours, fmean(behind))


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises UsageProblem without --data, PublicTraceError, OSError, ProcessError, TreadleError."""
    if options.data is None:
        raise UsageProblem(
            "async-live needs --data, the folder of public traces that docs/traces.md names"
        )
    works = read_public(SOURCES[TRACE], options.data)
    found: dict[int, list[tuple[dict[str, Score], dict[str, Score]]]] = {}
    train_s: list[float] = []
    async with run_mesh(options.engines, options) as mesh:
        await warm_engines(mesh.engines, token_ids(works[0], "warm")[0][:64])
        options.progress.print("measuring the engines, about a minute", highlight=False)
        stage = await Stage.measure(mesh, options.seed)
        trainings = Trainings(stage, ENGINES * options.engines.slots)
        for number in range(options.repeats):
            await stage.pulse(number)
            work = trainings.workload(works, options.seed, number)
            train_s.append(trainings.full_batch_s(work))
            for bound in BOUNDS:
                lived = {}
                for name in WAYS:
                    lived[name] = await trainings.play(name, work, bound, train_s[-1])
                    line = f"bound {bound} {name}: {lived[name].neutral_h:.0f} neutral an hour"
                    options.progress.print(line, highlight=False)
                simulated = {
                    name: trainings.simulate(name, work, bound, train_s[-1]) for name in WAYS
                }
                found.setdefault(bound, []).append((lived, simulated))
    return {
        "cells": [{"trace": TRACE, "bound": bound, **_cell(some)} for bound, some in found.items()],
        "repeats": options.repeats,
        "seed": options.seed,
        "slots": options.engines.slots,
        **rounded({"train_s": train_s, "publish_s": trainings.publish_s, "pass_s": stage.pass_s}),
    }


def _cell(repeats: Sequence[tuple[Mapping[str, Score], Mapping[str, Score]]]) -> dict[str, Any]:
    best = max(BASELINES, key=lambda name: median(live[name].neutral_h for live, _ in repeats))
    ratios = [live[OURS].neutral_h / live[best].neutral_h for live, _ in repeats]
    samples = [live[OURS].samples_h / live[best].samples_h for live, _ in repeats]
    simulated = [played[OURS].neutral_h / played[best].neutral_h for _, played in repeats]
    return rounded(
        {
            "neutral_h": {
                name: median(live[name].neutral_h for live, _ in repeats) for name in WAYS
            },
            "simulated_neutral_h": {
                name: median(played[name].neutral_h for _, played in repeats) for name in WAYS
            },
            "best_baseline": best,
            "ratio": median(ratios),
            "spread": [min(ratios), max(ratios)],
            "ratio_samples": median(samples),
            "simulated_ratio": median(simulated),
            "staleness_mean": fmean(live[OURS].staleness for live, _ in repeats),
        }
    )


BENCH = Bench(
    "async-live",
    "Asynchronous training on two live engines, lengths from a public trace (--data): Treadle, "
    "what frameworks do, and the simulator beside it. --repeats: other samples. Takes 20 minutes "
    "a repeat on 2 cores.",
    measure,
    engines=ENGINES,
)
