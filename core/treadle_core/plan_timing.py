"""When a plan is asked for: enough has changed, none is under way, and not too often.

Owns the counts since the last question. Two kinds of change: what was known has moved on (a step done, a trajectory
closed), which is asked about every so many events and no more often than `plan_interval_s`; and something new is known
(a trajectory opened, its first prediction came), which makes the last plan one for another population. As soon as half
of what is known is new, a plan is due at once; less than that is due at the next tick.
"""

from treadle_core.tuning import Tuning

# A plan made before this share of the present trajectories was known is a plan for others.
NEW_SHARE = 0.5


class PlanTiming:
    """Counts for one replanning rule. `follows_work`: whether work done makes a new plan due, or news alone."""

    def __init__(self, tuning: Tuning, follows_work: bool) -> None:
        self._tuning = tuning
        self._follows_work = follows_work
        self.noted = False  # whether anything was noted since the last question
        self._done = 0
        self._news = 0
        self._asked_s: float | None = None
        self._last_asked_s = float("-inf")

    def note_work(self) -> None:
        """Remaining work became less."""
        if self._follows_work:
            self._done += 1
            self.noted = True

    def note_news(self, count: int = 1) -> None:
        """Something is known that was not."""
        self._news += count
        self.noted = True

    def asked(self, now: float) -> None:
        """The question is out."""
        self.nothing_to_ask()
        self._asked_s = self._last_asked_s = now

    def answered(self) -> None:
        """And its answer is here."""
        self._asked_s = None

    def nothing_to_ask(self) -> None:
        """It was due, but there is nothing to choose."""
        self._done = self._news = 0
        self.noted = False

    def due(self, now: float, open_count: int, ticked: bool) -> bool:
        """Whether to ask now, with so many open trajectories; `ticked`: at a tick."""
        if not self.noted:
            return False
        tuning = self._tuning
        renewed = self._news >= max(1.0, NEW_SHARE * open_count)
        if self._asked_s is not None and now - self._asked_s < tuning.plan_timeout_s:
            return ticked and renewed
        if renewed:
            return True
        if not self._follows_work:
            return False
        if ticked and self._news:
            return True
        # Of few trajectories each event changes much, and at the tail engines fall idle; of many it changes little.
        few, many = min(tuning.plan_every_events, open_count // 2), open_count // tuning.plan_trajectories_per_event
        return self._done + self._news >= max(few, many, 1) and now - self._last_asked_s >= tuning.plan_interval_s
