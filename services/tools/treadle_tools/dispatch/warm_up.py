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

FULL_COLLECTION_EVERY = 1_000  # collections of the middle generation; Python's own 10 is one a second under load


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
    """All that is there now stays: collections look only at what comes later, and seldom at all of that.

    Measured with 1,536 actions waiting: a full collection stops the loop for 130 ms, 25 ms once what the modules
    brought is set aside; young ones for 0.2 to 1.5 ms.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_EVERY)
