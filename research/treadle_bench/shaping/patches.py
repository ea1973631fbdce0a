"""What each patch of a public lesson on long tails brings: seconds of a rollout over those of
static padded batches.

The lesson's run: a 7B model, 16 samples a prompt, lengths of mean 800 and coefficient of variation
1. Static batches reserve KV for the longest answer allowed and decode until their longest member
ends, every member padded; then the next batch starts. The other rows are rounds on the simulator's
engines. The cap is the 95th percentile of successful answers of an earlier epoch. Dynamic K starts
a quarter more samples than it keeps, and aborts what is left of a group that has enough and both
outcomes.
"""

import math
from typing import Any

import numpy as np
from treadle_core.rollouts.bias import BiasGuard
from treadle_core.rollouts.group import FirstK, FirstMixed, Rule
from treadle_sim.engine_model import EngineModel, engine_model

from treadle_bench.shaping.population import PROMPT_TOKENS, Answers, Policy, make_prompts
from treadle_bench.shaping.rounds import GroupWork, Round, RoundResult, single_turn
from treadle_bench.summary import median_of, range_of

LLM, ACCELERATOR, ENGINES, SLOTS = "Qwen3-8B", "H100", 8, 256
PROMPTS, KEEP, STARTED = 64, 16, 20
MEAN_TOKENS, VARIATION = 800.0, 1.0
LIMIT_TOKENS = 16_384  # what an answer may have without a cap
CAP_PERCENTILE = 0.95
ROWS = STATIC, PAGED, CAPPED, DYNAMIC, DYNAMIC_ALONE = (
    "static padded batches",
    "+ paged KV and continuous batching",
    "+ cap at p95 of successes",
    "+ dynamic K",
    "dynamic K without the cap",
)
PAPER = dict(zip(ROWS, (1.0, 0.30, 0.18, 0.13, None), strict=True))


def measure_patches(seeds: list[int], share: float = 1.0) -> list[dict[str, Any]]:
    """A row for each patch, on top of those above it, and one for dynamic K alone.

    relative, to_paged: seconds over those of static and of paged batches. cut_successes: share of
    successes that the cap cuts. kept: share of samples that are trained.
    """
    runs = [
        _play(seed, max(round(PROMPTS * share), 2), max(round(ENGINES * share), 1))
        for seed in seeds
    ]
    rows = []
    for name in ROWS:
        seconds, relative = (
            [run[name]["seconds"] for run in runs],
            [_over(run, name, STATIC) for run in runs],
        )
        row: dict[str, Any] = {"name": name, "paper": PAPER[name], "seconds": median_of(seconds)}
        row |= {"relative": median_of(relative), "spread": range_of(relative)}
        row["to_paged"] = median_of(_over(run, name, PAGED) for run in runs)
        rows.append(
            row
            | {key: median_of(run[name][key] for run in runs) for key in ("kept", "cut_successes")}
        )
    return rows


def _over(run: dict[str, dict[str, float]], name: str, base: str) -> float:
    return run[name]["seconds"] / run[base]["seconds"]


def _play(seed: int, prompts: int, engines: int) -> dict[str, dict[str, float]]:
    model = engine_model(LLM, ACCELERATOR, 1, SLOTS)
    sigma = math.sqrt(math.log1p(VARIATION**2))
    drawn = make_prompts(prompts, seed, sigma=sigma, median=MEAN_TOKENS * math.exp(-0.5 * sigma**2))
    policy = Policy(drawn, 0.0, limit_tokens=LIMIT_TOKENS)
    earlier = _answers(policy, prompts, seed, 1, 0)
    successes = np.concatenate([each.tokens[each.rewards > 0] for each in earlier])
    cap = int(np.quantile(successes, CAP_PERCENTILE))
    free, capped = (_answers(policy, prompts, seed, 0, limit) for limit in (0, cap))
    found = {
        STATIC: {
            "seconds": static_s(model, [each.tokens[:KEEP] for each in free], engines),
            "kept": 1.0,
        }
    }
    found[PAGED] = _round(model, free, engines, KEEP, FirstK(KEEP))
    found[CAPPED] = _round(model, capped, engines, KEEP, FirstK(KEEP))
    found[DYNAMIC] = _round(model, capped, engines, STARTED, FirstMixed(KEEP))
    found[DYNAMIC_ALONE] = _round(model, free, engines, STARTED, FirstMixed(KEEP))
    lost = sum(float(each.rewards[:KEEP].sum()) for each in capped) / sum(
        float(each.rewards[:KEEP].sum()) for each in free
    )
    for name in ROWS:
        found[name]["cut_successes"] = 1.0 - lost if name in (CAPPED, DYNAMIC) else 0.0
    return found


def _answers(policy: Policy, prompts: int, seed: int, epoch: int, limit: int) -> list[Answers]:
    rngs = [np.random.default_rng([seed, epoch, prompt]) for prompt in range(prompts)]
    return [
        policy.sample(prompt, rng.standard_normal(STARTED), rng.random(STARTED), limit)
        for prompt, rng in enumerate(rngs)
    ]


def _round(
    model: EngineModel, answers: list[Answers], engines: int, started: int, rule: Rule
) -> dict[str, float]:
    groups = [
        GroupWork(
            str(prompt),
            tuple(
                single_turn(
                    str(prompt),
                    at,
                    PROMPT_TOKENS,
                    int(of.tokens[at]),
                    float(of.rewards[at]),
                    bool(cut),
                )
                for at, cut in enumerate(of.truncated[:started])
            ),
            rule,
        )
        for prompt, of in enumerate(answers)
    ]
    played: RoundResult = Round(model, engines, groups, len(groups)).run()
    guard = BiasGuard()
    for result in played.groups:
        running = list(result.running_tokens.values())
        guard.observe(result.candidates, result.trained, aborted_tokens=running)
    return {"seconds": played.seconds, "kept": guard.kept.value}


def static_s(model: EngineModel, groups: list[Any], engines: int) -> float:
    """Seconds of static padded batches: the slowest engine's, which runs them one after another."""
    lengths = np.concatenate(groups)
    size = max(min(model.kv_tokens // (PROMPT_TOKENS + LIMIT_TOKENS), model.slots), 1)
    curve = model.curve
    taken = []
    for at in range(engines):
        mine = lengths[at::engines]
        seconds = 0.0
        for first in range(0, len(mine), size):
            batch = mine[first : first + size]
            n, steps = len(batch), float(batch.max())
            prefill_s = curve.prefill_batch_s(
                n * curve.prefill_computed_s(PROMPT_TOKENS, 0), n, n * PROMPT_TOKENS
            )
            kv_tokens = n * (steps * PROMPT_TOKENS + 0.5 * steps * (steps + 1.0))
            seconds += prefill_s + steps * curve.decode_s(n) + curve.per_kv_token_s * kv_tokens
        taken.append(seconds)
    return max(taken)
