"""Declarations of agents, environments and rewards: what is refused where it is written, and what a
call takes."""

from collections.abc import Callable
from typing import Any

import pytest
import treadle
from treadle.rollouts.declare import RolloutArguments

PROMPT = treadle.Prompt("p0", [1, 2], data={"task": "lake", "seed": 7})


@treadle.environment("frozen_lake", limits=treadle.Limits(cpu_cores=1))
def lake(prompt: treadle.Prompt) -> dict[str, Any]:
    return {"seed": prompt.data["seed"]}


@treadle.reward("exact_match")
def exact(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> dict[str, Any]:
    return {"answer": "4", "expected": "4"}


async def play(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> None:
    """Play."""


async def play_lake(
    trajectory: treadle.Trajectory, prompt: treadle.Prompt, session: treadle.Session
) -> None:
    """Play on a lake."""


def of_task(prompt: treadle.Prompt) -> str:
    return str(prompt.data["task"])


WRONG_AGENTS: list[tuple[dict[str, Any], Callable[..., Any], type[Exception], str]] = [
    ({"samples": 3}, play, TypeError, "unexpected keyword argument 'samples'"),
    (
        {"samples_per_prompt": 0},
        play,
        ValueError,
        "samples_per_prompt must be a whole number >= 1, is 0",
    ),
    ({"concurrency": 1.5}, play, ValueError, "concurrency must be a whole number >= 0, is 1.5"),
    ({"max_total_tokens": -1}, play, ValueError, "max_total_tokens must be a whole number >= 0"),
    ({"max_staleness": -2}, play, ValueError, "max_staleness must be a whole number >= -1"),
    (
        {"samples_per_prompt": 4, "keep_per_prompt": 5},
        play,
        ValueError,
        r"at most samples_per_prompt \(4\), is 5",
    ),
    (
        {"keep_per_prompt": 8, "redundancy": 0.9},
        play,
        ValueError,
        "redundancy must be a number >= 1, is 0.9",
    ),
    ({"redundancy": 1.5}, play, ValueError, "redundancy needs keep_per_prompt"),
    (
        {"redundancy": 1.5, "keep_per_prompt": 4, "samples_per_prompt": 6},
        play,
        ValueError,
        "redundancy gives samples_per_prompt: declare one of the two",
    ),
    ({"hardware": ()}, play, ValueError, "hardware is empty: name the tags"),
    (
        {"hardware": "compute"},
        play,
        TypeError,
        r"hardware must be a sequence of tags such as \('bandwidth',\)",
    ),
    ({"hardware": {"lake": ()}, "task": of_task}, play, ValueError, r"hardware\['lake'\] is empty"),
    (
        {"hardware": {"lake": "compute"}, "task": of_task},
        play,
        TypeError,
        r"hardware\['lake'\] must be a sequence",
    ),
    (
        {"hardware": {"lake": [""]}, "task": of_task},
        play,
        TypeError,
        r"hardware\['lake'\] must be a sequence",
    ),
    ({"hardware": {}, "task": of_task}, play, ValueError, "hardware by task needs tags for a task"),
    ({"hardware": {"lake": ["compute"]}}, play, ValueError, "hardware by task needs .*task="),
    (
        {"hardware": ["compute"], "task": of_task},
        play,
        ValueError,
        "task=... chooses among hardware",
    ),
    ({"task": of_task}, play, ValueError, "task=... chooses among hardware: declare hardware="),
    (
        {"environment": "frozen_lake"},
        play_lake,
        TypeError,
        r"environment must be .*@treadle.environment.*, is str",
    ),
    ({"reward": "exact_match"}, play, TypeError, r"reward must be .*@treadle.reward.*, is str"),
    (
        {"shaping": {"rule": "first"}},
        play,
        TypeError,
        r"shaping must be treadle.Shaping\(...\), is dict",
    ),
    (
        {"environment": lake},
        play,
        TypeError,
        r"play must take \(trajectory, prompt, session\), as an environment is",
    ),
    (
        {},
        play_lake,
        TypeError,
        r"play_lake must take \(trajectory, prompt\), as no environment is declared",
    ),
    ({}, of_task, TypeError, "agent of_task must be a function defined with `async def`"),
]


@pytest.mark.parametrize(("declared", "function", "error", "message"), WRONG_AGENTS)
def test_a_wrong_declaration_of_an_agent_is_refused_where_it_is_written(
    declared: dict[str, Any], function: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        treadle.agent(**declared)(function)


WRONG_OTHERS: list[tuple[str, Any, Any, str]] = [
    (
        "environment",
        of_task,
        of_task,
        r'environment must be a name, as in @treadle.environment\("frozen_lake"\)',
    ),
    ("environment", "", of_task, "environment must be a name"),
    ("environment", "lake", play, "environment 'lake' must be a function defined with `def`"),
    (
        "environment",
        "lake",
        exact.arguments,
        r"environment 'lake' must take \(prompt\); it takes \(trajectory",
    ),
    ("environment", "lake", {"seed": 1}, "environment 'lake' must be a function"),
    ("reward", of_task, of_task, r'reward must be a name, as in @treadle.reward\("exact_match"\)'),
    (
        "reward",
        "exact",
        of_task,
        r"reward 'exact' must take \(trajectory, prompt\); it takes \(prompt",
    ),
    ("reward", "exact", play, "reward 'exact' must be a function defined with `def`"),
]


@pytest.mark.parametrize(("kind", "name", "function", "message"), WRONG_OTHERS)
def test_a_wrong_environment_or_reward_is_refused_where_it_is_written(
    kind: str, name: Any, function: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        getattr(treadle, kind)(name)(function)


def test_limits_of_an_environment_are_an_instance_of_limits() -> None:
    wrong: Any = {"cpu_cores": 1}
    with pytest.raises(TypeError, match=r"limits must be treadle.Limits\(...\), is dict"):
        treadle.environment("lake", limits=wrong)


def test_arguments_that_are_no_mapping_are_named_with_what_gave_them() -> None:
    forgets: Callable[..., Any] = lambda *_: None  # noqa: E731
    with pytest.raises(
        TypeError, match="environment 'lake': its function must return a mapping, returned NoneType"
    ):
        treadle.environment("lake")(forgets)(PROMPT)
    with pytest.raises(
        TypeError, match="reward 'exact': its function must return a mapping, returned NoneType"
    ):
        treadle.reward("exact")(forgets)(None, PROMPT)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cpu_cores", "memory_bytes", "wall_s", "output_bytes"])
def test_limits_below_0_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number >= 0, is -1"):
        treadle.Limits(**{name: -1})


def test_a_declaration_keeps_what_it_decorates() -> None:
    declared: Any = treadle.agent(environment=lake, reward=exact)(play_lake)
    assert (declared.__name__, declared.__doc__) == ("play_lake", "Play on a lake.")
    assert (declared.environment, declared.reward, declared.__wrapped__) == (lake, exact, play_lake)
    assert lake(PROMPT) == {"seed": 7}


def test_a_call_takes_what_it_gives_then_what_is_declared_then_the_default() -> None:
    declared = treadle.agent(
        samples_per_prompt=8,
        keep_per_prompt=6,
        max_staleness=2,
        max_total_tokens=9,
        concurrency=5,
        shaping=treadle.Shaping(keep_groups=3),
    )(play)
    assert RolloutArguments.of(declared, samples_per_prompt=None, shaping=None) == RolloutArguments(
        8, 6, 2, 5, 9, treadle.Shaping(keep_groups=3)
    )
    # 0 and an empty value are given, too.
    of_call = RolloutArguments.of(
        declared,
        keep_per_prompt=0,
        max_staleness=-1,
        concurrency=0,
        max_total_tokens=0,
        shaping=treadle.Shaping(),
    )
    assert of_call == RolloutArguments(samples_per_prompt=8)
    assert RolloutArguments.of(play, concurrency=None) == RolloutArguments()


@pytest.mark.parametrize(
    ("redundancy", "keep", "samples"), [(1.25, 8, 10), (1.12, 25, 28), (1.25, 6, 8), (1, 4, 4)]
)
def test_redundancy_is_samples_over_those_that_are_kept_rounded_up(
    redundancy: float, keep: int, samples: int
) -> None:
    declared = treadle.agent(redundancy=redundancy, keep_per_prompt=keep)(play)
    assert RolloutArguments.of(declared).samples_per_prompt == samples


def test_redundancy_follows_the_call_that_keeps_another_number() -> None:
    declared = treadle.agent(redundancy=1.5, keep_per_prompt=8)(play)
    assert RolloutArguments.of(declared, keep_per_prompt=4).samples_per_prompt == 6
    assert (
        RolloutArguments.of(declared, keep_per_prompt=4, samples_per_prompt=20).samples_per_prompt
        == 20
    )
    with pytest.raises(
        ValueError,
        match=r"redundancy=1.5 over the samples that are kept: give samples_per_prompt too",
    ):
        RolloutArguments.of(declared, keep_per_prompt=0)


def test_hardware_is_chosen_by_task() -> None:
    hardware = {"lake": ["compute", "h800"], "": ["bandwidth"]}
    math = treadle.Prompt("p1", [3], data={"task": "math"})

    def tags(hardware: dict[str, list[str]]) -> list[Any]:
        chosen = treadle.agent(hardware=hardware, task=of_task)(play).defaults.hardware_tags
        assert callable(chosen)
        return [chosen(prompt, 0) for prompt in (PROMPT, math)]

    assert tags(hardware) == [("compute", "h800"), ("bandwidth",)]
    del hardware[""]
    assert tags(hardware) == [("compute", "h800"), ()]  # any engine
    assert treadle.agent(hardware=["compute"])(play).defaults.hardware_tags == ("compute",)
