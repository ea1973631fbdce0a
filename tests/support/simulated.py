"""Toy engines and workloads for tests of the simulator; an engine by itself; a rollout with all its
events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from treadle_core.actions import Action
from treadle_core.events import Event
from treadle_sim.batch import EngineStep
from treadle_sim.cluster import Cluster, Timeline
from treadle_sim.driver import Driver
from treadle_sim.engine import NONE_FINISHED, SimEngine
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.outcome import Outcome
from treadle_sim.predictors import make_predictor
from treadle_sim.systems import SYSTEMS
from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload

Kind = TypeVar("Kind")

SLOW = StepCurve((1.0, 8.0, 64.0), (0.010, 0.012, 0.030), 2e-7, 0.005, 2e-5, 1e-9)
FAST = StepCurve((1.0, 8.0, 64.0), (0.006, 0.007, 0.018), 1e-7, 0.005, 6e-6, 3e-10)
KV_BYTES_PER_TOKEN = 100_000


def engine(gpus: int = 1, slots: int = 64, kv_tokens: int = 1_000_000) -> EngineModel:
    """SLOW on one GPU, FAST on more."""
    curve = SLOW if gpus == 1 else FAST
    return EngineModel("toy", "toy", gpus, slots, kv_tokens, KV_BYTES_PER_TOKEN, curve)


def trajectory(
    prompt: int, steps: Sequence[tuple[int, int, float]], *, prompt_tokens: int = 200
) -> TrajectoryWork:
    """Of a prompt's number and (gen_tokens, obs_tokens, tool_s) a step."""
    return TrajectoryWork(f"p{prompt}", 0, prompt_tokens, tuple(Step(*step) for step in steps))


def work(prompt_id: str, sample: int, *gen_tokens: int, censored: bool = False) -> TrajectoryWork:
    """Steps of so many tokens, with answers of 10 tokens after half a second."""
    return TrajectoryWork(
        prompt_id, sample, 100, tuple(Step(each, 10, 0.5) for each in gen_tokens), None, censored
    )


def decode_s(context: int, tokens: int) -> float:
    """SLOW, alone, after a prefill that yields the first token: each decode step reads what is
    there."""
    return sum(
        SLOW.decode_s(1) + SLOW.per_kv_token_s * (context + number) for number in range(1, tokens)
    )


class LoneEngine:
    """A simulated engine without a driver. finished and preempted: when, by step id."""

    def __init__(
        self,
        slots: int = 64,
        kv_tokens: int = 10_000_000,
        *,
        preempt: bool = False,
        finished: Mapping[str, int] = NONE_FINISHED,
        **changed: Any,
    ) -> None:
        self.timeline = Timeline()
        self.finished: dict[str, float] = {}
        self.preempted: dict[str, float] = {}
        model = replace(engine(1, slots, kv_tokens), **changed)
        self.engine = SimEngine(
            "e",
            model,
            self.timeline,
            self,
            preempt=preempt,
            paced=preempt,
            record=True,
            finished=finished,
        )

    def prefill_started(self, step: EngineStep) -> None:
        """Ignore the event, which nothing here needs."""

    def step_preempted(self, step: EngineStep) -> None:
        self.preempted[step.step_id] = self.timeline.now

    def step_finished(self, step: EngineStep) -> None:
        self.finished[step.step_id] = self.timeline.now

    def run(self, *arrivals: tuple[float, EngineStep, float]) -> None:
        """Each (seconds, step, priority) arrives; until nothing is left to do."""
        for at_s, step, priority in arrivals:
            step.since_s = at_s
            self.timeline.at(at_s, self.engine.submit, step, priority)
        self.timeline.run(lambda: True)


def engine_step(
    name: str, context: int, gen: int, *, index: int = 0, prompt_tokens: int = 0
) -> EngineStep:
    """A step of trajectory `index`; the whole context is its prompt unless that is given."""
    return EngineStep(name, index, f"p{index}", prompt_tokens or context, context, gen, 0.0)


@dataclass(frozen=True)
class Heard:
    """One event at the controller, and what it wanted done."""

    now_s: float
    event: Event
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Rollout:
    """What came of it, and how."""

    outcome: Outcome
    heard: tuple[Heard, ...]

    def events(self, kind: type[Kind]) -> list[tuple[float, Kind]]:
        """(when, event) of one kind."""
        return [(heard.now_s, heard.event) for heard in self.heard if isinstance(heard.event, kind)]

    def actions(self, kind: type[Kind]) -> list[tuple[float, Kind]]:
        """(when, action) of one kind."""
        return [
            (heard.now_s, action)
            for heard in self.heard
            for action in heard.actions
            if isinstance(action, kind)
        ]


def play(
    works: Sequence[TrajectoryWork],
    cluster: Cluster,
    system: str = "verl",
    *,
    predictor: str = "noisy",
    seed: int = 0,
    record: bool = False,
) -> Rollout:
    """A system's rollout. predictor: of the systems that leave the choice."""
    chosen = SYSTEMS[system]
    workload = Workload("test", tuple(works))
    heard: list[Heard] = []

    def log(now_s: float, event: Event, actions: Sequence[Action]) -> None:
        heard.append(Heard(now_s, event, tuple(actions)))

    name = chosen.predictor or predictor
    told = None if name == "none" else make_predictor(name, workload, seed)
    driver = Driver(
        workload,
        cluster,
        chosen.policy,
        chosen.tuning,
        told,
        call_tokens=chosen.call_tokens,
        planner=chosen.planner,
        record=record,
        log=log,
    )
    return Rollout(driver.run(), tuple(heard))
