"""Play a recorded rollout under each policy in the simulator, and explain a trajectory of a trace
file as a whole."""

import math
from collections.abc import Sequence
from dataclasses import replace

from treadle_core.controller import Controller
from treadle_core.model import Ordering, PlacementRule, Policy
from treadle_sim.cluster import Cluster
from treadle_sim.driver import Driver
from treadle_sim.outcome import Outcome
from treadle_sim.predictors import make_predictor
from treadle_sim.rollout import choose_cluster
from treadle_sim.systems import STICKY, TREADLE, VERL, System
from treadle_sim.workloads.workload import TrajectoryWork, Workload

from treadle_cli.exits import UsageProblem
from treadle_cli.explain.explanation import Explanation, Fate
from treadle_cli.simulate.request import Request, make_plan

FCFS = System(
    "fcfs",
    "first come, first served: trajectories in the order of opening, on the least loaded engine",
    Policy(ordering=Ordering.FCFS, placement=PlacementRule.STICKY, migrate=False, preempt=False),
)
POLICIES = (FCFS, STICKY, VERL, TREADLE)
PREDICTOR = "siblings"  # of Treadle: what the product's estimator learns while the rollout runs
MOST_REPLAYED = 4_096  # trajectories, which takes about a minute


def play(system: System, workload: Workload, cluster: Cluster) -> tuple[Outcome, Controller]:
    """Simulate the rollout under a policy; return its outcome, and the controller that decided."""
    predictor = make_predictor(PREDICTOR, workload) if system is TREADLE else None
    driver = Driver(
        # The controller keeps what it decided about a trajectory for as long as it keeps the
        # trajectory.
        *(
            workload,
            cluster,
            system.policy,
            replace(system.tuning, keep_closed_s=math.inf),
            predictor,
        ),
        call_tokens=system.call_tokens,
        paced=system.paced,
    )
    return driver.run(), driver.controller


def compare(works: Sequence[TrajectoryWork], cluster: Cluster, index: int) -> list[Fate]:
    """Return what each policy makes of the trajectory `index` of a rollout."""
    workload = Workload("recorded", tuple(works))
    return [_fate(system, play(system, workload, cluster)[0], index) for system in POLICIES]


def explain_trace(name: str, request: Request) -> Explanation:
    """Explain a trajectory of a trace file, which has no times but those of tools: all of it is
    simulated. name: as in PROMPT#SAMPLE. Raises UsageProblem."""
    plan = make_plan(replace(request, systems=TREADLE.name))
    works = plan.settings[0].workload.trajectories
    found = [
        at
        for at, work in enumerate(works)
        if name in (f"{work.prompt_id}#{work.sample}", work.prompt_id)
    ]
    if not found:
        raise UsageProblem(
            f"ID: {request.workload} has no trajectory {name!r}; name it PROMPT#SAMPLE"
        )
    index, cluster = found[0], choose_cluster(TREADLE, plan.settings[0])
    outcome, controller = play(TREADLE, plan.settings[0].workload, cluster)
    trajectory_id, work = f"t{index}", works[index]
    return Explanation(
        trajectory_id=f"{work.prompt_id}#{work.sample}",
        about=f"{len(work.steps)} turns, {work.gen_tokens} tokens; as simulated under Treadle on "
        f"{cluster.describe()}",
        ledger=outcome.ledgers[index],
        wall_s=outcome.times[index].finished_s,
        left="lost by the simulator",
        decisions=controller.history(trajectory_id)[0],
        opened_s=0.0,
        recorded=None,
        policies=[
            *(
                _fate(system, play(system, plan.settings[0].workload, cluster)[0], index)
                for system in POLICIES[:-1]
            ),
            _fate(TREADLE, outcome, index),
        ],
    )


def _fate(system: System, outcome: Outcome, index: int) -> Fate:
    return Fate(system.name, system.title, outcome.times[index].finished_s, outcome.makespan_s)
