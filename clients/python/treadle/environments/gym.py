"""Gym: play a gymnasium environment in this process, in words.

Each sample has an environment of its own, which is reset with the seed of its task, so that all samples of a prompt
begin alike. Calls go to a thread, one at a time for each environment, as a step may take long; one environment may be
called from several threads in turn. What runs here runs with the rights of this process: to play in a sandbox, use
`Sandboxed` (sandbox.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.environments.episode import Environment, Episode, Message, Reply, Task, Turn, user
from treadle.environments.words import ReadAction, first_of
from treadle.trajectory import Trajectory

if TYPE_CHECKING:
    import gymnasium

T = TypeVar("T")
Describe = Callable[["gymnasium.Env[Any, Any]", Any], str]  # (environment, observation) -> what the policy reads


def describe(env: gymnasium.Env[Any, Any], observation: Any) -> str:
    """What an environment shows: its own text where it is made with render_mode="ansi", else the observation."""
    return str(env.render()) if env.render_mode == "ansi" else str(observation)


class Gym(Environment):
    """A gymnasium environment.

    make: an id of gymnasium's registry, or a function that makes a new environment. seeds: a task for each. actions:
    words and the actions that they name, of which the first one in a reply counts; or a function from a reply's text to
    an action, None where it names none. system: the system message. hint: what the policy reads where its reply named
    no action, in place of a step. make_arguments: of gymnasium.make. Raises ValueError.
    """

    def __init__(
        self,
        make: str | Callable[[], gymnasium.Env[Any, Any]],
        *,
        seeds: Iterable[int],
        actions: Mapping[str, Any] | ReadAction,
        system: str = "",
        hint: str = "",
        describe: Describe = describe,
        **make_arguments: Any,
    ) -> None:
        if callable(make) and make_arguments:
            raise ValueError(f"{', '.join(make_arguments)}: only for an environment that is made by its id")
        self._make, self._make_arguments, self._describe = make, make_arguments, describe
        self._name = make if isinstance(make, str) else getattr(make, "__name__", "gym")
        self._seeds, self._system = tuple(seeds), system
        self._read: ReadAction = actions if callable(actions) else first_of(actions)
        named = "" if callable(actions) else f" Name one of: {', '.join(actions)}."
        self._hint = hint or f"That names no action.{named}"

    def tasks(self) -> list[Task]:
        """A task for each seed."""
        messages: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [Task(f"{self._name}-{seed}", messages, seed) for seed in self._seeds]

    async def start(self, task: Task, trajectory: Trajectory) -> Episode:
        """Make an environment. Errors: those of gymnasium."""
        return _GymEpisode(await asyncio.to_thread(self._made), task.data, self, trajectory)

    def _made(self) -> gymnasium.Env[Any, Any]:
        if callable(self._make):
            return self._make()
        import gymnasium

        return gymnasium.make(self._make, **self._make_arguments)

    def read(self, text: str) -> Any:
        """The action that a reply names; None where it names none."""
        return self._read(text)

    def show(self, env: gymnasium.Env[Any, Any], observation: Any) -> Message:
        """What the policy reads of an observation."""
        return user(self._describe(env, observation))

    def show_hint(self) -> Message:
        """What the policy reads where its reply named no action."""
        return user(self._hint)


class _GymEpisode(Episode):
    def __init__(self, env: gymnasium.Env[Any, Any], seed: int, gym: Gym, trajectory: Trajectory) -> None:
        self._env, self._seed, self._gym, self._trajectory = env, seed, gym, trajectory

    async def begin(self) -> Turn:
        def reset() -> Message:
            return self._gym.show(self._env, self._env.reset(seed=self._seed)[0])

        return Turn([await self._run(reset)])

    async def step(self, reply: Reply) -> Turn:
        action = self._gym.read(reply.text)
        if action is None:
            return Turn([self._gym.show_hint()])

        def act() -> Turn:
            observation, reward, terminated, truncated, _ = self._env.step(action)
            return Turn([self._gym.show(self._env, observation)], float(reward), bool(terminated or truncated))

        return await self._run(act)

    async def close(self) -> None:
        await asyncio.to_thread(self._env.close)

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._trajectory.time_tool(lambda: asyncio.to_thread(work))
