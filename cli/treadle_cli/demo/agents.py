"""Play the demo's work: make its prompts, build what a small model reads in each turn, and read
actions from its text.

Prompts are FrozenLake maps and reasoning-gym puzzles for a model of 135 million parameters. A
prompt depends on its index and the run's seed alone, so both arms, and a later run with the same
seed, get the same maps and puzzles; an epoch has sampling seeds of its own.

Real agents' work has a tail, so prompts differ in how many turns, and how many tokens a turn, they
allow: both are quantiles of log-normal distributions, with the longest turns where most turns are
allowed. TURNS_SIGMA is that of 11,255 tool-using runs of 74 tasks (mcpmark: half of them end within
12 turns, nine tenths within 32, the longest at 100; 0.82, of which the prompt decides at least a
quarter), and lies between the turns of coding agents (SWE-bench 0.42, sessions of Claude Code
1.19). The medians are as small as a CPU needs. Samples of a prompt differ too: walks end early and
programs fail.

A small model seldom keeps to a format, so the first words of each assistant's turn are given ("I
move", a block of Python, "Answer:") and the model continues; given words have loss mask 0. What it
writes is parsed tolerantly. A tool that fails is an observation.
"""

import asyncio
import math
import random
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal, cast

from tokenizers import Tokenizer
from treadle import Prompt, Sampling, Session, ToolResult, Trajectory
from treadle.environments import Chat, Environment, Episode, Message, Reply, Turn, user
from treadle.environments import Task as AnyTask

from treadle_cli.exits import UsageProblem

# Tasks of reasoning-gym with short questions that a small model can try.
PUZZLES = ("chain_sum", "letter_counting", "leg_counting", "simple_equations")
LAKE_SYSTEM = (
    "You play a game on a map. Each turn, name one move and say why: left, down, right or up."
)
PUZZLE_SYSTEM = (
    "You solve puzzles with short Python programs that print the result, then give the answer."
)
LAKE_SIZES = (4, 8)
TURNS_MEDIAN, TURNS_SIGMA = 2.5, 0.82  # sigma of the natural logarithm
TURN_TOKENS_MEDIAN, TURN_TOKENS_SIGMA = 10.0, 0.3
LEAST_TURNS = 2  # a program and an answer
START, END = "<|im_start|>", "<|im_end|>"
TEMPERATURE = 1.0  # a policy explores: greedy samples of one prompt would all be the same
MOST_OUTPUT_CHARS = 300  # that the model reads of a tool's output: it understands less
ANSWER_TOKENS = 24  # an answer is a number or a word
LAKE_LEAD, CODE_LEAD, ANSWER_LEAD = "I move", "```python\nprint(", "Answer:"
FENCE = "```"  # ends a block of Python, and the turn
LAKE_HINT = "Name one move: left, down, right or up."
CODE_HINT = "Print the result with one line of Python."
RETRY_HINT = "That printed no result. Try again with one line of Python."
_DIRECTION = re.compile(r"\b(left|down|right|up)\b", re.IGNORECASE)
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_ANSWERS = (
    re.compile(r"answer\s*(?:is|:|=)\s*\**\s*([^\n*]+)", re.IGNORECASE),
    re.compile(r"\\boxed\{([^{}]*)\}"),
)
_MARKUP = " \t*`$\"'"


@dataclass(frozen=True, kw_only=True)
class Task(AnyTask):
    """Prompt of the demo, with all that its agent needs to play it.

    environment, arguments: of the session. turn_tokens: most new tokens a turn. turns: most turns.
    sampling: what all sampling seeds are made from.
    """

    kind: Literal["lake", "puzzle"]
    environment: str
    arguments: dict[str, Any]
    turn_tokens: int
    turns: int
    sampling: str

    def sampling_seed(self, prompt_id: str, sample: int, turn: int) -> int:
        """Return the sampling seed of one step, the same in every arm."""
        return zlib.crc32(f"{self.sampling}/{prompt_id}/{sample}/{turn}".encode())


def make_prompts(chat: Chat, count: int, seed: int, epoch: int = 0) -> list[Prompt]:
    """Return `count` prompts, at least one, lakes and puzzles in turn. Another epoch samples the
    same prompts with other seeds."""
    ranks = list(range(count))
    # where a long prompt stands must not follow from its length
    random.Random(f"ranks {seed}").shuffle(ranks)
    return [_make(chat, index, rank, count, seed, epoch) for index, rank in enumerate(ranks)]


def _make(chat: Chat, index: int, rank: int, count: int, seed: int, epoch: int) -> Prompt:
    """Return one prompt. rank: of its length among `count`, 0 for the shortest."""
    deviations = NormalDist().inv_cdf((rank + 0.5) / count)
    turns = max(LEAST_TURNS, round(TURNS_MEDIAN * math.exp(TURNS_SIGMA * deviations)))
    turn_tokens = round(TURN_TOKENS_MEDIAN * math.exp(TURN_TOKENS_SIGMA * deviations))
    # The longest prompt is a lake: a program that prints anything ends a puzzle, whatever its limit
    # is.
    if (count - rank) % 2:
        lake = {
            "seed": 1000 * seed + index,
            "size": LAKE_SIZES[rank // 2 % 2],
            "slippery": rank % 4 == 1,
        }
        name, system = "lake", LAKE_SYSTEM
        played: dict[str, Any] = {"kind": "lake", "environment": "frozen_lake", "arguments": lake}
    else:
        puzzle = {"task": PUZZLES[rank // 2 % len(PUZZLES)], "seed": 1000 * seed + index}
        name, system = str(puzzle["task"]), PUZZLE_SYSTEM
        played = {"kind": "puzzle", "environment": "reasoning_gym", "arguments": puzzle}
    task = Task(
        f"{name}-{index}",
        [{"role": "system", "content": system}],
        turn_tokens=turn_tokens,
        turns=turns,
        sampling=f"{seed}/{epoch}",
        **played,
    )
    return Prompt(task.id, chat.head(task.messages), task)


def read_chat(model_path: str) -> Chat:
    """Return the chat of a model's folder, from its tokenizer.json. Raises UsageProblem where there
    is none, or no ChatML."""
    path = Path(model_path) / "tokenizer.json"
    if not path.is_file():
        raise UsageProblem(
            f"{path} does not exist: the demo needs the model as a local folder with its "
            "tokenizer.json"
        )
    return chat_of(Tokenizer.from_file(str(path)))


def chat_of(tokenizer: Tokenizer) -> Chat:
    """Return the chat of a tokenizer. Raises UsageProblem for one without the tokens of ChatML."""
    end_id = tokenizer.token_to_id(END)
    if end_id is None or tokenizer.token_to_id(START) is None:
        raise UsageProblem(
            f"the demo needs ChatML, and the tokenizer has no {START} and {END}: choose another "
            "--model"
        )
    return Chat(
        _render,
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        stop_token_ids=(end_id,),
    )


def _render(messages: Sequence[Message], _tools: object, begins: bool) -> str:
    text = "".join(f"{START}{message['role']}\n{message['content']}{END}\n" for message in messages)
    return f"{text}{START}assistant\n" if begins else text


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
        action, result = read_action(self._task, reply.said), None
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
