"""Count and time what the controller decides, and what is there now, for an operator (docs/metrics.md)."""

from collections.abc import Callable, Sequence

from treadle_core import actions as act
from treadle_core.controller import Controller
from treadle_core.ledger import LEDGER_PARTS
from treadle_runtime.telemetry import Metrics


class Meters:
    """The scheduler's instruments."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._held_s = metrics.seconds("held", "From a request for a ticket to its ticket")
        self._tickets = metrics.total("tickets", "ticket", "Tickets that were issued")
        self._ledger_s = metrics.seconds("trajectory", "Where the time of closed trajectories went, by part")
        self._closed = metrics.total("closed_trajectories", "trajectory", "Closed trajectories, by outcome")
        self._moves = metrics.total("moves", "move", "Moves that were asked for")
        self._moves(0)  # it is seen though none was asked for
        self.record_plan = metrics.seconds("plan", "From the question for a plan to its answer")

    def watch(self, controller: Controller, held_calls: Callable[[], int]) -> None:
        """Have the state of the controller read from now on."""
        gauge = self._metrics.gauge
        gauge("waiting", "step", "Steps that wait in the scheduler for a ticket", held_calls)
        gauge("engines", "engine", "Engines that hold a lease", lambda: len(controller.engines()))

        def sum_of(name: str) -> Callable[[], float]:
            return lambda: sum(getattr(use, name) for use in controller.jobs())

        gauge("live_tickets", "ticket", "Tickets whose steps have not ended", sum_of("live_tickets"))
        gauge("open_trajectories", "trajectory", "Open trajectories", sum_of("open_trajectories"))
        gauge("reserved_kv", "token", "KV that is reserved for started trajectories", sum_of("kv_tokens"))

    def record(self, actions: Sequence[act.Action]) -> None:
        """Note what the controller wants done after one event."""
        saved = {action.record.trajectory_id for action in actions if isinstance(action, act.SaveTrajectory)}
        for action in actions:
            match action:
                case act.IssueTicket(ticket) if ticket.trajectory_id in saved:  # else it answers a repeat
                    self._held_s(ticket.waited_s)
                    self._tickets(1)
                case act.StartMigration():
                    self._moves(1)

    def record_closing(self, closing: act.AnnounceClosed) -> None:
        """Note a trajectory whose closing was published."""
        self._closed(1, {"outcome": closing.outcome.value})
        for part in LEDGER_PARTS:
            self._ledger_s(getattr(closing.record.ledger, part), {"part": part.removesuffix("_s")})
