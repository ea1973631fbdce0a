"""Which kernels are compiled after a warm-up, each to be found in a process of its own."""

import asyncio
import importlib
import pkgutil
from types import SimpleNamespace

import numpy as np
import treadle_core
from support.placements import columns
from support.simulated import engine, play, trajectory
from treadle.placement.v1 import placement_pb2 as pb
from treadle_core import planning
from treadle_core.compiled import kernel_of
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.tools.action import (
    CPU_CORES,
    GPUS,
    MEMORY_BYTES,
    Action,
    Amdahl,
    Demand,
    Fixed,
    Measured,
    UnitSet,
)
from treadle_core.tools.cpu import CpuManager, Machine
from treadle_core.tools.dispatcher import Dispatcher as ActionDispatcher
from treadle_core.tools.dispatcher import Resources
from treadle_core.tools.gpu import GpuManager
from treadle_core.tools.grants import Service
from treadle_placement.servicer import PlacementServicer
from treadle_placement.wire import compile_kernels
from treadle_runtime.config import Settings
from treadle_runtime.telemetry import Metrics
from treadle_sim.cluster import Cluster
from treadle_tools import resources

Signatures = set[tuple[str, str]]


def compiled_after_scheduler() -> Signatures:
    """By a rollout whose trajectories wait, start and move, after the scheduler's warm-up."""
    planning.warm_up()
    before = _signatures()
    works = [
        trajectory(number // 4, [(20 * number, 50, 1.0)] * (1 + number % 5))
        for number in range(1, 25)
    ]
    play(works, Cluster((engine(1, 2), engine(1, 2), engine(2, 2))), "treadle")
    return _signatures() - before


def compiled_after_placement() -> Signatures:
    """By a question under each cost model, of which some trajectories have started, after the
    service's warm-up."""
    compile_kernels()
    before = _signatures()
    servicer = PlacementServicer(
        CostModel.CRITICAL_PATH, DecodeCurve(), Metrics(Settings(nats_url="nats://unused"))
    )
    unhurried = SimpleNamespace(time_remaining=lambda: None)  # a call without a deadline
    for model in pb.CostModel.values():
        request = pb.PlanPlacementRequest(
            engines=[pb.PlacementEngine(engine_id=name, slot_limit=4) for name in "abc"],
            columns=columns(
                12,
                current_engine_int32=np.array(
                    [0 if number % 3 else -1 for number in range(12)], "<i4"
                ).tobytes(),
                started_uint8=bytes(number % 3 == 1 for number in range(12)),
                log_sigma_float64=np.full(12, 0.5, "<f8").tobytes(),
            ),
            cost_model=model,
        )
        asyncio.run(servicer.PlanPlacement(request, unhurried))
    return _signatures() - before


def compiled_after_tools() -> Signatures:
    """By decisions on CPU and GPU actions with all kinds of curves, after the tools service's
    warm-up."""
    resources.compile_kernels()
    before = _signatures()
    machines = [Machine(name, (tuple(range(6)), tuple(range(6, 10))), 1 << 20) for name in "ab"]
    gpus = GpuManager(
        {"c": range(8), "d": (2, 3)}, 80, [Service("judge", degree, 20) for degree in (1, 2, 4)]
    )
    curves = (
        Amdahl(0.2),
        Measured(((1, 1.0), (2, 0.9), (4, 0.1))),
        Measured(((1, 1.0), (2, 0.6), (4, 0.5))),
    )
    dispatcher = ActionDispatcher(Resources([CpuManager(machines), gpus]), 0.0)
    for number in range(40):
        key, service = (CPU_CORES, None) if number % 4 else (GPUS, "judge")
        cost: dict[str, Demand] = {key: UnitSet((1, 2, 4))}
        if key == CPU_CORES:
            cost[MEMORY_BYTES] = Fixed(1)
        name, curve = f"a{number}", curves[number % 3]
        dispatcher.submit(
            Action(name, f"t{number % 5}", number, cost, 1.0, key, curve, service=service)
        )
    now_s = 0.0
    while len(dispatcher):
        now_s += 1.0
        for started in dispatcher.decide(now_s):
            dispatcher.end(started.action.action_id, now_s)
    return _signatures() - before


def _signatures() -> Signatures:
    """Every kernel of the core with every type of arguments for which it is compiled."""
    found = set()
    for module in pkgutil.walk_packages(treadle_core.__path__, "treadle_core."):
        for name, value in vars(importlib.import_module(module.name)).items():
            kernel = kernel_of(value)
            if kernel is not None:
                found |= {(name, str(signature)) for signature in kernel.run.signatures}
    return found
