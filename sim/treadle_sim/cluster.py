"""Parts of a simulated mesh: the virtual clock, engines, the link between them, latencies and
failures, and the placement service."""

import gc
import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from treadle_core.actions import AskPlan
from treadle_core.events import PlanArrived
from treadle_core.model import EngineSpec, KvTransfer
from treadle_core.placing import placement
from treadle_core.placing.workload import Workspace

from treadle_sim.engine_model import EngineModel


class Timeline:
    """Queue of calls to make at virtual times. `now` is the time of the present call; it never goes
    back."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Make the call at `time_s`, or now if that has passed."""
        self._count += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._count, call, arguments))

    def after(self, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Make the call after `delay_s` seconds."""
        self.at(self.now + delay_s, call, *arguments)

    @property
    def idle(self) -> bool:
        """Return whether no call waits."""
        return not self._heap

    def run(self, while_true: Callable[[], bool]) -> None:
        """Make calls in order until none is left or `while_true` returns False.

        A simulation makes millions of objects that live long and hold no cycles. To search them for
        cycles took a sixth of its time.
        """
        heap, collects = self._heap, gc.isenabled()
        gc.disable()
        try:
            while heap and while_true():
                self.now, _, call, arguments = heapq.heappop(heap)
                call(*arguments)
        finally:
            if collects:
                gc.enable()


@dataclass(frozen=True, slots=True)
class Link:
    """Link between any two engines; an engine takes part in one transfer at a time. fixed_s: of
    each transfer, whatever its size."""

    bytes_per_s: float = 25e9  # half of a 400 Gb/s port: what RDMA of scattered KV pages reaches
    fixed_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of the control plane's answers, in seconds. predict_s: Heddle Table 1. rpc_s: of a
    ticket and of a stream's first message."""

    predict_s: float = 0.15
    plan_s: float = 0.02
    rpc_s: float = 0.002


@dataclass(frozen=True, slots=True)
class Failure:
    """An engine fails at `at_s` and returns, empty, at `back_s`."""

    engine: int
    at_s: float
    back_s: float


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """All engines stop for `pause_s` and then hold new weights; no KV survives it."""

    at_s: float
    pause_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """Engines in the order of their ids, with their failures and updates."""

    engines: tuple[EngineModel, ...]
    link: Link = Link()
    latencies: Latencies = Latencies()
    failures: tuple[Failure, ...] = ()
    weight_updates: tuple[WeightUpdate, ...] = ()

    @property
    def gpus(self) -> int:
        return sum(engine.gpus for engine in self.engines)

    def describe(self) -> str:
        """Return the engines as text, such as "32x1 + 4x8 H200"."""
        counts = Counter((engine.gpus, engine.accelerator) for engine in self.engines)
        return " + ".join(
            f"{count}x{gpus} {kind}" for (gpus, kind), count in sorted(counts.items())
        )


def homogeneous(model: EngineModel, gpus: int) -> Cluster:
    """Return as many engines of one kind as `gpus` accelerators give."""
    return Cluster((model,) * (gpus // model.gpus))


def engine_id(index: int) -> str:
    return f"e{index:04d}"


def engine_index(engine_id: str) -> int:
    return int(engine_id[1:])


def declare(index: int, model: EngineModel, weight_version: str) -> EngineSpec:
    """Return the engine as its sidecar would declare it, with a straight line for a curve."""
    return EngineSpec(
        engine_id=engine_id(index),
        address=engine_id(index),
        model=model.llm,
        weight_version=weight_version,
        slot_limit=model.slots,
        kv_tokens_capacity=model.kv_tokens,
        host_kv_tokens=model.host_kv_tokens,
        tensor_parallel=model.gpus,
        kv_transfer=KvTransfer.STORAGE,
        kv_bytes_per_token=model.kv_bytes_per_token,
        hardware_tags=(model.accelerator,),
        decode_curve=model.curve.linear(model.slots),
    )


class SimPlacement:
    """Placement service of the simulation, with the core's solver. It owns the memory in which
    plans are made."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    def plan(self, ask: AskPlan) -> PlanArrived:
        """Return the answer to a request for a plan. Raises CoreError."""
        work = ask.work
        plan = placement.plan(
            work.remaining_tokens,
            work.context_tokens,
            work.current,
            ask.engines,
            ask.cost_model,
            workspace=self._workspace,
            log_sigma=work.log_sigma,
            room_tokens=work.room_tokens,
            observed_tokens=work.observed_tokens,
            tool_s=work.tool_s,
            started=work.started,
            read=work.read,
            prompts=work.prompts,
        )
        return PlanArrived(ask.plan_id, plan.engine_of)
