"""What the backbone reads of a trajectory: its prompt, its first step (the plan, which Heddle 4.1 calls the strongest
early sign), and its newest steps, each squeezed to a bound.

A question is asked while the tool of the last step runs: what that tool will say is not known yet, and is read with the
step after it.
Invariants: what is read only ever grows by a step at its end, so that the hidden states of what was read before are
reused, in training (one pass over a window answers for all its steps) as in serving (only the new step runs); when a
window is full the next one starts with the prompt, the plan and the newest steps that fill half of what is left. The
same transcript gives the same windows, told at once or step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treadle_learned.transcript import Transcript

Ids = tuple[int, ...]
Tokenize = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Bounds:
    """Most tokens of each part. plan_tokens, step_tokens: of a step's text; obs_tokens: of what the tool before it
    answered; window_tokens: of everything. Raises ValueError for a window without room for a prompt, a plan and two
    steps."""

    prompt_tokens: int = 192
    plan_tokens: int = 96
    step_tokens: int = 32
    obs_tokens: int = 16
    window_tokens: int = 1_024

    def __post_init__(self) -> None:
        step = self.step_tokens + self.obs_tokens
        least = self.prompt_tokens + self.plan_tokens + 2 * step
        for name in ("prompt_tokens", "plan_tokens", "step_tokens", "obs_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, is {getattr(self, name)}")
        if self.window_tokens < least:
            raise ValueError(f"window_tokens must be >= {least} for these parts, is {self.window_tokens}")


@dataclass(frozen=True)
class Window:
    """Token ids in one run of the backbone. ends: (steps finished, ids read by then) of each question it answers."""

    ids: Ids
    ends: tuple[tuple[int, int], ...]


class Reader:
    """Reads one trajectory as it goes. `ids` is what is read now; a window that starts afresh has another `number`."""

    def __init__(self, bounds: Bounds, prompt: Ids) -> None:
        self._bounds = bounds
        self._prompt = squeezed(prompt, bounds.prompt_tokens) or (0,)  # something must be read before the first step
        self._plan: Ids | None = None
        self._steps: list[Ids] = []
        self.ids: Ids = self._prompt
        self.number = 0

    def step(self, observation: Ids, text: Ids) -> None:
        """One more step, and what the tool before it answered: nothing before the first."""
        bounds = self._bounds
        if self._plan is None:
            self._plan = squeezed(text, bounds.plan_tokens)
            self.ids += self._plan
            return
        more = squeezed(observation, bounds.obs_tokens) + squeezed(text, bounds.step_tokens)
        self._steps.append(more)
        if len(self.ids) + len(more) <= bounds.window_tokens:
            self.ids += more
        else:
            self.ids = self._afresh()
            self.number += 1

    def _afresh(self) -> Ids:
        head = self._prompt + (self._plan or ())
        room = (self._bounds.window_tokens - len(head)) // 2
        kept: list[Ids] = []
        for each in reversed(self._steps):
            if kept and sum(map(len, kept)) + len(each) > room:
                break
            kept.append(each)
        self._steps = kept[::-1]
        return head + tuple(token for each in self._steps for token in each)


def windows(transcript: Transcript, tokenize: Tokenize, bounds: Bounds) -> list[Window]:
    """All that is read of a transcript, with a question before the first step and after each but the last."""
    reader = Reader(bounds, tuple(tokenize(transcript.prompt)))
    found: list[Window] = []
    ids, ends = reader.ids, [(0, len(reader.ids))]
    observation = ""
    for turn, done in enumerate(transcript.turns[:-1], start=1):
        number = reader.number
        reader.step(tuple(tokenize(observation)), tuple(tokenize(done.text)))
        observation = done.obs_text
        if reader.number != number:
            found.append(Window(ids, tuple(ends)))
            ends = []
        ids = reader.ids
        ends.append((turn, len(ids)))
    return [*found, Window(ids, tuple(ends))]


def squeezed(ids: Ids, most: int) -> Ids:
    """The first and the last of them, where there are more than `most`: the head says what, the end how it went."""
    if len(ids) <= most:
        return ids
    head = (most + 1) // 2
    return ids[:head] + (ids[len(ids) - (most - head) :] if most > head else ())
