"""Count and time what the controller decides, for an operator (README.md has the table)."""

from collections.abc import Sequence

from treadle_core import actions as act
from treadle_core.ledger import LEDGER_PARTS
from treadle_runtime.telemetry import Metrics


class Meters:
    """The scheduler's instruments."""

    def __init__(self, metrics: Metrics) -> None:
        self._held = metrics.seconds("held", "From a request for a ticket to its ticket")
        self._steps = metrics.total("steps", "Tickets")
        self._trajectory = metrics.seconds("trajectory", "Where the time of closed trajectories went, by part")
        self._closed = metrics.total("trajectories_closed", "Trajectories by outcome")
        self._moves = metrics.total("moves", "Moves that were asked for")
        self._moves(0)  # it is seen though none was asked for
        self.record_plan = metrics.seconds("plan", "From the question for a plan to its answer")

    def record(self, actions: Sequence[act.Action]) -> None:
        """Note what the controller wants done after one event."""
        saved = {action.record.trajectory_id for action in actions if isinstance(action, act.SaveTrajectory)}
        for action in actions:
            match action:
                case act.IssueTicket(ticket) if ticket.trajectory_id in saved:  # else it answers a repeat
                    self._held(ticket.waited_s)
                    self._steps(1)
                case act.StartMigration():
                    self._moves(1)

    def record_closing(self, closing: act.AnnounceClosed) -> None:
        """Note a trajectory whose closing was published."""
        self._closed(1, {"outcome": closing.outcome.value})
        for part in LEDGER_PARTS:
            self._trajectory(getattr(closing.record.ledger, part), {"part": part.removesuffix("_s")})
