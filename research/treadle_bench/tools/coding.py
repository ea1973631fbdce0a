"""Coding trajectories for the replay: shapes as in public runs, durations as in the paper's
setting.

Where each figure is from stands beside it. A trajectory is steps of generation and a command in its
sandbox, and in the end the tests as its reward, which are what can be scaled (ARL-Tangram §6.4). A
reward's length is the task's, and its scale is what is left open by all that: it is set so that
actions fill 47% of a trajectory's life on one core, the mean of Figure 3c.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
from treadle_core.tools.action import CPU_CORES, Amdahl, Fixed, Range
from treadle_sim.workloads.parametric import CODING, LogNormal
from treadle_sim.workloads.workload import Step, TrajectoryWork

from treadle_bench.tools.trace import Call, Trace, generation_s

Floats = npt.NDArray[np.float64]

GIB = 1 << 30

# 500 coding runs on SWE-bench Verified: quartiles 27, 36, 46, 95th percentile 83 steps; a step 43,
# 89, 282 tokens, mean 276, and 90, 240, 800 of the answer.
STEPS = LogNormal(36.0, 0.46, 200.0)
GEN_TOKENS = LogNormal(105.0, 1.39, 16_384.0)
OBS_TOKENS = LogNormal(240.0, 1.5, 8_192.0)
PROMPT_TOKENS = 1_700

# mean 0.45 s: Heddle's Table 1, of a sandbox in RL with this model
TOOL_S = CODING.tool_s("qwen3-32b")

ACTIVE_SHARE = 0.47  # Figure 3c
REWARD_SIGMA = 1.0  # of ln seconds over tasks: long-tailed (§6.4); a choice
REWARD_LIMIT_S = 1_800.0  # where SWE-bench's own harness stops a test run
REWARD_NOISE = (
    0.2  # of ln seconds among samples of a task: what is profiled is the task's; a choice
)
# of a test run, uniform over tasks: collecting, the longest test; a choice
SERIAL_SHARE = (0.02, 0.10)
MOST_CORES = 32  # §6.4: DoP from 1 to 32
GROUP = 8  # samples of a task; a choice
MEMORY_BYTES = 4 * GIB  # of an environment; a choice, and far from binding: 2.4 TB a node


ToolSeconds = Callable[[np.random.Generator, int], Floats]


def drop_texts(works: Iterable[TrajectoryWork]) -> tuple[TrajectoryWork, ...]:
    """The works without their texts, which other processes need not get."""
    return tuple(
        replace(
            work, prompt="", steps=tuple(replace(step, text="", obs_text="") for step in work.steps)
        )
        for work in works
    )


def draw_tokens(rng: np.random.Generator) -> TrajectoryWork:
    """A trajectory with tokens from the distributions above, and without durations."""
    steps = max(1, round(float(STEPS.draw(rng, 1)[0])))
    gen = np.maximum(1, GEN_TOKENS.draw(rng, steps)).astype(np.int64)
    obs = OBS_TOKENS.draw(rng, steps).astype(np.int64)
    tokens = zip(gen.tolist(), obs.tolist(), strict=True)
    return TrajectoryWork("", 0, PROMPT_TOKENS, tuple(Step(*each, 0.0) for each in tokens))


def coding_batch(
    trajectories: int,
    seed: int,
    *,
    among: Sequence[TrajectoryWork] = (),
    tool_s: ToolSeconds = TOOL_S.draw,
    serial_share: tuple[float, float] = SERIAL_SHARE,
    active_share: float = ACTIVE_SHARE,
) -> tuple[Trace, ...]:
    """A batch that starts as one burst. among: whose tokens to draw from instead of the
    distributions. Equal seeds give equal batches; ValueError for fewer than one trajectory."""
    if trajectories < 1:
        raise ValueError(f"trajectories must be at least 1, are {trajectories}")
    rng = np.random.default_rng([seed, trajectories])
    drawn = [
        among[int(rng.integers(len(among)))] if among else draw_tokens(rng)
        for _ in range(trajectories)
    ]
    generating = [generation_s(work) for work in drawn]
    tools = [tool_s(rng, len(work.steps)) for work in drawn]
    tasks = -(-trajectories // GROUP)
    of_task = np.repeat(np.exp(REWARD_SIGMA * rng.standard_normal(tasks)), GROUP)[:trajectories]
    serial = np.repeat(rng.uniform(*serial_share, tasks), GROUP)[:trajectories]
    noise = np.exp(REWARD_NOISE * rng.standard_normal(trajectories))
    scale = reward_scale_s(
        np.array([sum(each) for each in generating]),
        np.array([float(each.sum()) for each in tools]),
        _reference_rewards(),
        active_share,
    )
    profiled = np.minimum(scale * of_task, REWARD_LIMIT_S)
    traces = []
    for at, (gen, took) in enumerate(zip(generating, tools, strict=True)):
        calls = [
            Call(each_gen, {CPU_CORES: Fixed(1)}, each_s)
            for each_gen, each_s in zip(gen, took.tolist(), strict=True)
        ]
        actual_s = min(float(profiled[at] * noise[at]), REWARD_LIMIT_S)
        reward = Call(
            0.0,
            {CPU_CORES: Range(1, MOST_CORES)},
            actual_s,
            reward=True,
            key=CPU_CORES,
            elasticity=Amdahl(float(serial[at])),
            profiled_s=float(profiled[at]),
        )
        traces.append(Trace(f"coding-{at}", "coding", (*calls, reward), MEMORY_BYTES))
    return tuple(traces)


@cache
def _reference_rewards() -> Floats:
    """Quantiles of many tasks' rewards, so that their scale does not hang on the few that a small
    batch draws."""
    count = 256
    normal = np.random.default_rng(0).standard_normal(64 * count)
    return np.asarray(np.exp(REWARD_SIGMA * np.quantile(normal, (np.arange(count) + 0.5) / count)))


def reward_scale_s(generating_s: Floats, tools_s: Floats, rewards: Floats, share: float) -> float:
    """By how many seconds `rewards`, without a unit, are multiplied for actions to fill `share` of
    a trajectory's life on average, on one core; 0 where the tools alone fill more."""
    low, high = 0.0, 1e6
    for _ in range(60):
        middle = 0.5 * (low + high)
        active = tools_s[:, None] + np.minimum(middle * rewards[None, :], REWARD_LIMIT_S)
        if float((active / (active + generating_s[:, None])).mean()) < share:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)
