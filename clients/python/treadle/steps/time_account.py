"""Account for the time that a client has measured of one trajectory by its own clock: its part of
the trajectory's ledger (ADR 0040).

The client's time is cut at marks into calls and the gaps between them. The services account for the
time that they took of a call: the scheduler for the wait for a ticket (Ticket.waited), the sidecar
for its step (StepTiming). The rest of the call is `control`. Between two calls a tool runs, or the
client works, which is control too: where tools of the mesh ran, their time is `tool` and the rest
control; where none ran after a step, all of it is `tool`, as the caller runs its own.

Pure: the caller passes the time in. Sums only grow, so that a report that is repeated or lost
changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.types import SpanKind, duration

PARTS: tuple[SpanKind, ...] = ("queue", "prefill", "decode")


class TimeAccount:
    """Sums of one trajectory, in seconds. opened_s: when the answer to its opening came;
    since_opening_s: how long it had been open then, by the scheduler."""

    def __init__(self, opened_s: float, since_opening_s: float) -> None:
        self._opened_s = opened_s - since_opening_s
        self._control_s = since_opening_s
        self._tool_s = 0.0
        self._lost_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._marked_s = opened_s  # earlier time is in the sums, or in the accounts of the services
        self._ran_s = 0.0  # of tools of the mesh, since the mark
        self._stepped = False  # a step has ended since the opening
        self._streams = False
        # of the last step that ended without its engine's account
        self._seen_s: Mapping[str, float] = {}

    def add_tool(self, seconds: float) -> None:
        """Add the time that a tool of the mesh has run."""
        self._ran_s += seconds

    def ask(self, now: float, *, replaces: bool, goes_on: bool) -> None:
        """Note the request for a ticket. replaces: of a step that is lost. goes_on: no tool can
        have run since the mark."""
        if replaces:
            for kind, spent_s in self._seen_s.items():
                self._lost_s[kind] += spent_s
        self._seen_s = {}
        self._end_gap(now, goes_on=goes_on or replaces)

    def take_ticket(self, now: float, waited_s: float) -> None:
        """Note that the ticket has arrived; the scheduler has held the request for `waited_s`."""
        self._control_s += self._mark(now) - waited_s
        self._streams = True

    def end_stream(
        self, now: float, accounted_s: float | None, seen_s: Mapping[str, float]
    ) -> None:
        """Note that the step's stream has ended, or was left. accounted_s: by its engine; None: no
        account came, and `seen_s` is what the client saw of it, by kind. Does nothing where no
        stream is open."""
        if self._streams:
            self._streams, self._stepped = False, True
            self._seen_s = {} if accounted_s is not None else seen_s
            self._control_s += self._mark(now) - (
                sum(seen_s.values()) if accounted_s is None else accounted_s
            )

    def close(self, now: float, *, asks: bool) -> pb.ClientTimes:
        """Return the sums at the end. asks: whether a ticket has been requested since the mark, a
        wait that the scheduler counts."""
        if asks:
            self._mark(now)
        self._end_gap(now, goes_on=False)
        return self.report()

    def report(self) -> pb.ClientTimes:
        """Return the sums until the mark."""
        return pb.ClientTimes(
            tool=duration(self._tool_s),
            control=duration(max(self._control_s, 0.0)),
            lost_queue=duration(self._lost_s["queue"]),
            lost_prefill=duration(self._lost_s["prefill"]),
            lost_decode=duration(self._lost_s["decode"]),
            since_opening=duration(self._marked_s - self._opened_s),
        )

    def _end_gap(self, now: float, *, goes_on: bool) -> None:
        gap_s = self._mark(now)
        tool_s = (
            min(self._ran_s, gap_s)
            if self._ran_s
            else gap_s
            if self._stepped and not goes_on
            else 0.0
        )
        self._tool_s += tool_s
        self._control_s += gap_s - tool_s
        self._ran_s = 0.0

    def _mark(self, now: float) -> float:
        since_s, self._marked_s = self._marked_s, now
        return now - since_s
