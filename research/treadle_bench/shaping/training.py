"""DARTS' tables on simulated training steps: the ablation, the ratio of short to long, and GPUs;
beside tail batching, partial rollout and redundancy.

Each scheme is played in three modes. `off`: the policy does not learn, so only the system's effect
shows. `gradient`: it learns by GRPO's gradient alone. `imitation`: it also follows the samples that
it is trained on, as strongly as gives DARTS its published speedup on Qwen2.5-Math-7B at 1:7 (Table
4); that one figure is fitted, on a seed of its own, and what other cells say in this mode is a
prediction.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from treadle_core.rollouts.redundancy import BudgetPolicy
from treadle_sim.engine_model import engine_model

from treadle_bench.shaping.population import BEST_MEAN, make_prompts
from treadle_bench.shaping.schemes import (
    Leftovers,
    Played,
    Scheme,
    Setting,
    Streaming,
    Training,
    with_training,
)
from treadle_bench.summary import median_of, range_of, rounded

ACCELERATOR, DEGREE, SLOTS = "H20", 2, 256
# The profiles nearest to Qwen2.5-14B and Qwen2.5-Math-7B.
LARGE, SMALL = "Qwen3-14B", "Qwen3-8B"
GPUS = 32  # half of them roll out, half train (a choice; DARTS says that the two are apart)
GROUPS, KEEP = 64, 8  # as RollArt trains (§7.1); DARTS gives the group size only
DATASET = 512  # prompts, so that an epoch is 8 steps
# without learning the first epoch, which knows no lengths yet, is left out
STEPS, STEPS_OFF, WARM_UP = (32, 20, 8)
ROLLOUT_SHARE = 0.7  # of a step of verl (DARTS §1: over 70%)
# Utility that a second costs, which is not published. It prunes about 5% of the prompts of 32 GPUs,
# as DARTS reports (§4.3.1). The tuned one made steps shortest. Both were chosen on a seed that no
# figure reports, without learning.
TRADE_OFF_PER_S = {LARGE: 0.024, SMALL: 0.04}
TUNED_PER_S = 0.014
UNIFORM = 9  # samples a prompt without the adaptive budget: about what that budget spends
RATE = 0.08  # of learning, a step; 32 steps stand for the 500 of the paper
PUBLISHED_RATIO = 1.45  # DARTS Table 4: Qwen2.5-Math-7B at 1:7
IMITATIONS = (0.0, 0.5, 1.0, 2.0, 4.0)
RATES = (0.5 * RATE, RATE, 2.0 * RATE)
FIT_SEED = 100  # no figure reports it
MODES = OFF, GRADIENT, IMITATION = ("off", "gradient", "imitation")

TOKENS = Streaming.TOKENS
DARTS, SMALL_DARTS = (
    Scheme("DARTS", dual_end=1, budget=BudgetPolicy(TRADE_OFF_PER_S[llm]), streaming=TOKENS)
    for llm in (LARGE, SMALL)
)
VERL = Scheme("verl")
TAIL = Scheme("tail batching", oversampled=1.25, leftovers=Leftovers.DEFER)
ABLATION = (
    VERL,
    Scheme("verl, samples streamed", streaming=Streaming.SAMPLES),
    Scheme("+ token-level streaming", streaming=TOKENS),
    Scheme("+ distribution-aware sampling", started=UNIFORM, dual_end=1, streaming=TOKENS),
    DARTS,
    replace(DARTS, name="DARTS, tuned budget", budget=BudgetPolicy(TUNED_PER_S)),
    TAIL,
    replace(TAIL, name="tail batching, streamed", streaming=TOKENS),
    Scheme("partial rollout", oversampled=1.5, leftovers=Leftovers.RESUME),
    Scheme("first 8 of 12, streamed", started=12, streaming=TOKENS),
)
RATIOS = {
    f"{longest}:{KEEP - longest}": replace(SMALL_DARTS, dual_end=longest) for longest in (1, 2, 4)
}
SCALES = (16, 32, 64)
PAPER = {
    "ablation": {
        "verl": 1.0,
        "+ token-level streaming": 1.09,
        "+ distribution-aware sampling": 1.40,
        "DARTS": 1.63,
    },
    "ratios": {"1:7": 1.45, "2:6": 1.43, "4:4": 1.25},
    "scaling": {"16": 1.21, "32": 1.44, "64": 1.55},
}


@dataclass(frozen=True, slots=True)
class Job:
    """One scheme on one setting. share: of groups, prompts and engines; below 1 for tests."""

    llm: str
    gpus: int
    scheme: Scheme
    seed: int
    rate: float = 0.0
    imitation: float = 0.0
    generalise: float = 0.5
    best_mean: float = BEST_MEAN
    share: float = 1.0


def play_job(job: Job) -> dict[str, Any]:
    """The figures of one job, in this process."""
    steps, skipped = (STEPS, 0) if job.rate else (STEPS_OFF, WARM_UP)
    setting = replace(_setting(job.llm, job.gpus, job.seed, job.share, job.best_mean), steps=steps)
    setting = replace(setting, rate=job.rate, imitation=job.imitation, generalise=job.generalise)
    return describe(Training(setting, job.scheme).run(), skipped)


@lru_cache
def _setting(llm: str, gpus: int, seed: int, share: float, best_mean: float) -> Setting:
    """Without learning. What training costs a token is that of GPUS, and falls as GPUs are
    added."""
    model = engine_model(llm, ACCELERATOR, DEGREE, SLOTS)
    prompts = make_prompts(round(DATASET * share), seed, best_mean=best_mean)
    groups, engines = round(GROUPS * share), round(GPUS * share) // (2 * DEGREE)
    base = Setting(model, engines, prompts, groups, KEEP, 1, seed)
    train_token_s = with_training(base, ROLLOUT_SHARE) * GPUS / gpus
    return replace(base, engines=max(engines * gpus // GPUS, 1), train_token_s=train_token_s)


def describe(played: Played, skipped: int = 0) -> dict[str, Any]:
    """Means over the steps after the `skipped` ones; of the whole run what it did to the
    distribution."""
    rows, guard = played.rows[skipped:], played.guard
    means = {
        name: float(np.mean([getattr(row, name) for row in rows]))
        for name in (
            "seconds",
            "rollout_s",
            "train_s",
            "started",
            "trained",
            "pruned",
            "deferred",
            "success",
        )
    }
    sampled, trained = (
        sum(getattr(row, name) for row in rows) for name in ("sampled_tokens", "trained_tokens")
    )
    return {
        **means,
        "sampled_over_trained_tokens": sampled / trained,
        "stale_share": sum(row.stale_tokens for row in rows) / trained,
        "mean_tokens": [
            float(np.mean([row.mean_tokens for row in part])) for part in (rows[:4], rows[-4:])
        ],
        "order_spread": float(np.std([row.mean_log_length for row in rows])),
        "kept_samples": guard.kept.value,
        "length_distance": guard.length.distance,
        "difficulty_distance": guard.rate.distance,
        "length_quantiles": guard.length.quantiles(),
        "alarms": guard.alarms(),
    }


def fit_jobs(share: float = 1.0) -> dict[tuple[float, float], tuple[Job, Job]]:
    """What the fit plays, by rate of learning and strength of imitation: DARTS at 1:7, and verl."""
    tried = [
        *((RATE, strength) for strength in IMITATIONS),
        *((rate, 0.0) for rate in RATES if rate != RATE),
    ]
    base = Job(SMALL, GPUS, SMALL_DARTS, FIT_SEED, share=share)
    jobs = {
        (rate, strength): replace(base, rate=rate, imitation=strength) for rate, strength in tried
    }
    return {key: (job, replace(job, scheme=VERL)) for key, job in jobs.items()}


def fit_imitation(speedups: Mapping[tuple[float, float], float]) -> dict[str, Any]:
    """The strength at which DARTS is PUBLISHED_RATIO times as fast as verl, by straight lines
    between those played.

    gradient: the speedups without imitation, by rate. reached: whether any strength is enough; if
    not, `imitation` is the one that comes nearest.
    """
    points = sorted(
        (strength, speedup) for (rate, strength), speedup in speedups.items() if rate == RATE
    )
    found: dict[str, Any] = {
        "published": PUBLISHED_RATIO,
        "by_imitation": [list(point) for point in points],
        "gradient": sorted(
            [rate, speedup] for (rate, strength), speedup in speedups.items() if not strength
        ),
    }
    strength, reached = max(points, key=lambda point: point[1])[0], False
    for (low, slow), (high, fast) in pairwise(points):
        if not reached and slow < PUBLISHED_RATIO <= fast:
            strength, reached = low + (high - low) * (PUBLISHED_RATIO - slow) / (fast - slow), True
    if points[0][1] >= PUBLISHED_RATIO:
        strength, reached = points[0][0], True
    return rounded(found | {"imitation": strength, "reached": reached})


def in_mode(job: Job, mode: str, imitation: float) -> Job:
    """The job as the mode has it."""
    if mode == OFF:
        return replace(job, rate=0.0, imitation=0.0)
    return replace(job, rate=RATE, imitation=imitation if mode == IMITATION else 0.0)


def cells(
    seeds: Iterable[int], share: float = 1.0
) -> dict[str, dict[str, tuple[list[Job], list[Job]]]]:
    """Of each table its cells: the jobs of a scheme and of the verl that it is compared with, one a
    seed, without learning."""

    def of(llm: str, gpus: int, scheme: Scheme) -> tuple[list[Job], list[Job]]:
        jobs = [
            [Job(llm, gpus, each, seed, share=share) for seed in seeds] for each in (scheme, VERL)
        ]
        return jobs[0], jobs[1]

    seeds = list(seeds)
    return {
        "ablation": {scheme.name: of(LARGE, GPUS, scheme) for scheme in ABLATION},
        "ratios": {name: of(SMALL, GPUS, scheme) for name, scheme in RATIOS.items()},
        "scaling": {str(gpus): of(SMALL, gpus, SMALL_DARTS) for gpus in SCALES},
    }


def sensitivity(
    seed: int, imitation: float, share: float = 1.0
) -> dict[str, tuple[list[Job], list[Job]]]:
    """The ablation's DARTS where one constant of the model of learning is another."""
    base = Job(LARGE, GPUS, DARTS, seed, RATE, imitation, share=share)
    changed = {
        "as reported": base,
        "half the rate": replace(base, rate=RATE / 2),
        "twice the rate": replace(base, rate=RATE * 2),
        "half the imitation": replace(base, imitation=imitation / 2),
        "twice the imitation": replace(base, imitation=imitation * 2),
        "only trained prompts learn": replace(base, generalise=0.0),
        "all prompts learn alike": replace(base, generalise=1.0),
        "as many prompts want long answers as short ones": replace(base, best_mean=0.0),
    }
    return {name: ([job], [replace(job, scheme=VERL)]) for name, job in changed.items()}


def row_of(
    table: str,
    name: str,
    mode: str,
    pair: tuple[Sequence[Job], Sequence[Job]],
    done: Mapping[Job, Any],
) -> Any:
    """A cell's row: how many times as fast as verl, with its spread over seeds, and medians of what
    it did."""
    ours, theirs = ([done[job] for job in jobs] for jobs in pair)
    speedups = [verl["seconds"] / own["seconds"] for own, verl in zip(ours, theirs, strict=True)]
    numbers = [key for key, value in ours[0].items() if isinstance(value, float)]
    row: dict[str, Any] = {
        "table": table,
        "name": name,
        "mode": mode,
        "paper": PAPER.get(table, {}).get(name),
    }
    row |= {"speedup": median_of(speedups), "spread": range_of(speedups)}
    row |= {
        "rollout_speedup": median_of(
            v["rollout_s"] / o["rollout_s"] for o, v in zip(ours, theirs, strict=True)
        )
    }
    row |= {key: median(each[key] for each in ours) for key in numbers}
    return rounded(
        row | {key: ours[0][key] for key in ("mean_tokens", "length_quantiles", "alarms")}
    )
