"""Play the demo's environments: build what a small model reads in each turn, and read actions from
its text.

A small model seldom keeps to a format, so the first words of each assistant's turn are given ("I
move", a block of Python, "Answer:") and the model continues; given words have loss mask 0. What it
writes is parsed tolerantly. A tool that fails is an observation.
"""

import asyncio
import re
from collections.abc import Iterable
from typing import cast

from treadle import Sampling, Session, ToolResult, Trajectory
from treadle.environments import Environment, Episode, Reply, Turn, user
from treadle.environments import Task as AnyTask

from treadle_cli.demo.tasks import Task

TEMPERATURE = 1.0  # a policy explores: greedy samples of one prompt would all be the same
MOST_OUTPUT_CHARS = 300  # that the model reads of a tool's output: it understands less
ANSWER_TOKENS = 24  # an answer is a number or a word
LAKE_LEAD, CODE_LEAD, ANSWER_LEAD = "I move", "```python\nprint(", "Answer:"
FENCE = "```"  # ends a block of Python, and the turn
LAKE_HINT = "Name one move: left, down, right or up."
CODE_HINT = "Print the result with one line of Python."
RETRY_HINT = "That printed no result. Try again with one line of Python."


class DemoEnvironment(Environment):
    """Lakes and puzzles in the mesh's sandboxes. tool_latency_s: added to every tool call, as if
    the tool were across a network; 0 for none."""

    def __init__(self, tasks: Iterable[Task], tool_latency_s: float = 0.0) -> None:
        self._tasks, self._tool_latency_s = list(tasks), tool_latency_s

    def tasks(self) -> list[AnyTask]:
        """Return the tasks that were given."""
        return [*self._tasks]

    async def start(self, task: AnyTask, trajectory: Trajectory) -> Episode:
        """Open the session of a task."""
        demo = cast("Task", task)
        session = await trajectory.open_session(demo.environment, demo.arguments)
        return _Play(demo, session, trajectory, self._tool_latency_s)


class _Play(Episode):
    def __init__(
        self, task: Task, session: Session, trajectory: Trajectory, tool_latency_s: float
    ) -> None:
        self._task, self._session, self._trajectory = task, session, trajectory
        self._tool_latency_s = tool_latency_s

    async def begin(self) -> Turn:
        first = self._session.first.output
        if self._task.kind == "lake":
            return self._turn(f"{first}\n\n{LAKE_HINT}", LAKE_LEAD)
        return self._turn(f"{first}\n{CODE_HINT}", CODE_LEAD)

    async def step(self, reply: Reply) -> Turn:
        action, result = read_action(self._task, reply.text), None
        if action is not None:
            result = await self._session.step(action)
            if self._tool_latency_s > 0:
                await self._trajectory.time_tool(lambda: asyncio.sleep(self._tool_latency_s))
        reward = (result.reward or 0.0) if result is not None else 0.0
        left = self._task.turns - len(self._trajectory.steps)
        if left == 0 or (result is not None and result.done):
            return Turn(reward=reward, done=True)
        return self._next(result, reward, last=left == 1)

    async def close(self) -> None:
        await self._session.close()

    def _next(self, result: ToolResult | None, reward: float, *, last: bool) -> Turn:
        """Return the turn after a tool's result. On the lake it shows the map. After Python it
        requests the answer if something was printed, else another try."""
        message = (
            ""
            if result is None
            else (result.output or result.error or result.status)[:MOST_OUTPUT_CHARS]
        )
        if self._task.kind == "lake":
            return self._turn(message or LAKE_HINT, LAKE_LEAD, reward)
        printed = result is not None and result.ok and bool(result.output.strip())
        if printed or last:
            return self._turn(f"{message}\nWhat is the answer?".lstrip(), ANSWER_LEAD, reward)
        return self._turn(f"{message}\n{RETRY_HINT}".lstrip(), CODE_LEAD, reward)

    def _turn(self, message: str, lead: str, reward: float = 0.0) -> Turn:
        number, trajectory = len(self._trajectory.steps), self._trajectory
        sampling = Sampling(
            max_new_tokens=ANSWER_TOKENS if lead == ANSWER_LEAD else self._task.turn_tokens,
            temperature=TEMPERATURE,
            seed=self._task.sampling_seed(trajectory.prompt_id, trajectory.sample, number),
            stop=(FENCE,) if lead == CODE_LEAD else (),
        )
        return Turn([user(message)], reward, lead=lead, sampling=sampling)


_DIRECTION = re.compile(r"\b(left|down|right|up)\b", re.IGNORECASE)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_ANSWERS = (
    re.compile(r"answer\s*(?:is|:|=)\s*\**\s*([^\n*]+)", re.IGNORECASE),
    re.compile(r"\\boxed\{([^{}]*)\}"),
)
_MARKUP = " \t*`$\"'"


def read_action(task: Task, text: str) -> dict[str, str] | None:
    """Return the action that the text names, as the environment takes it; None where it names none.

    On the lake it is the first direction, in a puzzle Python or an answer, whichever comes first. A
    turn that began with "Answer:" is an answer, its last line if nothing else is marked.
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
    """Return a block of Python (closed or cut off), "answer: ...", or \\boxed{...}."""
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
