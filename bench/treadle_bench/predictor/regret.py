"""What planning on an estimator costs: rollouts in the simulator, told by it and told the truth.

The trajectories of each test fold are one batch on ENGINES engines that hold a part of them at once (OVERSUBSCRIBED),
so that both where a trajectory runs and when matters. Treadle's whole policy plays it: placement, order, moves, with
plans hedged by the estimator's own quantiles. Every estimator is asked at the opening and after each step up to
`folds.LAST_TURN`. Regret: the makespan over that of the same rollout told every length, less 1. It can lie below 0: the
policy is a heuristic, told the truth as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from treadle_core.model import Estimate
from treadle_sim.cluster import homogeneous
from treadle_sim.driver import Driver
from treadle_sim.engine_model import engine_model
from treadle_sim.predictors import Recorded, RecordedPredictor
from treadle_sim.systems import TREADLE_HOMOGENEOUS
from treadle_sim.workloads.workload import TrajectoryWork, Workload

if TYPE_CHECKING:
    from treadle_learned.scores import Asked

LLM, ACCELERATOR = "Qwen3-14B", "H200"
ENGINES = 4
OVERSUBSCRIBED = 4  # trajectories for each slot
ORACLE = "oracle"  # the estimator that knows


def regrets(works: Sequence[TrajectoryWork], asked: Asked, played: Iterable[int]) -> dict[str, list[float]]:
    """By estimator, one for each fold that is `played`. works: the trajectories, as numbered by the questions. Raises
    ValueError where a trajectory was not asked about at its opening."""
    found: dict[str, list[float]] = {name: [] for name in asked.answers}
    for fold in played:
        makespans = _makespans(works, asked, fold)
        for name, makespan_s in makespans.items():
            found[name].append(makespan_s / makespans[ORACLE] - 1.0)
    return found


def folds_of(asked: Asked) -> list[int]:
    """Their numbers."""
    return [0] if asked.parts is None else np.unique(asked.parts).tolist()


def _makespans(works: Sequence[TrajectoryWork], asked: Asked, fold: int) -> Mapping[str, float]:
    rows = [at for at in range(len(asked.moments)) if asked.parts is None or asked.parts[at] == fold]
    rows.sort(key=lambda at: asked.moments[at].turn)
    of: dict[int, list[int]] = {}
    for at in rows:
        of.setdefault(asked.moments[at].index, []).append(at)
    batch = Workload(f"fold-{fold}", tuple(works[index] for index in of))
    slots = max(1, len(of) // (ENGINES * OVERSUBSCRIBED))
    cluster = homogeneous(engine_model(LLM, ACCELERATOR, 1, slots), ENGINES)
    system = TREADLE_HOMOGENEOUS
    makespans: dict[str, float] = {}
    for name, quantiles in asked.answers.items():
        said = [
            [
                Recorded(asked.moments[at].turn, asked.moments[at].gen_tokens, Estimate(*quantiles[at].tolist()))
                for at in own
            ]
            for own in of.values()
        ]
        predictor = RecordedPredictor(batch, said)
        driver = Driver(batch, cluster, system.policy, system.tuning, predictor, call_tokens=system.call_tokens)
        makespans[name] = driver.run().makespan_s
    return makespans
