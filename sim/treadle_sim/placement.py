"""The placement service's answers: the core's solver, called in place."""

from __future__ import annotations

from treadle_core import placement
from treadle_core.actions import AskPlan
from treadle_core.events import PlanArrived
from treadle_core.plan_work import EngineOf


class PlacementStandIn:
    """Owner of the memory that plans are made in, so that each does not ask for its own."""

    def __init__(self) -> None:
        self._workspace = placement.Workspace()

    def answer(self, ask: AskPlan) -> PlanArrived:
        """The plan that was asked for. Raises CoreError."""
        work = ask.work
        plan = placement.plan_arrays(
            work.remaining_tokens,
            work.context_tokens,
            work.current,
            ask.engines,
            ask.cost_model,
            workspace=self._workspace,
            log_sigma=work.log_sigma,
            room_tokens=work.room_tokens,
        )
        return PlanArrived(ask.plan_id, engine_of=EngineOf(plan.engine_of))
