"""Play episodes of an environment as trajectories of the mesh, with EnvManager.

One turn: the environment's messages become tokens (chat.py), the policy generates, its text is read
for tool calls, the environment takes the reply. Invariants: tokens that the policy sampled are
never tokenized again; all other tokens of a trajectory have 0 in its loss mask; an episode is
closed however its trajectory ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from treadle.client import Client
from treadle.connection import finish
from treadle.environments.chat import Chat
from treadle.environments.episode import (
    Environment,
    Episode,
    Message,
    Reply,
    Task,
    ToolCall,
    Turn,
    message_of,
    read_tool_calls,
)
from treadle.rewards import PendingReward
from treadle.trajectory import Trajectory
from treadle.types import Prompt, RolloutResult, Sampling

MOST_TURNS = 16

_log = logging.getLogger("treadle")


class EnvManager:
    """Player of an environment, on a client of the mesh, with one model's chat template.

    sampling: of each turn; to a seed, of a turn's own sampling too, the index of the sample within
    its group is added. most_turns: of an episode; the environment gets the last reply too.
    read_calls: tool calls of a text, for a model that writes them in another way than
    `read_tool_calls` knows, which is the default, with the names of the environment's tools; not
    called where the environment has no tools. An EnvManager is an
    agent: `client.rollout(manager.prompts(), manager)` does what `manager.rollout()` does, in an
    environment that its user has entered. Raises ValueError.
    """

    def __init__(
        self,
        client: Client,
        environment: Environment,
        *,
        chat: Chat,
        sampling: Sampling,
        most_turns: int = MOST_TURNS,
        read_calls: Callable[[str], Sequence[ToolCall]] | None = None,
    ) -> None:
        if most_turns < 1:
            raise ValueError(f"most_turns must be >= 1, is {most_turns}")
        self._client, self._environment, self._chat, self._sampling = (
            client,
            environment,
            chat,
            sampling,
        )
        self._most_turns, self._read_calls = most_turns, read_calls

    def prompts(self, tasks: Iterable[Task] | None = None) -> list[Prompt]:
        """Make a prompt of each task; None: all tasks of the environment. Raises ValueError where
        two have the same id."""
        chosen = list(self._environment.tasks() if tasks is None else tasks)
        if len({task.id for task in chosen}) < len(chosen):
            raise ValueError("two tasks have the same id: ids name the groups of samples")
        return [Prompt(task.id, self._prompt_tokens(task), task) for task in chosen]

    async def rollout(self, tasks: Iterable[Task] | None = None, **arguments: Any) -> RolloutResult:
        """Play all samples of all tasks. tasks: None: all of the environment. arguments: of
        Client.rollout, e.g. samples_per_prompt=8, progress=True. Errors: those of Client.rollout
        and of the environment's start."""
        async with self._environment:
            return await self._client.rollout(self.prompts(tasks), self, **arguments)

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> float | PendingReward:
        """Play one episode to its end and return what it is worth. prompt: of `prompts`."""
        task: Task = prompt.data
        episode = await self._environment.start(task, trajectory)
        try:
            worth = await self._play(episode, task, trajectory)
        except BaseException:
            try:
                await finish(episode.close())
            except Exception as error:  # noqa: BLE001 - the trajectory reports what failed before
                _log.warning(
                    "an episode of %s cannot be closed: %s: %s",
                    task.id,
                    type(error).__name__,
                    error,
                )
            raise
        await finish(episode.close())
        return worth

    async def _play(
        self, episode: Episode, task: Task, trajectory: Trajectory
    ) -> float | PendingReward:
        turn, reward = await episode.begin(), 0.0
        conversation: list[Message] = [*task.messages, *turn.messages]
        if opening := self._opening(task, turn):
            trajectory.observe(opening)
        tools, before = self._environment.tools, tuple(conversation)
        for number in range(self._most_turns):
            if turn.done or trajectory.tokens_left == 0:
                break
            if number:
                sampled, before = trajectory.steps[-1].token_ids, tuple(turn.messages)
                trajectory.observe(self._chat.go_on(sampled, before, tools, turn.lead))
            begins = self._chat.reply_opening(before, tools, after_reply=number > 0) + turn.lead
            reply = await self._generate(trajectory, turn.sampling or self._sampling, begins)
            conversation.append(message_of(reply))
            turn = await episode.step(reply)
            conversation += turn.messages
            reward += turn.reward
        ending = await episode.finish(conversation)
        return ending if isinstance(ending, PendingReward) else reward + ending

    async def _generate(self, trajectory: Trajectory, sampling: Sampling, begins: str) -> Reply:
        stops = dict.fromkeys((*sampling.stop_token_ids, *self._chat.stop_token_ids))
        sampling = replace(sampling.of_sample(trajectory.sample), stop_token_ids=tuple(stops))
        async for _ in trajectory.generate(sampling):
            pass
        step = trajectory.steps[-1]
        text = begins + self._chat.decode(step.token_ids)
        return Reply(text, tuple(self._calls_in(text)), step)

    def _calls_in(self, text: str) -> Sequence[ToolCall]:
        names = [tool["function"]["name"] for tool in self._environment.tools]
        if not names:
            return ()
        return self._read_calls(text) if self._read_calls else read_tool_calls(text, names)

    def _prompt_tokens(self, task: Task) -> list[int]:
        make = self._chat.begin if task.is_complete else self._chat.head
        tokens = make(task.messages, self._environment.tools)
        if not tokens:
            raise ValueError(
                f"task {task.id!r} begins with no token: give its environment a system message"
            )
        return tokens

    def _opening(self, task: Task, turn: Turn) -> list[int]:
        """Return the tokens between the prompt and the policy's first words."""
        if not task.is_complete:
            return self._chat.complete(
                task.messages, turn.messages, self._environment.tools, turn.lead
            )
        if turn.messages:
            raise ValueError(
                f"task {task.id!r} ends with the user's message, so `begin` must add none"
            )
        return self._chat.words(turn.lead) if turn.lead else []
