"""How long each tool's actions take: learned from those that ended, with the cores they ran on divided out.

Running averages by tool, of what an action took beside its own work (overhead) and of that work on one core.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle_core.elastic.action import Amdahl, Duration, Elasticity, Knowledge, Measured

from treadle_tools.tool import Result, Scaling, Tool

RECENT_SHARE = 0.2  # of the newest in the average: five actions back still count for a third


@dataclass
class _Learned:
    overhead_s: float
    single_core_s: float
    speedup: float

    def add(self, other: "_Learned") -> None:
        """Count the newest in."""
        self.overhead_s += RECENT_SHARE * (other.overhead_s - self.overhead_s)
        self.single_core_s += RECENT_SHARE * (other.single_core_s - self.single_core_s)
        self.speedup += RECENT_SHARE * (other.speedup - self.speedup)


class Durations:
    """See the module."""

    def __init__(self) -> None:
        self._learned: dict[str, _Learned] = {}

    def learn(self, tool: Tool, result: Result) -> None:
        """An action has ended by itself; its result says how much its cores sped it up."""
        factor = speedup(tool.scaling, result.cores) if result.sped_up is None else result.sped_up
        newest = _Learned(result.overhead_s, result.execution_s * factor, factor)
        self._learned.setdefault(tool.name, newest).add(newest)

    def single_core(self, tool: Tool) -> Duration | None:
        """What the next action should take on one core, as profiled or learned; None: nobody knows."""
        if tool.scaling is not None and tool.scaling.single_core_s is not None:
            return Duration(Knowledge.PROFILED, tool.scaling.single_core_s)
        learned = self._learned.get(tool.name)
        if learned is None:
            return None
        return Duration(Knowledge.LEARNED, learned.overhead_s + learned.single_core_s)

    def expected_s(self, tool: Tool) -> float:
        """Seconds that an action should take from its turn on, with as many cores as lately; 0: nobody knows."""
        learned = self._learned.get(tool.name)
        return 0.0 if learned is None else learned.overhead_s + learned.single_core_s / learned.speedup


def elasticity(scaling: Scaling) -> Elasticity:
    """E of eq. 1."""
    return Measured(scaling.efficiency) if scaling.efficiency else Amdahl(scaling.serial_share)


def speedup(scaling: Scaling | None, cores: int) -> float:
    """How many times as fast as on one core."""
    return 1.0 if scaling is None else elasticity(scaling).efficiency(cores) * cores


def mean_speedup(scaling: Scaling | None, cores: int, lent: Mapping[int, float]) -> float:
    """The same on average. lent: seconds by how many cores it had beyond its own, 0 among them."""
    total_s = sum(lent.values())
    if total_s <= 0.0:
        return speedup(scaling, cores)
    return sum(seconds * speedup(scaling, cores + more) for more, seconds in lent.items()) / total_s
