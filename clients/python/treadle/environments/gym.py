"""Play a gymnasium environment in this process, in words (Gym).

Each sample has an environment of its own, which is reset with the seed of its task, so that all
samples of a prompt begin alike. Calls go to a thread, one at a time for each environment, as a step
may take long; one environment may be called from several threads in turn. A call that runs in a
thread cannot be cancelled: the environment is closed after it. The environment runs with the rights
of this process: to play in a sandbox, use `Sandboxed` (sandbox.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from treadle.environments.episode import (
    Environment,
    Episode,
    Message,
    ReadAction,
    Reply,
    Task,
    Turn,
    first_of,
    user,
)
from treadle.trajectory import Trajectory

if TYPE_CHECKING:
    import gymnasium

T = TypeVar("T")
# a trajectory that is cancelled waits this long for its environment, which closes by itself
# afterwards
CLOSE_S = 10.0
# (environment, observation) -> what the policy reads
Describe = Callable[["gymnasium.Env[Any, Any]", Any], str]


def describe(env: gymnasium.Env[Any, Any], observation: Any) -> str:
    """Return what an environment shows: its own text where it is made with render_mode="ansi", else
    the observation."""
    return str(env.render()) if env.render_mode == "ansi" else str(observation)


class Gym(Environment):
    """A gymnasium environment.

    make: an id of gymnasium's registry, or a function that makes a new environment. seeds: a task
    for each. actions: words and the actions that they name, of which the first one in a reply
    counts; or a function from a reply's text, without its reasoning, to an action, None where it
    names none. system: the system message. hint: what the policy reads where its reply named no
    action, in place of a step. make_arguments: of gymnasium.make. Raises ValueError.
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
            raise ValueError(
                f"{', '.join(make_arguments)}: only for an environment that is made by its id"
            )
        self._make, self._make_arguments, self._describe = make, make_arguments, describe
        self._name = make if isinstance(make, str) else getattr(make, "__name__", "gym")
        self._seeds, self._system = tuple(seeds), system
        self._read: ReadAction = actions if callable(actions) else first_of(actions)
        named = "" if callable(actions) else f" Name one of: {', '.join(actions)}."
        self._hint = hint or f"That names no action.{named}"

    def tasks(self) -> list[Task]:
        """Return a task for each seed."""
        messages: list[Message] = (
            [{"role": "system", "content": self._system}] if self._system else []
        )
        return [Task(f"{self._name}-{seed}", messages, seed) for seed in self._seeds]

    async def start(self, task: Task, trajectory: Trajectory) -> Episode:
        """Start an episode, which makes its environment as it begins."""
        return _GymEpisode(self, task.data, trajectory)

    def make(self) -> gymnasium.Env[Any, Any]:
        """Make a new environment. Errors: those of gymnasium."""
        if callable(self._make):
            return self._make()
        import gymnasium

        return gymnasium.make(self._make, **self._make_arguments)

    def read(self, text: str) -> Any:
        """Return the action that a reply names; None where it names none."""
        return self._read(text)

    def show(self, env: gymnasium.Env[Any, Any], observation: Any) -> Message:
        """Return what the policy reads of an observation."""
        return user(self._describe(env, observation))

    def show_hint(self) -> Message:
        """Return what the policy reads where its reply named no action."""
        return user(self._hint)


class _GymEpisode(Episode):
    def __init__(self, gym: Gym, seed: int, trajectory: Trajectory) -> None:
        self._gym, self._seed, self._trajectory = gym, seed, trajectory
        self._env: gymnasium.Env[Any, Any] | None = None
        self._call: asyncio.Future[Any] | None = (
            None  # the last call, which continues where the trajectory is cancelled
        )

    async def begin(self) -> Turn:
        def reset() -> Turn:
            self._env = self._gym.make()
            return Turn([self._gym.show(self._env, self._env.reset(seed=self._seed)[0])])

        return await self._run(reset)

    async def step(self, reply: Reply) -> Turn:
        env, action = self._env, self._gym.read(reply.said)
        assert env is not None, "begun"
        if action is None:
            return Turn([self._gym.show_hint()])

        def act() -> Turn:
            observation, reward, terminated, truncated, _ = env.step(action)
            return Turn(
                [self._gym.show(env, observation)], float(reward), bool(terminated or truncated)
            )

        return await self._run(act)

    async def close(self) -> None:
        closing = asyncio.create_task(self._close())
        await asyncio.wait({closing}, timeout=CLOSE_S)
        if closing.done():
            closing.result()

    async def _close(self) -> None:
        if self._call is not None:
            await asyncio.wait({self._call})
        if self._env is not None:
            await asyncio.to_thread(self._env.close)

    async def _run(self, work: Callable[[], T]) -> T:
        async def call() -> T:
            self._call = running = asyncio.ensure_future(asyncio.to_thread(work))
            return await asyncio.shield(running)

        return await self._trajectory.time_tool(call)
