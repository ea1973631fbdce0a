"""The table of histories: what was decided about each trajectory and why, and the steps that it took (ADR 0040).

For people who ask why a trajectory took so long, and for a replay of its rollout under other policies; no decision
reads it. Nothing of it is stored: after a restart a history begins with the next event. It is bounded: the last
MOST_DECISIONS and MOST_STEPS of a trajectory, of the MOST_HISTORIES that were opened last.
"""

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_HISTORIES = 16_384  # trajectories: some KB each
MOST_DECISIONS = 64
MOST_STEPS = 4_096
_NUMBERS = 4  # of a step


class Step(NamedTuple):
    """A finished step: the tokens of its prompt and of its output, and the seconds of the tool call before it."""

    turn: int
    context_tokens: int
    output_tokens: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """now_s: when. kind: placed, held, ticket, preempted, planned, moves, stays or moved. engine_id: which it is about.
    reason: a sentence, in parts: a pattern of str.format and its values."""

    now_s: float
    kind: str
    engine_id: str
    pattern: str
    values: tuple[object, ...]

    @property
    def reason(self) -> str:
        return self.pattern.format(*self.values)


class History:
    """Of one trajectory. `decisions`: oldest first."""

    __slots__ = ("_numbers", "decisions")

    def __init__(self) -> None:
        self.decisions: deque[tuple[Any, ...]] = deque(maxlen=MOST_DECISIONS)  # fields of Decision, `values` flat
        self._numbers = array("d")  # of each step in order: its turn, context, output (0 until it ends), and tool

    @property
    def steps(self) -> list[Step]:
        """The finished steps, in order."""
        rows = (self._numbers[at : at + _NUMBERS] for at in range(0, len(self._numbers), _NUMBERS))
        return [Step(int(turn), int(context), int(output), tool_s) for turn, context, output, tool_s in rows if output]

    def begin_step(self, turn: int, context_tokens: int, tool_s: float) -> None:
        """A ticket was issued for a step; another attempt at the same turn changes nothing."""
        numbers = self._numbers
        if len(numbers) < _NUMBERS * MOST_STEPS and not (numbers and numbers[-_NUMBERS] == turn):
            numbers.extend((turn, context_tokens, 0.0, tool_s))

    def finish_step(self, turn: int, output_tokens: int) -> None:
        """A step has ended, the last one or one of those before it."""
        for at in range(len(self._numbers) - _NUMBERS, -1, -_NUMBERS):
            if self._numbers[at] <= turn:
                if self._numbers[at] == turn:
                    self._numbers[at + 2] = output_tokens
                return


NO_HISTORY = History()  # never written


class Histories:
    """Histories by trajectory, in the order in which they began."""

    def __init__(self) -> None:
        self._histories: dict[str, History] = {}

    def get(self, trajectory_id: str) -> History:
        """The history of a trajectory; an empty one where nothing is known of it."""
        return self._histories.get(trajectory_id, NO_HISTORY)

    def decide(self, trajectory_id: str, now: float, kind: str, engine_id: str, pattern: str, *values: object) -> None:
        """Note a decision; see Decision."""
        self._history(trajectory_id).decisions.append((now, kind, engine_id, pattern, *values))

    def decide_anew(
        self, trajectory_id: str, now: float, kind: str, engine_id: str, pattern: str, *values: object
    ) -> None:
        """Note a decision that is made again and again, once as long as no other comes between."""
        decisions = self._history(trajectory_id).decisions
        if not decisions or decisions[-1][1:4] != (kind, engine_id, pattern):
            decisions.append((now, kind, engine_id, pattern, *values))

    def begin_step(self, trajectory_id: str, turn: int, context_tokens: int, tool_s: float) -> None:
        """As in History."""
        self._history(trajectory_id).begin_step(turn, context_tokens, tool_s)

    def finish_step(self, trajectory_id: str, turn: int, output_tokens: int) -> None:
        """As in History."""
        self._history(trajectory_id).finish_step(turn, output_tokens)

    def decisions(self, trajectory_id: str) -> list[Decision]:
        """What was decided about a trajectory, oldest first."""
        return [
            Decision(now_s, kind, engine_id, pattern, tuple(values))
            for now_s, kind, engine_id, pattern, *values in self.get(trajectory_id).decisions
        ]

    def forget(self, trajectory_id: str) -> None:
        self._histories.pop(trajectory_id, None)

    def _history(self, trajectory_id: str) -> History:
        history = self._histories.get(trajectory_id)
        if history is None:
            history = self._histories[trajectory_id] = History()
            if len(self._histories) > MOST_HISTORIES:
                del self._histories[next(iter(self._histories))]
        return history
