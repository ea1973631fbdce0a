"""Declare with decorators what agents, environments and rewards need of the mesh (RollArt §5.1):

    @treadle.environment("frozen_lake", limits=treadle.Limits(memory_bytes=256 << 20))
    def lake(prompt): return {"seed": prompt.data["seed"]}

    @treadle.reward("exact_match")
    def exact(trajectory, prompt):
        return {"answer": decode(trajectory.tokens), "expected": prompt.data["expected"]}

    @treadle.agent(environment=lake, reward=exact, hardware=["bandwidth"],
                   keep_per_prompt=8, redundancy=1.25)
    async def play(trajectory, prompt, session): ...

    await client.rollout(prompts, play)

Invariants: a declaration sends nothing; it names what Client.rollout, Trajectory.open_session and
Trajectory.score take anyway. What is declared for a rollout is the default of the argument of
Client.rollout with the same name. A wrong declaration raises TypeError or ValueError where it is
written.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.connection import Mesh
from treadle.rewards import PendingReward, require_serverless
from treadle.rollout.v1 import rollout_pb2
from treadle.rollouts.samples import shaping_fields
from treadle.trajectory import Session, Trajectory
from treadle.types import HardwareTags, Limits, Prompt, Shaping

Reply = float | PendingReward | None  # what an agent returns
AgentFunction = Callable[..., Coroutine[Any, Any, Reply]]
EnvironmentArguments = Callable[[Prompt], Mapping[str, Any]]
RewardArguments = Callable[[Trajectory, Prompt], Mapping[str, Any]]

ANY_OTHER_TASK = ""
ROUNDING = 1e-9  # as a float 1.12 * 25 is a little more than 28, and 28 samples are meant


@dataclass(frozen=True)
class Environment:
    """A declared environment; a call with a prompt returns the arguments of its session."""

    tool: str
    arguments: EnvironmentArguments
    limits: Limits | None

    def __call__(self, prompt: Prompt) -> Mapping[str, Any]:
        return _mapping("environment", self.tool, self.arguments(prompt))

    async def open(self, trajectory: Trajectory, prompt: Prompt) -> Session:
        """Open a session for the prompt. Errors: see Trajectory.open_session."""
        return await trajectory.open_session(self.tool, self(prompt), self.limits)


@dataclass(frozen=True)
class Reward:
    """A declared reward; a call with a trajectory and its prompt returns the arguments of the
    reward function."""

    name: str
    arguments: RewardArguments
    serverless: bool

    def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Mapping[str, Any]:
        return _mapping("reward", self.name, self.arguments(trajectory, prompt))

    async def request(self, trajectory: Trajectory, prompt: Prompt) -> PendingReward:
        """Request the reward of a trajectory. Errors: see Trajectory.score."""
        return await trajectory.score(self.name, self(trajectory, prompt))


@dataclass(frozen=True)
class RolloutArguments:
    """Arguments of Client.rollout that an agent may declare, under the same names, with their
    defaults.

    redundancy: samples begun over samples kept; 0: samples_per_prompt is the number that are begun.
    """

    samples_per_prompt: int = 4
    keep_per_prompt: int = 0
    max_staleness: int = -1
    concurrency: int = 0
    max_total_tokens: int = 0
    shaping: Shaping = field(default_factory=Shaping)
    hardware_tags: HardwareTags = ()
    redundancy: float = 0.0

    @classmethod
    def of(cls, agent: object, **given: Any) -> RolloutArguments:
        """Return the arguments of a call: what is given, and for each that is None what the agent
        declares, or the default.

        Raises ValueError where nothing is kept that a declared redundancy could multiply.
        """
        stated = {name: value for name, value in given.items() if value is not None}
        arguments = replace(agent.defaults if isinstance(agent, DeclaredAgent) else cls(), **stated)
        if not arguments.redundancy or "samples_per_prompt" in stated:
            return arguments
        if not arguments.keep_per_prompt:
            why = (
                f"the agent declares redundancy={arguments.redundancy:g} over the samples that "
                "are kept"
            )
            raise ValueError(
                f"keep_per_prompt=0 keeps all samples, and {why}: give samples_per_prompt too"
            )
        samples = math.ceil(arguments.redundancy * arguments.keep_per_prompt - ROUNDING)
        return replace(arguments, samples_per_prompt=samples)

    def spec(self, prompts: Sequence[Prompt]) -> rollout_pb2.RolloutSpec:
        """Make the spec of the rollout for the rollout service. Raises ValueError for a shaping
        that contradicts itself."""
        return rollout_pb2.RolloutSpec(
            samples_per_prompt=self.samples_per_prompt,
            keep_per_prompt=self.keep_per_prompt,
            max_staleness=self.max_staleness,
            prompt_ids=[prompt.id for prompt in prompts],
            max_total_tokens=self.max_total_tokens,
            **shaping_fields(self.shaping, self.samples_per_prompt),
        )


class DeclaredAgent:
    """An agent with what it has declared. Awaited without a rollout, it opens and closes the
    environment and requests the reward as in one; `__wrapped__` is the function alone."""

    def __init__(
        self,
        function: AgentFunction,
        environment: Environment | None,
        reward: Reward | None,
        defaults: RolloutArguments,
    ) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self.environment, self.reward, self.defaults = environment, reward, defaults

    async def __call__(self, trajectory: Trajectory, prompt: Prompt) -> Reply:
        if self.environment is None:
            reply = await self._function(trajectory, prompt)
        else:
            async with await self.environment.open(trajectory, prompt) as session:
                reply = await self._function(trajectory, prompt, session)
        if self.reward is None or reply is not None:
            return reply
        # The agent may have closed its trajectory itself, with a reward or as one that is not
        # trained.
        if trajectory.reward is not None or trajectory.outcome in ("failed", "cancelled"):
            return None
        return await self.reward.request(trajectory, prompt)


def environment(
    tool: str, *, limits: Limits | None = None
) -> Callable[[EnvironmentArguments], Environment]:
    """Declare an environment: the decorated function returns the arguments of its session for a
    prompt.

    tool: the name of an environment of the tools service. limits: of its sessions, at most the
    tool's own; None: the tool's own. Raises TypeError.
    """
    _require_name("environment", tool, "frozen_lake")
    _require_instance("limits", limits, Limits, "treadle.Limits(...)")

    def declare(function: EnvironmentArguments) -> Environment:
        _require_signature(f"environment {tool!r}", function, ["prompt"], is_async=False)
        return Environment(tool, function, limits)

    return declare


async def require_declared(mesh: Mesh, agent: object) -> None:
    """Raise TreadleError, before anything begins, where the mesh cannot do what an agent
    declares."""
    if isinstance(agent, DeclaredAgent) and agent.reward is not None and agent.reward.serverless:
        await require_serverless(mesh, agent.reward.name)


def reward(name: str, *, serverless: bool = False) -> Callable[[RewardArguments], Reward]:
    """Declare a reward: the decorated function returns the arguments of the reward function for a
    trajectory.

    name: of a reward function of the tools service. serverless: it must run behind a URL, where the
    operator has put it (FUNCTIONS), and not in sandboxes that the tools of agents use too;
    Client.rollout raises TreadleError REWARD_NOT_SERVERLESS before anything begins. False: wherever
    it runs. Raises TypeError.
    """
    _require_name("reward", name, "exact_match")

    def declare(function: RewardArguments) -> Reward:
        _require_signature(f"reward {name!r}", function, ["trajectory", "prompt"], is_async=False)
        return Reward(name, function, serverless)

    return declare


def agent(
    *,
    environment: Environment | None = None,
    reward: Reward | None = None,
    hardware: Mapping[str, Sequence[str]] | Sequence[str] | None = None,
    task: Callable[[Prompt], str] | None = None,
    redundancy: float | None = None,
    samples_per_prompt: int | None = None,
    keep_per_prompt: int | None = None,
    max_staleness: int | None = None,
    max_total_tokens: int | None = None,
    concurrency: int | None = None,
    shaping: Shaping | None = None,
) -> Callable[[AgentFunction], DeclaredAgent]:
    """Declare an agent, `async def f(trajectory, prompt)`, or `f(trajectory, prompt, session)` with
    an environment.

    environment: opened before the agent begins, and closed after it, however it ends. reward:
    requested after an agent that returned None. hardware: the tags that an engine must carry, all
    of them, to run the agent's trajectories; or by task, where "" is any task that is not named,
    and without it these run anywhere. task: of a prompt. redundancy: samples begun over samples
    kept (RollArt §5.3), so that samples_per_prompt is redundancy * keep_per_prompt, rounded up. The
    other arguments: as of Client.rollout, whose arguments take precedence. Raises TypeError,
    ValueError.
    """
    _require_instance(
        "environment", environment, Environment, 'a function under @treadle.environment("name")'
    )
    _require_instance("reward", reward, Reward, 'a function under @treadle.reward("name")')
    _require_instance("shaping", shaping, Shaping, "treadle.Shaping(...)")
    counts = {
        "samples_per_prompt": (samples_per_prompt, 1),
        "keep_per_prompt": (keep_per_prompt, 0),
        "max_staleness": (max_staleness, -1),
        "max_total_tokens": (max_total_tokens, 0),
        "concurrency": (concurrency, 0),
    }
    for name, (count, least) in counts.items():
        if count is not None and (not isinstance(count, int) or count < least):
            raise ValueError(f"{name} must be a whole number >= {least}, is {count!r}")
    if samples_per_prompt is not None and (keep_per_prompt or 0) > samples_per_prompt:
        raise ValueError(
            f"keep_per_prompt must be at most samples_per_prompt ({samples_per_prompt}), is "
            f"{keep_per_prompt}"
        )
    if redundancy is not None:
        _require_redundancy(redundancy, samples_per_prompt, keep_per_prompt)
    declared: dict[str, Any] = {name: count for name, (count, _) in counts.items()}
    declared |= {
        "redundancy": redundancy,
        "shaping": shaping,
        "hardware_tags": _tags_by_task(hardware, task),
    }
    defaults = RolloutArguments(
        **{name: value for name, value in declared.items() if value is not None}
    )
    takes = ("trajectory", "prompt") if environment is None else ("trajectory", "prompt", "session")

    def declare(function: AgentFunction) -> DeclaredAgent:
        why = f", as {'no' if environment is None else 'an'} environment is declared"
        _require_signature(
            f"agent {getattr(function, '__name__', '')}", function, takes, is_async=True, why=why
        )
        return DeclaredAgent(function, environment, reward, defaults)

    return declare


def _require_redundancy(
    redundancy: float, samples_per_prompt: int | None, keep_per_prompt: int | None
) -> None:
    if not 1 <= redundancy < math.inf:
        raise ValueError(
            f"redundancy must be a number >= 1, is {redundancy!r}: it is samples begun over "
            "samples kept"
        )
    if samples_per_prompt is not None:
        raise ValueError("redundancy gives samples_per_prompt: declare one of the two")
    if not keep_per_prompt:
        raise ValueError(
            "redundancy needs keep_per_prompt=...: how many samples of each prompt are kept"
        )


def _tags_by_task(
    hardware: Mapping[str, Sequence[str]] | Sequence[str] | None,
    task: Callable[[Prompt], str] | None,
) -> HardwareTags | None:
    """Return the tags of each trajectory; None where no hardware is declared."""
    if not isinstance(hardware, Mapping):
        if task is not None:
            raise ValueError("task=... chooses among hardware: declare hardware={task: tags}")
        return None if hardware is None else _tags("hardware", hardware)
    if not hardware or task is None:
        needs = "tags for a task at least, and task=...: a function that gives the task of a prompt"
        raise ValueError(f"hardware by task needs {needs}")
    by_task = {each: _tags(f"hardware[{each!r}]", tags) for each, tags in hardware.items()}
    others = by_task.get(ANY_OTHER_TASK, ())
    return lambda prompt, _sample: by_task.get(task(prompt), others)


def _tags(field: str, tags: Sequence[str]) -> tuple[str, ...]:
    if isinstance(tags, str) or not all(isinstance(tag, str) and tag for tag in tags):
        raise TypeError(f"{field} must be a sequence of tags such as ('bandwidth',), is {tags!r}")
    if not tags:
        raise ValueError(
            f"{field} is empty: name the tags of engines, or leave it out to run on any engine"
        )
    return tuple(tags)


def _mapping(kind: str, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(arguments, Mapping):
        raise TypeError(
            f"{kind} {name!r}: its function must return a mapping, returned "
            f"{type(arguments).__name__}"
        )
    return arguments


def _require_name(kind: str, name: str, example: str) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f'{kind} must be a name, as in @treadle.{kind}("{example}"), is {name!r}')


def _require_instance(field: str, value: object, wanted: type, example: str) -> None:
    if value is not None and not isinstance(value, wanted):
        raise TypeError(f"{field} must be {example}, is {type(value).__name__}")


def _require_signature(
    what: str, function: object, takes: Sequence[str], *, is_async: bool, why: str = ""
) -> None:
    """Raise TypeError unless it is a function of that kind that takes so many positional
    arguments."""
    if not callable(function) or inspect.iscoroutinefunction(function) is not is_async:
        raise TypeError(
            f"{what} must be a function defined with `{'async ' if is_async else ''}def`, is "
            f"{function!r}"
        )
    signature = inspect.signature(function)
    try:
        signature.bind(*takes)
    except TypeError:
        raise TypeError(
            f"{what} must take ({', '.join(takes)}){why}; it takes {signature}"
        ) from None
