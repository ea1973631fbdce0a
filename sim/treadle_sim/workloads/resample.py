"""Resample traces into a batch of prompt groups: any number of prompts, each with the same number
of samples.

A batch depends on traces, sizes and seed alone. A censored trajectory never counts as short: it
goes on where it was cut, as a longer one did. No trajectory exceeds the caps.

- Prompts are drawn without replacement, and again from the start where the traces hold too few; a
  prompt's second appearance is a prompt of its own.
- A prompt with repeats (at least LEAST_REPEATS trajectories): each sample is one of them, drawn
  with replacement.
- A prompt with a single trajectory of length L: L is a noisy sign of the prompt's typical length.
  ln of a sample's is m + sqrt(1 - w) (ln L - m) + sqrt(w) sigma z, w = WITHIN_PROMPT, with m and
  sigma those of all traces, continued where cut: the spread over all stays as it is, and w of its
  variance is among samples of a prompt. Steps grow with tokens by STEPS_ELASTICITY; further steps
  are drawn with replacement from the trajectory's own.
- A censored trajectory (cut after c tokens) goes on as one drawn evenly among those of its prompt
  that are longer than c, else among all that are; if that one is censored too, the drawing repeats
  beyond its own end. This is Kaplan and Meier's estimate: the mass of a cut observation goes to
  what lies to its right (Efron 1967). If no trajectory is longer, it stays as it is, and stays
  censored.
"""

import bisect
import math
from collections.abc import Iterable, Sequence

import numpy as np

from treadle_sim.workloads.parametric import SAMPLES, WITHIN_PROMPT, check_counts, split
from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload, groups

LEAST_REPEATS = 2

# d ln steps / d ln tokens among runs of one kind: 0.43 over 39 models' tool-using runs, 0.50 over
# 500 coding runs.
STEPS_ELASTICITY = 0.45


def resample(
    works: Sequence[TrajectoryWork],
    prompts: int,
    samples: int = SAMPLES,
    seed: int = 0,
    *,
    epoch: int = 0,
    max_gen_tokens: int = 0,
    max_context_tokens: int = 0,
    name: str = "traces",
) -> Workload:
    """Return `prompts` groups of `samples` from traces; another `epoch` is the same prompts sampled
    again.

    Caps are of a trajectory, on its generated tokens and on its whole context; 0 is none.
    Trajectories that they cut are censored. Raises ValueError for no traces and counts below 1.
    """
    if not works:
        raise ValueError("works must hold at least one trajectory")
    check_counts(prompts=prompts, samples=samples)
    by_prompt = list(groups(works).values())
    beyond = Donors(works)
    of_prompts = np.random.default_rng([seed, 2])
    whole = [continue_cut(work, beyond, beyond, of_prompts)[0] for work in works]
    spread = Spread([sum(step.gen_tokens for step in steps) for steps in whole])
    rng = np.random.default_rng([seed, 2, 1 + epoch])
    batch: list[TrajectoryWork] = []
    for appearance, at in _prompt_order(of_prompts, len(by_prompt), prompts):
        own = by_prompt[at]
        of_prompt = Donors(own)
        prompt_id = own[0].prompt_id if appearance == 0 else f"{own[0].prompt_id}~{appearance}"
        for sample in range(samples):
            base = own[int(rng.integers(len(own)))]
            steps, censored = continue_cut(base, of_prompt, beyond, rng)
            if len(own) < LEAST_REPEATS:
                steps = spread.another(steps, rng)
            steps, cut = apply_caps(steps, base.prompt_tokens, max_gen_tokens, max_context_tokens)
            batch.append(
                TrajectoryWork(
                    prompt_id,
                    sample,
                    base.prompt_tokens,
                    steps,
                    base.reward,
                    censored=censored or cut,
                )
            )
    return Workload(name, tuple(batch), max_gen_tokens)


class Donors:
    """Trajectories by length, to draw one that is longer than a cut one."""

    def __init__(self, works: Iterable[TrajectoryWork]) -> None:
        self._sorted = sorted(works, key=lambda work: work.gen_tokens)
        self._tokens = [work.gen_tokens for work in self._sorted]

    def draw(self, tokens: int, rng: np.random.Generator) -> TrajectoryWork | None:
        """Return a trajectory that generated more than `tokens`, each equally likely; None if there
        is none."""
        first = bisect.bisect_right(self._tokens, tokens)
        count = len(self._sorted) - first
        return self._sorted[first + int(rng.integers(count))] if count else None


def continue_cut(
    work: TrajectoryWork, of_prompt: Donors, of_all: Donors, rng: np.random.Generator
) -> tuple[tuple[Step, ...], bool]:
    """Return the steps of a trajectory, continued where it was cut, and whether it is still cut."""
    steps, censored = work.steps, work.censored
    tokens = work.gen_tokens
    while censored:
        donor = of_prompt.draw(tokens, rng) or of_all.draw(tokens, rng)
        if donor is None:
            break
        steps = (*steps, *_steps_beyond(donor, tokens))
        censored = donor.censored
        tokens = donor.gen_tokens
    return steps, censored


def apply_caps(
    steps: tuple[Step, ...], prompt_tokens: int, max_gen_tokens: int, max_context_tokens: int
) -> tuple[tuple[Step, ...], bool]:
    """Return the steps within the caps (0: none), and whether any token was cut off. One token is
    always left."""
    gen_room = max_gen_tokens or math.inf
    context_room = (max_context_tokens or math.inf) - prompt_tokens
    for at, step in enumerate(steps):
        room = min(gen_room, context_room)
        if step.gen_tokens > room:
            if room < 1 and at > 0:
                return steps[:at], True
            left = max(1, int(room))
            cut = left < step.gen_tokens or at + 1 < len(steps)
            return (*steps[:at], Step(left, step.obs_tokens, step.tool_s)), cut
        gen_room -= step.gen_tokens
        context_room -= step.gen_tokens + step.obs_tokens
    return steps, False


class Spread:
    """Maker of further samples of a prompt of which there is only one, by the rule in the module's
    docstring."""

    def __init__(self, tokens: Sequence[int]) -> None:
        logs = np.log(tokens)
        self._mean = float(logs.mean())
        self._within_sigma = math.sqrt(WITHIN_PROMPT) * float(logs.std())

    def another(self, steps: tuple[Step, ...], rng: np.random.Generator) -> tuple[Step, ...]:
        """Return another sample of the prompt of which `steps` is one."""
        tokens = sum(step.gen_tokens for step in steps)
        log_tokens = self._mean + math.sqrt(1.0 - WITHIN_PROMPT) * (math.log(tokens) - self._mean)
        log_tokens += self._within_sigma * float(rng.standard_normal())
        wanted = max(1, round(math.exp(log_tokens)))
        count = min(wanted, max(1, round(len(steps) * (wanted / tokens) ** STEPS_ELASTICITY)))
        taken = [
            steps[at] if at < len(steps) else steps[int(rng.integers(len(steps)))]
            for at in range(count)
        ]
        weights = np.array([step.gen_tokens for step in taken], np.float64)
        gen = split(np.array([wanted]), np.array([count]), weights)
        return tuple(
            Step(tokens, step.obs_tokens, step.tool_s)
            for tokens, step in zip(gen.tolist(), taken, strict=True)
        )


def _steps_beyond(work: TrajectoryWork, tokens: int) -> list[Step]:
    """Return the steps of `work` after its first `tokens` tokens, with the rest of the step in
    which those end."""
    beyond: list[Step] = []
    done = 0
    for step in work.steps:
        done += step.gen_tokens
        if done > tokens:
            beyond.append(Step(min(step.gen_tokens, done - tokens), step.obs_tokens, step.tool_s))
    return beyond


def _prompt_order(rng: np.random.Generator, available: int, wanted: int) -> list[tuple[int, int]]:
    """Return `wanted` pairs of how often the prompt came before, and which prompt."""
    rounds = range(-(-wanted // available))
    return [(appearance, int(at)) for appearance in rounds for at in rng.permutation(available)][
        :wanted
    ]
