"""What a first decision pays once, paid before anybody waits: the solvers' compilation, and a heap that is walked."""

import gc

from treadle_core.elastic.action import (
    CPU_CORES,
    MEMORY_BYTES,
    Action,
    Amdahl,
    Duration,
    Fixed,
    Knowledge,
    Measured,
    Range,
    UnitSet,
)
from treadle_core.managers.cpu import CpuManager, Machine
from treadle_core.managers.dispatcher import Dispatcher
from treadle_core.managers.resources import Resources

ROUGH = Measured(((1, 1.0), (2, 0.5), (4, 0.9)))  # not convex: arranged by the table


def warm_up() -> None:
    """Decide on actions of all shapes, alone and in a queue that does not fit."""
    dispatcher = Dispatcher(Resources([CpuManager([Machine("warm", (tuple(range(8)),), 1 << 30)])]), 0.0)
    dispatcher.submit_alone(Action("alone", "alone", 0, {CPU_CORES: Fixed(1), MEMORY_BYTES: Fixed(1)}), 0.0)
    for index in range(12):
        demand, elasticity = ((Range(1, 4), Amdahl(0.1)), (UnitSet((1, 2, 4)), ROUGH))[index % 2]
        duration = Duration(Knowledge.LEARNED, 1.0 + index)
        cost = {CPU_CORES: demand, MEMORY_BYTES: Fixed(1)}
        dispatcher.submit(Action(f"w{index}", f"w{index}", index, cost, duration, CPU_CORES, elasticity))
    now_s = 0.0
    while len(dispatcher):
        now_s += 1.0
        for started in dispatcher.decide(now_s):
            dispatcher.end(started.action.action_id, now_s)


def settle() -> None:
    """All that is there now stays: collections look only at what comes later."""
    gc.collect()
    gc.freeze()
