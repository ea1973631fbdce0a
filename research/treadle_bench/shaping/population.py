"""Prompts, a policy that samples answers to them, and a MODEL of how training changes the lengths
of the answers.

A prompt's answers have log-normal lengths: ln l = m + s u, u standard normal. An answer succeeds
with log odds `ease - bend * (v - best)^2`, where v = (ln l - m0) / s0 is its log length in the
scale that the prompt had before training. Where `best` is below 0, shorter answers succeed more
often (DARTS' pattern I, verbose tails), else longer ones (pattern II, necessary depth). No prompt
profits from ever shorter answers.

Training is GRPO's gradient for the two numbers of each prompt, m and ln s: with advantages A
normalised over the group that is trained (DARTS eq. 2), and natural (preconditioned by the inverse
of the Fisher information, which is 1/s² and 2), a group moves m by rate * mean(A u) * s and ln s by
rate * mean(A (u² - 1)) / 2. This is what §4.1.3 of DARTS argues with: which samples are chosen
changes their advantages, and nothing else acts. The advantages of a group add up to 0, so a group
of short samples does not by itself make answers shorter: only that rewards go with lengths does.
`imitation` is added to every advantage. Above 0 the policy also follows the samples that it is
trained on, whatever their rewards: a stand-in for whatever lets the choice of short samples as such
make answers short. A share `generalise` of what the batch learns on average moves every prompt; the
rest moves the prompts that were trained.

What the model leaves out: everything else that training improves, so success rates change through
lengths alone; the optimiser, clipping, and the difference between a log-normal and what a language
model samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from treadle_sim.workloads.parametric import MATH, REWARD_OFFSET, REWARD_SLOPE, WITHIN_PROMPT

Floats = npt.NDArray[np.float64]

# Choices. The tokens are such that the longest of about a thousand answers is 5 to 10 times the
# median, and cut now and then, as in Figure 1 of DARTS; the spread, and how much of it is within a
# prompt, are those of the project's math workload (`parametric.MATH`).
MEDIAN_TOKENS, LIMIT_TOKENS = 2_500.0, 20_480
PROMPT_TOKENS = 250
# of ln s between prompts; runs of 39 models on 74 tasks have 0.95, with four samples a prompt
SPREAD_SIGMA = 0.5
# Log odds of success: REWARD_SLOPE fewer a standard deviation of log length, on average over
# prompts. With BEST_SIGMA one prompt in six is of pattern II. At BEND an answer two deviations from
# the best length has exp(-1) of its odds.
BEND = 0.25
BEST_MEAN, BEST_SIGMA = -0.5 * REWARD_SLOPE / BEND, 0.5 * REWARD_SLOPE / BEND
EASE_SIGMA = 1.5  # of prompts' log odds
LEAST_SPREAD = 0.05  # of ln l within a prompt: the policy never becomes deterministic


@dataclass(frozen=True)
class Prompts:
    """What does not change, an entry a prompt; see the module's docstring. log_mean, spread: before
    training."""

    log_mean: Floats
    spread: Floats
    ease: Floats
    best: Floats

    def __len__(self) -> int:
        return len(self.log_mean)


def make_prompts(
    count: int,
    seed: int,
    *,
    best_mean: float = BEST_MEAN,
    median: float = MEDIAN_TOKENS,
    sigma: float = MATH.tokens_sigma,
) -> Prompts:
    """Prompts whose log lengths deviate by `sigma`, WITHIN_PROMPT of its square within a prompt.
    best_mean: of `best`."""
    rng = np.random.default_rng([seed, count])
    z, best = rng.standard_normal(count), rng.normal(best_mean, BEST_SIGMA, count)
    between, within = sigma * np.sqrt([1.0 - WITHIN_PROMPT, WITHIN_PROMPT])
    # The mean of s² over prompts is `within`².
    spread = within * np.exp(SPREAD_SIGMA * rng.standard_normal(count) - SPREAD_SIGMA**2)
    # Long prompts are the harder ones. Whatever `best` is, an answer of the median length has the
    # same odds.
    ease = (
        REWARD_OFFSET - REWARD_SLOPE * z + EASE_SIGMA * rng.standard_normal(count) + BEND * best**2
    )
    return Prompts(np.log(median) + between * z, spread, ease, best)


@dataclass(frozen=True, slots=True)
class Answers:
    """Samples of one prompt: u, whole tokens, whether the limit cut them, rewards of 0 or 1."""

    normal: Floats
    tokens: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]
    rewards: Floats


class Policy:
    """The lengths of a policy under training. rate: of learning, 0 for none; the other constants:
    see the module."""

    def __init__(
        self,
        prompts: Prompts,
        rate: float,
        *,
        imitation: float = 0.0,
        generalise: float = 0.5,
        limit_tokens: int = LIMIT_TOKENS,
    ) -> None:
        self.prompts = prompts
        self.rate = rate
        self.imitation = imitation
        self.generalise = generalise
        self.limit_tokens = limit_tokens
        self.shift = np.zeros(len(prompts))  # of m, in units of the s before training
        self.log_spread = np.zeros(len(prompts))  # of ln s

    def spread(self, prompt: int) -> float:
        """Standard deviation of log lengths now."""
        return float(
            max(self.prompts.spread[prompt] * np.exp(self.log_spread[prompt]), LEAST_SPREAD)
        )

    def sample(
        self, prompt: int, normal: Floats, uniform: Floats, limit_tokens: int = 0
    ) -> Answers:
        """Answers from draws, so that systems can be given the same ones. limit_tokens: 0 for the
        policy's own."""
        of = self.prompts
        limit = limit_tokens or self.limit_tokens
        log_mean = of.log_mean[prompt] + self.shift[prompt] * of.spread[prompt]
        wanted = np.exp(log_mean + self.spread(prompt) * normal)
        length = (np.log(wanted) - of.log_mean[prompt]) / of.spread[prompt]
        odds = of.ease[prompt] - BEND * (length - of.best[prompt]) ** 2
        truncated = wanted > limit
        rewards = (uniform < 0.5 + 0.5 * np.tanh(0.5 * odds)) & ~truncated  # the logistic function
        tokens = np.clip(wanted, 1.0, limit).astype(np.int64)
        return Answers(normal, tokens, truncated, rewards.astype(np.float64))

    def learn(self, groups: Sequence[tuple[int, Floats, Floats]]) -> None:
        """Train a batch: of each group its prompt, the u of the samples that are trained, and their
        rewards."""
        if not self.rate or not groups:
            return
        of, steps = self.prompts, np.zeros((len(groups), 2))
        for at, (prompt, normal, rewards) in enumerate(groups):
            deviation = float(rewards.std()) if len(rewards) else 0.0
            if deviation > 0.0:
                advantages = (rewards - rewards.mean()) / deviation + self.imitation
                ratio = self.spread(prompt) / float(of.spread[prompt])
                steps[at] = (advantages @ normal * ratio, advantages @ (normal**2 - 1.0) / 2.0)
                steps[at] /= len(rewards)
        shared, own = self.generalise, (1.0 - self.generalise) * len(of) / len(groups)
        mean = steps.mean(axis=0)
        self.shift += self.rate * shared * mean[0]
        self.log_spread += self.rate * shared * mean[1]
        trained = np.array([prompt for prompt, _, _ in groups])
        np.add.at(self.shift, trained, self.rate * own * steps[:, 0])
        np.add.at(self.log_spread, trained, self.rate * own * steps[:, 1])
