"""Simulate one system on one workload and a budget of GPUs, on engines that it chooses."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from treadle_core.model import CostModel
from treadle_core.placing import paths
from treadle_core.ranking.priorities import log_deviation
from treadle_core.tuning import Tuning

from treadle_sim.allocation.plan import EngineKind, allocate, choose_degrees
from treadle_sim.cluster import Cluster, Latencies, Link, homogeneous
from treadle_sim.driver import Driver
from treadle_sim.engine_model import EngineModel
from treadle_sim.outcome import Outcome
from treadle_sim.predictors import make_predictor
from treadle_sim.systems import System
from treadle_sim.workloads.workload import TrajectoryWork, Workload

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting that all systems have in common. models: the engines to choose from, one a degree,
    all of one accelerator.

    earlier: trajectories of the same prompts in an earlier epoch, from which engines are allocated
    and histories learned; if empty, engines are allocated from predictions before the first step.
    predictor: of the systems that leave the choice open.
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
        """Return the engine on `degree` GPUs. Raises KeyError for a degree without one."""
        return {model.gpus: model for model in self.models}[degree]

    def degrees(self) -> list[int]:
        """Return the degrees that divide the budget and whose KV holds the longest trajectory."""
        longest = max(work.final_context_tokens for work in self.workload.trajectories)
        return [
            model.gpus
            for model in self.models
            if model.kv_tokens >= longest and self.gpus % model.gpus == 0
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """Rollout of a system, and the cluster that it ran on."""

    system: System
    cluster: Cluster
    outcome: Outcome


def simulate(system: System, setting: Setting, degree: int = 0, *, record: bool = False) -> Run:
    """Simulate the rollout of a system. degree: of all engines, 0 for those that the system
    allocates. Raises KeyError for a degree that has no engine, CoreError if no engine fits."""
    cluster = (
        choose_cluster(system, setting)
        if not degree
        else homogeneous(setting.model(degree), setting.gpus)
    )
    cluster = replace(cluster, link=setting.link, latencies=setting.latencies)
    name = system.predictor or setting.predictor
    predictor = (
        None
        if name == "none"
        else make_predictor(name, setting.workload, setting.seed, setting.earlier)
    )
    tuning = replace(
        system.tuning,
        expected_observed_tokens=_mean_observed_tokens(setting.earlier),
        storage_bytes_per_s=setting.link.bytes_per_s,
        move_fixed_s=setting.link.fixed_s,
    )
    calls, paced, work = system.call_tokens, system.paced, setting.workload
    driver = Driver(
        work,
        cluster,
        system.policy,
        tuning,
        predictor,
        call_tokens=calls,
        paced=paced,
        planner=system.planner,
        record=record,
    )
    return Run(system, cluster, driver.run())


def _mean_observed_tokens(earlier: Sequence[TrajectoryWork]) -> float:
    """Return the mean tokens of a tool's answer in an earlier epoch, which the scheduler that ran
    it has seen."""
    seen = [step.obs_tokens for work in earlier for step in work.steps[:-1]]
    return sum(seen) / len(seen) if seen else Tuning().expected_observed_tokens


def choose_cluster(system: System, setting: Setting) -> Cluster:
    """Return the engines of the resource plan, made from the predictions before the first step.

    A system that plans with medians (Heddle as printed) gets the lengths of the earlier epoch if
    there is one: they are spread as this epoch's are, and medians are not.
    """
    name = system.predictor or setting.predictor
    kinds = engine_kinds(setting.models)
    if system.cost_model is CostModel.CRITICAL_PATH:
        degrees = choose_degrees(*_predicted_work(setting, name), setting.gpus, kinds)
    else:
        degrees = allocate(
            *known_lengths(setting, name), setting.gpus, kinds, system.cost_model
        ).degrees
    return Cluster(tuple(setting.model(degree) for degree in degrees))


def _predicted_work(setting: Setting, predictor: str) -> tuple[paths.Work, paths.Work]:
    """Return the predictions before the first step: samples and medians. Figures without a
    prediction are those of the earlier epoch's works, each in the place of this one's."""
    works = setting.workload.trajectories
    known = setting.earlier if len(setting.earlier) == len(works) else works
    tokens = np.array([float(work.gen_tokens) for work in known])
    tool_s = np.array([sum(step.tool_s for step in work.steps) for work in known])
    observed = np.array([float(sum(step.obs_tokens for step in work.steps[:-1])) for work in known])
    log_sigma = np.zeros(len(works))
    if predictor != "none":
        asked = make_predictor(predictor, setting.workload, setting.seed, setting.earlier)
        for index in range(len(works)):
            left = asked.predict(index, 0, 0)
            tokens[index], log_sigma[index] = left.tokens.p50, log_deviation(left.tokens)
            if left.tool_s is not None and left.observed_tokens is not None:
                tool_s[index], observed[index] = left.tool_s.p50, left.observed_tokens.p50
    numbers: dict[str, int] = {}
    prompts = np.array([numbers.setdefault(work.prompt_id, len(numbers)) for work in works])
    contexts = np.array([float(work.prompt_tokens) for work in works])
    nowhere = np.zeros(len(works), np.bool_)
    of = (tokens, contexts, observed, tool_s, nowhere, nowhere, prompts)
    room = np.full(len(works), float(setting.workload.max_total_tokens or np.inf))
    factors = paths.sample_factors(np.arange(len(works)), log_sigma, tokens, room)
    return paths.work_of(*of, factors), paths.work_of(*of)


def engine_kinds(models: Sequence[EngineModel]) -> list[EngineKind]:
    """Return the engines as a planner knows them."""
    return [
        EngineKind(each.gpus, each.slots, each.kv_tokens, each.curve.linear(each.slots))
        for each in models
    ]


def known_lengths(setting: Setting, predictor: str) -> tuple[Floats, Floats]:
    """Return the lengths and mean contexts, in tokens: of this epoch for the oracle, of the earlier
    one for all others."""
    works = setting.workload.trajectories
    if predictor != "oracle":
        works = setting.earlier or works
    lengths = np.array([float(work.gen_tokens) for work in works])
    return lengths, np.array(
        [work.prompt_tokens + 0.5 * sum(step.obs_tokens for step in work.steps) for work in works]
    )
