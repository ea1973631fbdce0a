"""The agent's loop: generate, act in the environment, observe, until the environment or the turns end.

A model this small seldom keeps to a format, so each assistant's turn is opened with its first words ("I move", a
block of Python, "Answer:") and the model goes on from there. Those words are ours, with loss mask 0.
Invariant: ids that the model generated are never tokenised again (see chatml.py). A tool that fails is an observation.

What a small model's words mean as an action. Forgiving. Pure."""

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Literal

from treadle import Prompt, Sampling, Session, Span, ToolResult, Trajectory

from treadle_cli.demo.chatml import ChatML
from treadle_cli.demo.tasks import Task

DIRECTIONS = ("left", "down", "right", "up")

_DIRECTION = re.compile(rf"\b({'|'.join(DIRECTIONS)})\b", re.IGNORECASE)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_ANSWER = re.compile(r"answer\s*(?:is|:|=)\s*\**\s*([^\n*]+)", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_MARKUP = " \t*`$\"'"


@dataclass(frozen=True)
class PuzzleMove:
    """Python to run, or an answer to be scored."""

    kind: Literal["code", "answer"]
    text: str


def direction(text: str) -> str | None:
    """The first direction named, in lower case; None where there is none. What follows is the model's excuse."""
    found = _DIRECTION.search(text)
    return found.group(1).lower() if found else None


def puzzle_move(text: str) -> PuzzleMove | None:
    """Whichever comes first of a fenced block of Python (closed or cut off) and "answer: ..." or \\boxed{...}; else
    None.
    """
    blocks = [(match.start(), match.group(1).rstrip()) for match in _FENCE.finditer(text)]
    moves = [(start, PuzzleMove("code", code)) for start, code in blocks if code]
    # An "answer:" inside a block of code is a string or a comment, not the answer.
    prose = _FENCE.sub(lambda match: " " * len(match.group(0)), text)
    for pattern in (_ANSWER, _BOXED):
        for match in pattern.finditer(prose):
            answer = match.group(1).strip(_MARKUP).rstrip(".").strip(_MARKUP)
            if answer:
                moves.append((match.start(), PuzzleMove("answer", answer)))
    return min(moves, key=lambda move: move[0])[1] if moves else None


def last_words(text: str) -> str:
    """What to score when the turns are used up and no answer was marked: the last line that says anything."""
    lines = [line.strip(_MARKUP) for line in text.splitlines()]
    return next((line for line in reversed(lines) if line), "")


TEMPERATURE = 1.0  # a policy explores: greedy samples of one prompt would all be the same
MOST_OUTPUT_CHARS = 300  # of a tool's output that the model reads: it understands less than that
ANSWER_TOKENS = 24  # an answer is a number or a word
LAKE_LEAD, CODE_LEAD, ANSWER_LEAD = "I move", "```python\nprint(", "Answer:"
FENCE = "```"  # ends a block of Python, and the turn
LAKE_HINT = "Name one move: left, down, right or up."
CODE_HINT = "Print the result with one line of Python."
RETRY_HINT = "That printed no result. Try again with one line of Python."


@dataclass(frozen=True)
class Turn:
    """How the next turn is asked for: the user's words, the assistant's first ones, most new tokens, what ends it."""

    said: str
    lead: str
    most_tokens: int
    stop: tuple[str, ...] = ()


class Player:
    """Plays any prompt of the demo with the model that `chat` belongs to.

    tool_latency_s: added to every tool call, as a tool across a network would take it; 0 for none.
    """

    def __init__(self, chat: ChatML, tool_latency_s: float = 0.0) -> None:
        self._chat = chat
        self._tool_latency_s = tool_latency_s

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """One trajectory from its first observation to its reward; at least 0."""
        task: Task = prompt.data
        reward = 0.0
        async with await trajectory.open_session(task.environment, task.arguments) as session:
            turn = _first(task, session.first.output)
            trajectory.observe(self._chat.user(turn.said, turn.lead))
            for number in range(task.turns):
                generated = await self._generate(trajectory, prompt, turn, number)
                result = await _act(session, task, turn.lead + self._chat.text(generated))
                if result is not None:
                    await self._way_back(trajectory, number)
                if result is not None and result.reward is not None:
                    reward += result.reward
                if number == task.turns - 1 or (result is not None and result.done):
                    break
                turn = _next(task, result, last=number == task.turns - 2)
                trajectory.observe(self._chat.after_turn(generated, turn.said, turn.lead))
        return reward

    async def _generate(self, trajectory: Trajectory, prompt: Prompt, turn: Turn, number: int) -> list[int]:
        sampling = Sampling(
            max_new_tokens=turn.most_tokens,
            temperature=TEMPERATURE,
            seed=prompt.data.sampling_seed(prompt.id, trajectory.sample, number),
            stop=turn.stop,
            stop_token_ids=(self._chat.end_id,),
        )
        async for _ in trajectory.generate(sampling):
            pass
        return trajectory.steps[-1].token_ids

    async def _way_back(self, trajectory: Trajectory, number: int) -> None:
        """The latency of a tool that is not on this machine; counts as tool time."""
        if self._tool_latency_s > 0:
            start_s = time.time()
            await asyncio.sleep(self._tool_latency_s)
            trajectory.spans.append(Span("tool", start_s, time.time(), "", number))


def _first(task: Task, observation: str) -> Turn:
    if task.kind == "lake":
        return Turn(f"{observation}\n\n{LAKE_HINT}", LAKE_LEAD, task.turn_tokens)
    return Turn(f"{observation}\n{CODE_HINT}", CODE_LEAD, task.turn_tokens, (FENCE,))


def _next(task: Task, result: ToolResult | None, *, last: bool) -> Turn:
    """After a lake's move: the map. After Python: its output and the answer if it printed one, else another try."""
    said = "" if result is None else (result.output or result.error or result.status)[:MOST_OUTPUT_CHARS]
    if task.kind == "lake":
        return Turn(said or LAKE_HINT, LAKE_LEAD, task.turn_tokens)
    printed = result is not None and result.ok and bool(result.output.strip())
    if printed or last:
        return Turn(f"{said}\nWhat is the answer?".lstrip(), ANSWER_LEAD, ANSWER_TOKENS)
    return Turn(f"{said}\n{RETRY_HINT}".lstrip(), CODE_LEAD, task.turn_tokens, (FENCE,))


async def _act(session: Session, task: Task, text: str) -> ToolResult | None:
    """The environment's answer to the assistant's words; None where they name no action."""
    if task.kind == "lake":
        move = direction(text)
        return None if move is None else await session.step({"action": move})
    if text.startswith(ANSWER_LEAD):
        found = puzzle_move(text)
        answer = found.text if found is not None and found.kind == "answer" else last_words(text)
        return await session.step({"answer": answer})
    found = puzzle_move(text)
    return None if found is None else await session.step({found.kind: found.text})
