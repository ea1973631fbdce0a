"""Workloads drawn from distributions: agents for coding, search and math, as Heddle §2.2, §7 and
Table 1 describe them.

They give batches of the papers' size (400 prompts x 16 samples) without any data. A workload
depends on its arguments alone. The prompts depend on name and seed, the samples on the epoch too,
so another epoch of the same seed is the same prompts sampled again. Each step generates at least
one token.

The model of a trajectory, where z is standard normal:
    ln tokens = ln median + sigma (sqrt(1 - WITHIN_PROMPT) z_prompt + sqrt(WITHIN_PROMPT) z_sample),
    cut at the cap
    ln steps  = ln steps_median + elasticity (ln tokens - ln median) + steps_sigma z, rounded, at
    least 1
    tokens over steps: log-normal weights; answers of tools, in tokens and in seconds: log-normal,
    cut at a limit.
The source of each parameter stands beside it.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

PROMPTS = 400
SAMPLES = 16  # of a prompt (Heddle §7)
MAX_GEN_TOKENS = 40_000  # of a trajectory (Heddle §7)
# A choice: the model's native 40,960 and the answers of tools beside it. Only long searches come
# near.
MAX_CONTEXT_TOKENS = 65_536

# How much of the variance of log lengths is among samples of one prompt. Published runs of 39
# models: 6% to 98%, half of them 15% to 40%, at low temperatures; Heddle samples at temperature 1
# and calls samples of a prompt highly divergent (Figure 5), hence somewhat more.
WITHIN_PROMPT = 0.45

# Rewards are a choice: about half succeed, longer trajectories less often. No simulated time
# depends on them.
REWARD_OFFSET = 0.2
REWARD_SLOPE = 1.0  # log odds a standard deviation of log tokens

MODELS = ("qwen3-8b", "qwen3-14b", "qwen3-32b")


class UnknownWorkloadError(ValueError):
    """A workload or a model that has no parameters."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal distribution. `sigma` is of the natural log; values above `limit` are cut to
    it."""

    median: float
    sigma: float
    limit: float

    @classmethod
    def with_mean(cls, mean: float, sigma: float, limit: float) -> Self:
        """Return the distribution whose mean, before values are cut, is `mean`."""
        return cls(mean * math.exp(-0.5 * sigma * sigma), sigma, limit)

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.minimum(self.median * np.exp(self.sigma * rng.standard_normal(count)), self.limit)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of one kind of agent. tokens: of a trajectory. tool_mean_s: of one call, by model
    (Heddle Table 1)."""

    tokens_median: float
    tokens_sigma: float
    steps_median: float
    steps_elasticity: float
    steps_sigma: float
    step_tokens_sigma: float
    prompt_tokens: LogNormal
    obs_tokens: LogNormal
    tool_mean_s: Mapping[str, float]
    tool_sigma: float
    tool_limit_s: float

    def tool_s(self, llm: str) -> LogNormal:
        """Return the distribution of the seconds of a tool call. Raises UnknownWorkloadError for a
        model without parameters."""
        if llm not in self.tool_mean_s:
            raise UnknownWorkloadError(
                f"no tool times for model {llm!r}, only for {', '.join(self.tool_mean_s)}"
            )
        return LogNormal.with_mean(self.tool_mean_s[llm], self.tool_sigma, self.tool_limit_s)


# CodeForces with a sandbox. Tokens: Figure 5 shows 90 prompts x 16 samples with the longest between
# 20K and 30K, and Figure 4 a longest over four times the median in time; 0.65 lies below the 0.70
# to 0.94 of published runs (39 models), which mix kinds of tasks. Steps: about a thousand tokens
# each, the "tens of seconds" of §7.5 at 10 to 20 ms a token; elasticity 0.4 to 0.5 in published
# runs, more here because failed tests mean further steps (§2.3). Tools: Table 1; skewed (Figure 2):
# at sigma 1.3 the mean is 2.3 times the median, the 99th percentile 9 times the mean; a sandbox
# ends a call at 30 s.
CODING = Parameters(
    tokens_median=3_500.0,
    tokens_sigma=0.65,
    steps_median=4.0,
    steps_elasticity=0.7,
    steps_sigma=0.35,
    step_tokens_sigma=0.8,
    prompt_tokens=LogNormal(800.0, 0.4, 4_000.0),
    obs_tokens=LogNormal(150.0, 1.2, 4_000.0),
    tool_mean_s={"qwen3-8b": 0.46, "qwen3-14b": 0.41, "qwen3-32b": 0.45},
    tool_sigma=1.3,
    tool_limit_s=30.0,
)

# HotpotQA with web search. §7.1: shorter sequences, frequent steps, prefill matters: so about 300
# tokens a step and three times as many to read. Tools: Table 1; a web search varies less than a
# test suite.
SEARCH = Parameters(
    tokens_median=2_400.0,
    tokens_sigma=0.60,
    steps_median=8.0,
    steps_elasticity=0.6,
    steps_sigma=0.30,
    step_tokens_sigma=0.6,
    prompt_tokens=LogNormal(300.0, 0.2, 2_000.0),
    obs_tokens=LogNormal(900.0, 0.6, 6_000.0),
    tool_mean_s={"qwen3-8b": 1.42, "qwen3-14b": 1.41, "qwen3-32b": 1.43},
    tool_sigma=0.7,
    tool_limit_s=30.0,
)

# DAPO-Math with calculator and solver: long generations, few calls that are over at once (Table 1).
# A few in ten thousand reach the 40K cap.
MATH = Parameters(
    tokens_median=5_000.0,
    tokens_sigma=0.65,
    steps_median=3.0,
    steps_elasticity=0.5,
    steps_sigma=0.35,
    step_tokens_sigma=0.8,
    prompt_tokens=LogNormal(250.0, 0.3, 2_000.0),
    obs_tokens=LogNormal(40.0, 0.8, 1_000.0),
    tool_mean_s={"qwen3-8b": 0.051, "qwen3-14b": 0.046, "qwen3-32b": 0.054},
    tool_sigma=1.0,
    tool_limit_s=10.0,
)

WORKLOADS: Mapping[str, Parameters] = {"coding": CODING, "search": SEARCH, "math": MATH}


def make(
    name: str,
    prompts: int = PROMPTS,
    samples: int = SAMPLES,
    seed: int = 0,
    *,
    epoch: int = 0,
    llm: str = "qwen3-14b",
    max_gen_tokens: int = MAX_GEN_TOKENS,
    max_context_tokens: int = MAX_CONTEXT_TOKENS,
) -> Workload:
    """Return `prompts` x `samples` trajectories of a named kind, prompt by prompt.

    A cap of 0 is none. Trajectories that a cap cuts are censored. Raises UnknownWorkloadError, and
    ValueError for counts below 1.
    """
    if name not in WORKLOADS:
        raise UnknownWorkloadError(f"no workload {name!r}, only {', '.join(WORKLOADS)}")
    most = max_gen_tokens or math.inf
    works = draw(
        name, WORKLOADS[name], prompts, samples, seed, epoch, llm, most, max_context_tokens
    )
    return Workload(name, works, max_gen_tokens)


def draw(
    name: str,
    kind: Parameters,
    prompts: int,
    samples: int,
    seed: int,
    epoch: int,
    llm: str,
    max_gen_tokens: float,
    max_context_tokens: int,
) -> tuple[TrajectoryWork, ...]:
    """Return the trajectories of `make`, from other parameters than those of WORKLOADS."""
    check_counts(prompts=prompts, samples=samples)
    stream = zlib.crc32(name.encode())
    of_prompts = np.random.default_rng([stream, seed])
    of_samples = np.random.default_rng([stream, seed, 1 + epoch])
    count = prompts * samples

    z_prompt = np.repeat(of_prompts.standard_normal(prompts), samples)
    prompt_tokens = np.repeat(
        np.maximum(1, kind.prompt_tokens.draw(of_prompts, prompts).astype(np.int64)), samples
    )
    z_sample = of_samples.standard_normal(count)
    z = math.sqrt(1.0 - WITHIN_PROMPT) * z_prompt + math.sqrt(WITHIN_PROMPT) * z_sample
    wanted = kind.tokens_median * np.exp(kind.tokens_sigma * z)
    tokens = np.maximum(1, np.minimum(wanted, max_gen_tokens)).astype(np.int64)
    log_steps = (
        kind.steps_elasticity * kind.tokens_sigma * z
        + kind.steps_sigma * of_samples.standard_normal(count)
    )
    steps = np.clip(np.rint(kind.steps_median * np.exp(log_steps)).astype(np.int64), 1, tokens)

    total_steps = int(steps.sum())
    gen = split(
        tokens, steps, np.exp(kind.step_tokens_sigma * of_samples.standard_normal(total_steps))
    )
    obs = kind.obs_tokens.draw(of_samples, total_steps).astype(np.int64)
    tool_s = np.round(kind.tool_s(llm).draw(of_samples, total_steps), 6)
    rewarded = of_samples.random(count) < 1.0 / (1.0 + np.exp(REWARD_SLOPE * z - REWARD_OFFSET))

    kept, gen = _within_context(prompt_tokens, steps, gen, obs, max_context_tokens)
    cut = (
        (wanted > max_gen_tokens)
        | (kept < steps)
        | (np.add.reduceat(gen, np.cumsum(steps) - steps) < tokens)
    )
    all_steps = list(map(Step, gen.tolist(), obs.tolist(), tool_s.tolist()))
    ids = [f"{name}-{index:04d}" for index in range(prompts)]
    firsts = (np.cumsum(steps) - steps).tolist()
    return tuple(
        TrajectoryWork(
            ids[index // samples],
            index % samples,
            prompt,
            tuple(all_steps[first : first + length]),
            float(reward) if not censored else 0.0,
            censored,
        )
        for index, (prompt, first, length, reward, censored) in enumerate(
            zip(
                prompt_tokens.tolist(),
                firsts,
                kept.tolist(),
                rewarded.tolist(),
                cut.tolist(),
                strict=True,
            )
        )
    )


def check_counts(**counts: int) -> None:
    """Raise ValueError for a count below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be >= 1, is {count}")


def split(tokens: Ints, steps: Ints, weights: Floats) -> Ints:
    """Split the `tokens` of each trajectory over its `steps` (1 <= steps <= tokens) in proportion
    to `weights`, which lie one after another; at least 1 a step, and whole."""
    firsts = np.cumsum(steps) - steps
    running = np.cumsum(weights)
    before = np.repeat(running[firsts] - weights[firsts], steps)
    share = (running - before) / np.repeat(np.add.reduceat(weights, firsts), steps)
    ends = np.rint(np.repeat(tokens - steps, steps) * np.clip(share, 0.0, 1.0)).astype(np.int64)
    ends[firsts + steps - 1] = tokens - steps
    starts = np.concatenate([[0], ends[:-1]])
    starts[firsts] = 0
    return np.asarray(np.maximum(ends - starts, 0) + 1, np.int64)


def _within_context(
    prompt_tokens: Ints, steps: Ints, gen: Ints, obs: Ints, most: int
) -> tuple[Ints, Ints]:
    """Return how many steps of each trajectory begin within the context limit, and the steps'
    tokens cut to it."""
    if not most:
        return steps, gen
    firsts = np.cumsum(steps) - steps
    grown = np.cumsum(gen + obs)
    before = grown - gen - obs
    context = np.repeat(prompt_tokens - before[firsts], steps) + before
    room = most - context
    fits = room > 0
    fits[firsts] = True  # a trajectory has a step, however long its prompt
    kept = np.add.reduceat(fits.astype(np.int64), firsts)
    return kept, np.where(fits, np.clip(room, 1, gen), 0)
