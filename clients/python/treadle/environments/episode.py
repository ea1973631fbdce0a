"""Define the classes of an environment that a policy plays in words: tasks, episodes, turns and
replies.

An Environment has tasks, one for each prompt of a rollout, and starts an episode of a task for each
sample. An Episode decides what the policy reads, what a reply leads to, when it is over and what it
is worth. Messages are those of OpenAI's chat (`role`, `content`, and of tool results
`tool_call_id`), as chat templates take them. EnvManager (play.py) makes tokens of them; no
environment ever sees or makes a token.

Invariants: an episode is used by one trajectory, one call at a time, and closed once. An exception
of an episode fails its own trajectory alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from treadle.rewards import PendingReward
from treadle.trajectory import Trajectory
from treadle.types import Sampling, Step

Message = Mapping[str, Any]
# of OpenAI's chat: {"type": "function", "function": {name, description, parameters}}
ToolSchema = Mapping[str, Any]


def user(text: str) -> Message:
    """Make a message of the user; most environments send such messages."""
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote. error: why its arguments cannot be read; empty where they
    can."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str
    error: str = ""


@dataclass(frozen=True)
class Reply:
    """The policy's reply of one turn. text: decoded, with the turn's `lead` and without special
    tokens. step: its tokens, logprobs and times."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    step: Step


@dataclass(frozen=True)
class Turn:
    """Messages that the policy reads before its next reply, and the reward of the reply before.

    reward: of the reply before. done: the episode is over, and `messages` are not used. lead: first
    words of the next reply, given to the policy with 0 in the loss mask. sampling: of the next
    reply; None: that of the EnvManager.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    lead: str = ""
    sampling: Sampling | None = None


@dataclass(frozen=True)
class Task:
    """One prompt of a rollout.

    id: the same for all of its samples. messages: how each episode of it begins. Where the user's
    message is the last one, the policy replies to it; else the episode's `begin` adds what differs
    from sample to sample, or is not known before. data: whatever the environment needs.
    """

    id: str
    messages: Sequence[Message] = ()
    data: Any = None

    @property
    def is_complete(self) -> bool:
        """Return whether the policy replies to these messages, without more of them from
        `begin`."""
        return bool(self.messages) and self.messages[-1]["role"] == "user"


class Episode(ABC):
    """One run of a task."""

    async def begin(self) -> Turn:
        """Return what the policy reads first, after the messages of its task. Of a complete task:
        no messages."""
        return Turn()

    @abstractmethod
    async def step(self, reply: Reply) -> Turn:
        """Return the turn that follows a reply."""

    async def finish(self, conversation: Sequence[Message]) -> float | PendingReward:
        """Return what the episode is worth beyond the rewards of its turns, once it is over or has
        no turns left.

        A PendingReward takes the place of all rewards.
        """
        return 0.0

    async def close(self) -> None:  # noqa: B027 - most episodes hold nothing
        """Release what the episode holds, however it ended."""


class Environment(ABC):
    """Something that can be played. As an async context manager it holds what its episodes share;
    EnvManager.rollout enters it."""

    # which the chat template shows the policy; known once the environment is entered
    tools: Sequence[ToolSchema] = ()

    @abstractmethod
    def tasks(self) -> Iterable[Task]:
        """Return the prompts of a rollout, each with an id of its own."""

    @abstractmethod
    async def start(self, task: Task, trajectory: Trajectory) -> Episode:
        """Start an episode. trajectory: the one that plays it, e.g. for tools of the mesh."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None
