"""The demo's agent: generate, act in the environment, observe, until the environment or the turns end.

A small model seldom keeps to a format, so the first words of each assistant's turn are given ("I move", a block of
Python, "Answer:") and the model continues; given words have loss mask 0. What it writes is parsed tolerantly. A tool
that fails is an observation. Token ids that the model generated are never tokenized again (chatml.py).
"""

import asyncio
import re
import time
from dataclasses import dataclass

from treadle import Prompt, Sampling, Span, ToolResult, Trajectory

from treadle_cli.demo.chatml import ChatML
from treadle_cli.demo.tasks import Task

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
    """The next turn: the user's message, the assistant's first words, most new tokens, strings that end it."""

    message: str
    lead: str
    most_tokens: int
    stop: tuple[str, ...] = ()


class Player:
    """The demo's agent. tool_latency_s: added to every tool call, as if the tool were across a network; 0 for none."""

    def __init__(self, chat: ChatML, tool_latency_s: float = 0.0) -> None:
        self._chat = chat
        self._tool_latency_s = tool_latency_s

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float:
        """Play one trajectory to its end and return its reward."""
        task: Task = prompt.data
        reward = 0.0
        async with await trajectory.open_session(task.environment, task.arguments) as session:
            turn = _first_turn(task, session.first.output)
            trajectory.observe(self._chat.user(turn.message, turn.lead))
            for number in range(task.turns):
                generated = await self._generate(trajectory, prompt, turn, number)
                action = read_action(task, turn.lead + self._chat.text(generated))
                result = None
                if action is not None:
                    result = await session.step(action)
                    await self._add_latency(trajectory, number)
                    reward += result.reward or 0.0
                if number == task.turns - 1 or (result is not None and result.done):
                    break
                turn = _next_turn(task, result, last=number == task.turns - 2)
                trajectory.observe(self._chat.after_turn(generated, turn.message, turn.lead))
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

    async def _add_latency(self, trajectory: Trajectory, number: int) -> None:
        """Wait as long as a call across a network would take; it counts as tool time."""
        if self._tool_latency_s > 0:
            start_s = time.time()
            await asyncio.sleep(self._tool_latency_s)
            trajectory.spans.append(Span("tool", start_s, time.time(), "", number))


def _first_turn(task: Task, observation: str) -> Turn:
    if task.kind == "lake":
        return Turn(f"{observation}\n\n{LAKE_HINT}", LAKE_LEAD, task.turn_tokens)
    return Turn(f"{observation}\n{CODE_HINT}", CODE_LEAD, task.turn_tokens, (FENCE,))


def _next_turn(task: Task, result: ToolResult | None, *, last: bool) -> Turn:
    """After a move on the lake: the map. After Python: ask for the answer if it printed anything, else retry."""
    message = "" if result is None else (result.output or result.error or result.status)[:MOST_OUTPUT_CHARS]
    if task.kind == "lake":
        return Turn(message or LAKE_HINT, LAKE_LEAD, task.turn_tokens)
    printed = result is not None and result.ok and bool(result.output.strip())
    if printed or last:
        return Turn(f"{message}\nWhat is the answer?".lstrip(), ANSWER_LEAD, ANSWER_TOKENS)
    return Turn(f"{message}\n{RETRY_HINT}".lstrip(), CODE_LEAD, task.turn_tokens, (FENCE,))


_DIRECTION = re.compile(r"\b(left|down|right|up)\b", re.IGNORECASE)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_ANSWERS = (re.compile(r"answer\s*(?:is|:|=)\s*\**\s*([^\n*]+)", re.IGNORECASE), re.compile(r"\\boxed\{([^{}]*)\}"))
_MARKUP = " \t*`$\"'"


def read_action(task: Task, text: str) -> dict[str, str] | None:
    """The action that the text names, as the environment takes it; None where it names none.

    On the lake: the first direction. In a puzzle: Python or an answer, whichever comes first; a turn that began with
    "Answer:" is an answer, its last line if nothing else is marked.
    """
    if task.kind == "lake":
        found = _DIRECTION.search(text)
        return {"action": found.group(1).lower()} if found else None
    action = _first_code_or_answer(text)
    if text.startswith(ANSWER_LEAD) and (action is None or "answer" not in action):
        lines = [line.strip(_MARKUP) for line in text.splitlines()]
        return {"answer": next((line for line in reversed(lines) if line), "")}
    return action


def _first_code_or_answer(text: str) -> dict[str, str] | None:
    """A block of Python (closed or cut off), "answer: ...", or \\boxed{...}."""
    blocks = [(match.start(), match.group(1).rstrip()) for match in _FENCE.finditer(text)]
    actions = [(start, {"code": code}) for start, code in blocks if code]
    # An "answer:" inside a block of code is a string or a comment, not the answer.
    prose = _FENCE.sub(lambda match: " " * len(match.group(0)), text)
    for pattern in _ANSWERS:
        for match in pattern.finditer(prose):
            answer = match.group(1).strip(_MARKUP).rstrip(".").strip(_MARKUP)
            if answer:
                actions.append((match.start(), {"answer": answer}))
    return min(actions, key=lambda action: action[0])[1] if actions else None
