"""One system on one workload and one budget of GPUs: chooses the engines, plays the rollout, says what came of it.

A makespan that no schedule whatever beats on a budget of GPUs: the denominator of every figure.

The larger of two: the trajectory that takes longest alone on the engine that is fastest for it, its tools included and
everything cached but what must be prefilled once; and all work at the best throughput a GPU that any batch of any
degree reaches, with no idle moment. Both use the simulated curves themselves, not the planner's line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from treadle_core.placing.costs import CostModel
from treadle_core.ranking.remaining import log_deviation
from treadle_core.tuning import Tuning

from treadle_sim.allocation.plan import EngineKind, allocate
from treadle_sim.cluster import Cluster, Latencies, Link, homogeneous
from treadle_sim.driver import Driver
from treadle_sim.engine_model import EngineModel
from treadle_sim.outcome import Outcome
from treadle_sim.predictors import make_predictor
from treadle_sim.systems import System
from treadle_sim.workloads.workload import TrajectoryWork, Workload


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


def simulate(system: System, setting: Setting, degree: int = 0, *, record: bool = False) -> Run:
    """Runs it; degree: of all engines, 0 for what the system allocates. Raises KeyError for a degree there is none of,
    CoreError where no engine fits."""
    cluster = choose_cluster(system, setting) if not degree else homogeneous(setting.model(degree), setting.gpus)
    cluster = Cluster(cluster.engines, setting.link, setting.latencies)
    name = system.predictor or setting.predictor
    predictor = None if name == "none" else make_predictor(name, setting.workload, setting.seed, setting.earlier)
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
        call_tokens=system.call_tokens,
        record=record,
    )
    return Run(system, cluster, driver.run())


def best(system: System, setting: Setting) -> Run:
    """A system on its own allocation, or on the single degree that suits it best."""
    if system.allocated:
        return simulate(system, setting)
    runs = [simulate(system, setting, degree) for degree in setting.degrees()]
    return min(runs, key=lambda run: run.outcome.makespan_s)


def observed_tokens(earlier: Sequence[TrajectoryWork]) -> float:
    """Tokens that a tool's answer added in an earlier epoch, on average: a scheduler that ran it has seen them."""
    seen = [step.obs_tokens for work in earlier for step in work.steps[:-1]]
    return sum(seen) / len(seen) if seen else Tuning().expected_observed_tokens


def choose_cluster(system: System, setting: Setting) -> Cluster:
    """The engines that the resource manager gives, from what the predictor says before the first step.

    A system that is planned by medians (Heddle as printed) gets the lengths of the earlier epoch, where there is one:
    they are spread as this epoch's are, and medians are not.
    """
    predictor = system.predictor or setting.predictor
    kinds = [
        EngineKind(model.gpus, model.slots, model.kv_tokens, model.curve.linear(model.slots))
        for model in setting.models
    ]
    if system.cost_model is not CostModel.LINEAR_INTEGRAL or predictor in ("none", "oracle"):
        lengths, contexts = known_lengths(setting, predictor)
        plan = allocate(lengths, contexts, setting.gpus, kinds, system.cost_model)
    else:
        told = make_predictor(predictor, setting.workload, setting.seed, setting.earlier)
        answers = [told.predict(index, 0, 0)[0] for index in range(len(setting.workload.trajectories))]
        cap = float(setting.workload.max_total_tokens or np.inf)
        plan = allocate(
            [answer.p50 for answer in answers],
            mean_contexts(setting),
            setting.gpus,
            kinds,
            log_sigma=[log_deviation(answer) for answer in answers],
            room_tokens=np.full(len(answers), cap),
        )
    return Cluster(tuple(setting.model(engine.gpus) for engine in plan.engines))


def known_lengths(setting: Setting, predictor: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Lengths and mean contexts, in tokens: of this epoch for the oracle, of the earlier one for all others."""
    works: Sequence[TrajectoryWork] = setting.earlier or setting.workload.trajectories
    if predictor == "oracle":
        works = setting.workload.trajectories
    lengths = np.array([float(work.gen_tokens) for work in works])
    observed = [sum(step.obs_tokens for step in work.steps) for work in works]
    contexts = np.array([work.prompt_tokens + 0.5 * seen for work, seen in zip(works, observed, strict=True)])
    return lengths, contexts


def mean_contexts(setting: Setting) -> npt.NDArray[np.float64]:
    """Tokens in KV over a trajectory's life: its prompt, and half of what tools said to one in the earlier epoch, on
    average."""
    works = setting.earlier or setting.workload.trajectories
    observed = sum(step.obs_tokens for work in works for step in work.steps) / len(works)
    return np.array([work.prompt_tokens + 0.5 * observed for work in setting.workload.trajectories])


def lower_bound_s(workload: Workload, models: tuple[EngineModel, ...], gpus: int) -> float:
    """Seconds; models: the engines that there could be, of which those that hold nothing are left out."""
    usable = [model for model in models if model.kv_tokens > 0 and model.gpus <= gpus]
    return max(longest_alone_s(workload, usable), work_s(workload, usable, gpus))


def longest_alone_s(workload: Workload, models: list[EngineModel]) -> float:
    """The slowest trajectory where nothing disturbs it."""
    return max(min(alone_s(work, model) for model in models) for work in workload.trajectories)


def alone_s(work: TrajectoryWork, model: EngineModel) -> float:
    """Seconds of one trajectory on an empty engine."""
    curve = model.curve
    step_s = curve.decode_s(1.0)
    context, cached, seconds = work.prompt_tokens, 0, 0.0
    for step in work.steps:
        seconds += curve.prefill_s(context - cached, cached)
        seconds += (step.gen_tokens - 1) * (step_s + curve.per_kv_token_s * (context + 0.5 * step.gen_tokens))
        seconds += step.tool_s
        total = context + step.gen_tokens
        cached = (total - 1) // model.page_tokens * model.page_tokens
        context = total + step.obs_tokens
    return seconds


def work_s(workload: Workload, models: list[EngineModel], gpus: int) -> float:
    """All work spread evenly over GPUs that are never idle: each part at the degree that is cheapest for it."""
    decoded = sum(work.gen_tokens - len(work.steps) for work in workload.trajectories)  # a prefill yields the first
    new = sum(work.prompt_tokens for work in {w.prompt_id: w for w in workload.trajectories}.values())
    kv = 0.0
    for work in workload.trajectories:
        context = work.prompt_tokens
        for number, step in enumerate(work.steps):
            kv += (step.gen_tokens - 1) * (context + 0.5 * step.gen_tokens)
            context += step.gen_tokens + step.obs_tokens
            if number + 1 < len(work.steps):
                new += step.obs_tokens
    decode = min(
        model.gpus * min(model.curve.decode_s(float(n)) / n for n in np.arange(1, model.slots + 1)) for model in models
    )
    read = min(model.gpus * model.curve.per_kv_token_s for model in models)
    prefill = min(model.gpus * model.curve.prefill_token_s for model in models)
    return (decoded * decode + kv * read + new * prefill) / gpus
