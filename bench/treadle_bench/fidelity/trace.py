"""The work that `treadle bench fidelity` plays twice: made so that two small engines have a tail to wait for.

Purpose: one seeded batch, short enough for a CPU: samples that share prompts, a few steps each, heavy-tailed lengths,
tools that take seconds. Invariants: a workload depends on its seed alone; every length is exact when it is played (see
fidelity_live.py), so both sides do the same work. All KV of the batch fits one engine: room is not what is tested.
"""

from __future__ import annotations

import random

import numpy as np
from treadle_sim.workloads.workload import Step, TrajectoryWork, Workload

PROMPTS, SAMPLES = 8, 3
PROMPT_TOKENS = (64, 160)
STEPS = (2, 6)
STEPS_MEAN = 3.4
GEN_TOKENS = (8, 120)  # of a step
GEN_MEDIAN = 24.0
PROMPT_SIGMA, SAMPLE_SIGMA, STEP_SIGMA = 0.7, 0.3, 0.5  # of ln tokens: of a prompt, of a sample, of a step
OBS_TOKENS = (10, 60)  # of a tool's answer
TOOL_S = (0.3, 3.0)
TOOL_MEDIAN_S, TOOL_SIGMA = 0.8, 0.7
STREAM = 1  # of the seeds' streams the one whose first traces all take about 50 s on two cores
HIGHEST_TOKEN_ID = 40_000  # below the vocabulary of any model that runs on a CPU here


def workload(seed: int) -> Workload:
    """PROMPTS times SAMPLES trajectories."""
    rng = np.random.default_rng([seed, STREAM])
    works = []
    for number in range(PROMPTS):
        prompt_tokens = int(rng.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1))
        of_prompt = PROMPT_SIGMA * rng.standard_normal()
        for sample in range(SAMPLES):
            level = of_prompt + SAMPLE_SIGMA * rng.standard_normal()
            count = int(np.clip(rng.geometric(1.0 / (STEPS_MEAN - STEPS[0] + 1.0)) + STEPS[0] - 1, *STEPS))
            works.append(
                TrajectoryWork(
                    prompt_id=f"p{number}",
                    sample=sample,
                    prompt_tokens=prompt_tokens,
                    steps=tuple(_step(rng, level) for _ in range(count)),
                )
            )
    return Workload(f"fidelity-{seed}", tuple(works))


def token_ids(work: TrajectoryWork, salt: str) -> tuple[list[int], list[list[int]]]:
    """Random prompt, and what each tool answers. Samples of a prompt share its tokens; another salt, other tokens."""
    prompt = random.Random(f"{salt} {work.prompt_id}")
    own = random.Random(f"{salt} {work.prompt_id} {work.sample}")
    observed = [[own.randrange(HIGHEST_TOKEN_ID) for _ in range(step.obs_tokens)] for step in work.steps]
    return [prompt.randrange(HIGHEST_TOKEN_ID) for _ in range(work.prompt_tokens)], observed


def _step(rng: np.random.Generator, level: float) -> Step:
    gen_tokens = GEN_MEDIAN * np.exp(level + STEP_SIGMA * rng.standard_normal())
    tool_s = TOOL_MEDIAN_S * np.exp(TOOL_SIGMA * rng.standard_normal())
    return Step(
        gen_tokens=int(np.clip(round(gen_tokens), *GEN_TOKENS)),
        obs_tokens=int(rng.integers(OBS_TOKENS[0], OBS_TOKENS[1] + 1)),
        tool_s=float(np.clip(tool_s, *TOOL_S)),
    )
