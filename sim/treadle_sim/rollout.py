"""One system on one workload and one budget of GPUs: chooses the engines, plays the rollout, says what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from treadle_core.allocation import EngineKind, allocate
from treadle_core.tuning import Tuning

from treadle_sim.cluster import Cluster, Latencies, Link, homogeneous
from treadle_sim.driver import Driver
from treadle_sim.engine_model import EngineModel
from treadle_sim.outcome import Outcome
from treadle_sim.predictors import named
from treadle_sim.systems import System
from treadle_sim.workload import TrajectoryWork, Workload


@dataclass(frozen=True, slots=True)
class Setting:
    """What every system gets. models: the engines that there could be, one a degree, all of one accelerator.

    earlier: trajectories of the same prompts in an earlier epoch, from which engines are allocated and histories
    learned; empty: of this one's own prompt-only predictions. predictor: of the systems that leave the choice.
    """

    workload: Workload
    gpus: int
    models: tuple[EngineModel, ...]
    earlier: tuple[TrajectoryWork, ...] = ()
    predictor: str = "noisy"
    link: Link = field(default_factory=Link)
    latencies: Latencies = field(default_factory=Latencies)
    seed: int = 0

    def model(self, degree: int) -> EngineModel:
        """The engine on `degree` GPUs. Raises KeyError."""
        for model in self.models:
            if model.gpus == degree:
                return model
        raise KeyError(degree)

    def degrees(self) -> list[int]:
        """Those that divide the budget and whose KV holds the longest trajectory."""
        longest = max(final_context(work) for work in self.workload.trajectories)
        return [model.gpus for model in self.models if model.kv_tokens >= longest and self.gpus % model.gpus == 0]


@dataclass(frozen=True, slots=True)
class Run:
    """A system's rollout. cluster: what it ran on."""

    system: System
    cluster: Cluster
    outcome: Outcome


def final_context(work: TrajectoryWork) -> int:
    """Tokens of a trajectory's context at its end."""
    return work.prompt_tokens + sum(step.gen_tokens + step.obs_tokens for step in work.steps)


def play(system: System, setting: Setting, degree: int = 0, *, record: bool = False) -> Run:
    """Runs it; degree: of all engines, 0 for what the system allocates. Raises KeyError for a degree there is none of,
    CoreError where no engine fits."""
    cluster = chosen(system, setting) if not degree else homogeneous(setting.model(degree), setting.gpus)
    cluster = Cluster(cluster.engines, setting.link, setting.latencies)
    name = system.predictor or setting.predictor
    predictor = None if name == "none" else named(name, setting.workload, setting.seed, setting.earlier)
    driver = Driver(
        setting.workload,
        cluster,
        system.policy,
        replace(
            system.tuning,
            expected_observed_tokens=observed_tokens(setting.earlier),
            storage_bytes_per_s=setting.link.bytes_per_s,
            move_fixed_s=setting.link.fixed_s,
        ),
        predictor,
        chunk_tokens=system.chunk_tokens,
        record=record,
    )
    return Run(system, cluster, driver.run())


def best(system: System, setting: Setting) -> Run:
    """A system on its own allocation, or on the single degree that suits it best."""
    if system.allocated:
        return play(system, setting)
    runs = [play(system, setting, degree) for degree in setting.degrees()]
    return min(runs, key=lambda run: run.outcome.makespan_s)


def observed_tokens(earlier: Sequence[TrajectoryWork]) -> float:
    """Tokens that a tool's answer added in an earlier epoch, on average: a scheduler that ran it has seen them."""
    seen = [step.obs_tokens for work in earlier for step in work.steps[:-1]]
    return sum(seen) / len(seen) if seen else Tuning().expected_observed_tokens


def chosen(system: System, setting: Setting) -> Cluster:
    """The engines that the resource manager gives, from the lengths of the earlier epoch or what is predicted now."""
    lengths, contexts = expected(setting, system.predictor or setting.predictor)
    kinds = [
        EngineKind(model.gpus, model.slots, model.kv_tokens, model.curve.linear(model.slots))
        for model in setting.models
    ]
    plan = allocate(lengths, contexts, setting.gpus, kinds, system.cost_model)
    return Cluster(tuple(setting.model(engine.gpus) for engine in plan.engines))


def expected(setting: Setting, predictor: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Lengths and mean contexts, in tokens, that the engines are planned for."""
    works: Sequence[TrajectoryWork] = setting.earlier or setting.workload.trajectories
    if predictor == "oracle":
        works = setting.workload.trajectories
    if setting.earlier or predictor in ("oracle", "none"):
        lengths = np.array([float(work.gen_tokens) for work in works])
    else:
        told = named(predictor, setting.workload, setting.seed)
        lengths = np.array([told.predict(index, 0, 0)[0].p50 for index in range(len(works))])
    observed = [sum(step.obs_tokens for step in work.steps) for work in works]
    contexts = np.array([work.prompt_tokens + 0.5 * seen for work, seen in zip(works, observed, strict=True)])
    return lengths, contexts
