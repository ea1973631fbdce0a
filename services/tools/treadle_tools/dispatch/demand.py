"""What an action asks of the node and of others: a tool's declarations in the terms of the scheduler.

An action that asks for more than there is gets all there is.
"""

from collections.abc import Callable, Mapping

from treadle_core.elastic.action import (
    CPU_CORES,
    MEMORY_BYTES,
    UNKNOWN_DURATION,
    Action,
    Demand,
    Duration,
    Fixed,
    Knowledge,
    Range,
    UnitSet,
    key_units,
)
from treadle_core.elastic.action_input import InvalidActionError, check_action
from treadle_core.managers.basic import BasicManager

from treadle_tools.dispatch.durations import Durations, elasticity
from treadle_tools.dispatch.node import NODE_ID
from treadle_tools.tool import Kind, Limits, Scaling, Tool


class Demands:
    """See the module. cores, memory_bytes: of the node. providers: by name. moves_cores: whether a tool's actions can
    be given other cores while they run.
    """

    def __init__(
        self,
        cores: int,
        memory_bytes: int,
        providers: Mapping[str, BasicManager],
        durations: Durations,
        moves_cores: Callable[[Tool], bool] = lambda _: False,
    ) -> None:
        self._moves_cores = moves_cores
        self._cores = cores
        self._memory_bytes = memory_bytes
        self._providers = providers
        self._durations = durations

    def action(self, action_id: str, holder: str, arrival: int, tool: Tool, limits: Limits) -> Action:
        """One action of `tool`. holder: the session, whose memory is held until its end, or the action itself.

        What is called once asks for no memory, as no more such calls run than there are cores: else they would wait for
        sessions to end, which wait for what their trajectories call. Without a Scaling nothing is known of how it
        scales, but how long it takes is told all the same.
        """
        most = min(limits.cpu_cores, self._cores)
        cost: dict[str, Demand] = {CPU_CORES: cores_demand(tool.scaling, most)}
        stays = tool.kind is Kind.ENVIRONMENT
        if stays:
            cost[MEMORY_BYTES] = Fixed(min(tool.reserve_bytes, limits.memory_bytes, self._memory_bytes))
        if tool.provider:
            cost |= self._providers[tool.provider].cost()
        return Action(
            action_id,
            holder,
            arrival,
            cost,
            self._durations.single_core(tool) or UNKNOWN_DURATION,
            key=CPU_CORES,
            elasticity=elasticity(tool.scaling) if tool.scaling is not None else None,
            node_id=None if stays else NODE_ID,
            follows_from=tool.scaling.follows_from if tool.scaling is not None and self._moves_cores(tool) else 0,
        )


def check_scaling(tool: Tool) -> None:
    """Raises InvalidActionError for a Scaling with a figure that is none, or more cores than the tool's limit."""
    scaling = tool.scaling
    if scaling is None:
        return
    single_core = Duration(Knowledge.PROFILED, 1.0 if scaling.single_core_s is None else scaling.single_core_s)
    cost = {CPU_CORES: UnitSet(scaling.cores)}
    declared = Action(
        tool.name, tool.name, 0, cost, single_core, CPU_CORES, elasticity(scaling), follows_from=scaling.follows_from
    )
    check_action(declared, (CPU_CORES,))
    if scaling.cores[-1] > tool.limits.cpu_cores:
        raise InvalidActionError("cores", f"must be at most limits.cpu_cores, {tool.limits.cpu_cores}")


def cores_demand(scaling: Scaling | None, most: int) -> Demand:
    """How many cores, where there are `most` at most."""
    if scaling is None:
        return Fixed(most)
    choices = tuple(cores for cores in scaling.cores if cores <= most) or (most,)
    if choices == tuple(range(choices[0], choices[-1] + 1)):
        return Range(choices[0], choices[-1])
    return UnitSet(choices)


def most_cores(action: Action, granted: int) -> int:
    """How many an action may have at a time while it runs; 0: no more than it was granted."""
    return key_units(action.cost[CPU_CORES])[-1] if action.follows(granted) else 0
