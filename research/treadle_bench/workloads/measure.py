"""Distributions of the simulator's workloads, beside those of the papers and of public traces.

Keys: `workloads`: the parametric ones, medians over repeats with a seed each. `traces`: those of
--traces and of the sources under --data. `predictors`: recall of the longest tenth and correlation
after 0, 1 and 2 steps. Distributions are percentiles over trajectories (tokens, steps) and over
calls (tool_s, obs_tokens).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from treadle_cli.exits import UsageProblem
from treadle_sim.predictors import Noisy, Predictor, PromptMean, Siblings, measure_accuracy
from treadle_sim.workloads.parametric import MODELS, WORKLOADS, make
from treadle_sim.workloads.workload import TrajectoryWork, Workload, groups, read_traces

from treadle_bench.bench import Bench, BenchOptions
from treadle_bench.public_traces import SOURCES, read_public
from treadle_bench.summary import range_of, rounded
from treadle_bench.workloads.plot import draw

PERCENTILES = (10, 50, 90, 99, 100)
SCORES = ("recall", "pearson", "pearson_log", "bias")  # of a predictor
TURNS = 2  # steps after which the papers last ask a predictor
SIBLINGS_PROMPTS = (
    100  # for the estimator without a model, which takes 0.5 ms an answer: a quarter of the batch
)
LEAST_REPEATS = 2  # samples that a prompt must have for a variance
UNTIMED = ("mcpmark", "tau_airline_gpt4o")  # sources whose tool seconds are drawn, not measured
NO_TOOL_S = {"tool_s": None, "tool_s_mean": None}


async def measure(options: BenchOptions) -> dict[str, Any]:
    """Raises TraceFileError, PublicTraceError and UsageProblem."""
    batches = {name: [make(name, seed=seed) for seed in options.seeds] for name in WORKLOADS}
    traces = _read_traces(options)
    found = {
        "workloads": [_describe_parametric(name, of_name) for name, of_name in batches.items()],
        "traces": [
            {"name": name, **rounded(describe(works)), **(NO_TOOL_S if name in UNTIMED else {})}
            for name, works in traces.items()
        ],
        "predictors": [row for name in WORKLOADS for row in _score_predictors(name, options)],
    }
    if options.pictures is not None:
        timed = {name for name in traces if name not in UNTIMED}
        first = {name: of_name[0] for name, of_name in batches.items()}
        draw(first, traces, timed, found, options.pictures / "workloads.png")
    return found


def describe(works: Sequence[TrajectoryWork]) -> dict[str, Any]:
    """Distributions of a batch. `within_prompt` is the share of the variance of log lengths among
    samples of one prompt, None where no prompt has several."""
    tokens = np.array([work.gen_tokens for work in works], np.float64)
    steps = [step for work in works for step in work.steps]
    turns = np.array([len(work.steps) for work in works], np.float64)
    context = [
        work.prompt_tokens + work.gen_tokens + sum(step.obs_tokens for step in work.steps[:-1])
        for work in works
    ]
    log_tokens = np.log(tokens)
    return {
        "trajectories": len(works),
        "censored": sum(work.censored for work in works),
        "gen_tokens": percentiles(tokens),
        "gen_tokens_mean": float(tokens.mean()),
        "longest_over_median": float(tokens.max() / np.median(tokens)),
        "variation": float(tokens.std() / tokens.mean()),
        "log_sigma": float(log_tokens.std()),
        "within_prompt": within_prompt(works),
        "steps": percentiles(turns),
        "steps_mean": float(turns.mean()),
        "steps_length_correlation": _correlation(log_tokens, np.log(turns)),
        "step_gen_tokens": percentiles([step.gen_tokens for step in steps]),
        "obs_tokens": percentiles([step.obs_tokens for step in steps]),
        "context_tokens": percentiles(context),
        "prefill_over_decode": float((sum(context) - tokens.sum()) / tokens.sum()),
        "tool_s": percentiles([step.tool_s for step in steps]),
        "tool_s_mean": float(np.mean([step.tool_s for step in steps])),
    }


def percentiles(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """Those of PERCENTILES, and the maximum as "max"."""
    found = np.percentile(values, PERCENTILES).tolist()
    return {
        "max" if at == 100 else f"p{at}": value
        for at, value in zip(PERCENTILES, found, strict=True)
    }


def within_prompt(works: Sequence[TrajectoryWork]) -> float | None:
    """Mean variance of log lengths within a prompt over the variance over all these prompts, 0 to
    1; None where no prompt has several samples."""
    logs = [np.log([work.gen_tokens for work in group]) for group in groups(works).values()]
    repeated = [group for group in logs if len(group) >= LEAST_REPEATS]
    if not repeated:
        return None
    total = float(np.var(np.concatenate(repeated)))
    if total == 0.0:
        return 0.0
    freedom = sum(len(group) - 1 for group in repeated)
    within = sum(float(np.var(group)) * len(group) for group in repeated) / freedom
    return min(1.0, within / total)


def _correlation(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float | None:
    """Pearson's; None where one of both is constant."""
    return (
        float(np.corrcoef(one, other)[0, 1]) if np.ptp(one) > 0.0 and np.ptp(other) > 0.0 else None
    )


def _describe_parametric(name: str, batches: Sequence[Workload]) -> dict[str, Any]:
    each = [describe(batch.trajectories) for batch in batches]
    drawn = {llm: describe(make(name, llm=llm).trajectories)["tool_s_mean"] for llm in MODELS}
    return {
        "name": name,
        **rounded(_median(each)),
        "longest_over_median_range": range_of(batch["longest_over_median"] for batch in each),
        "tool_s_mean_by_model": {
            llm: {"paper": WORKLOADS[name].tool_mean_s[llm], "drawn": rounded(mean_s)}
            for llm, mean_s in drawn.items()
        },
    }


def _median(rows: Sequence[Any]) -> Any:
    """Medians of the numbers in rows of equal shape; None where a value is None."""
    first = rows[0]
    if isinstance(first, dict):
        return {key: _median([row[key] for row in rows]) for key in first}
    if all(row == first for row in rows):
        return first
    return None if any(row is None for row in rows) else float(np.median(rows))


def _read_traces(options: BenchOptions) -> dict[str, Sequence[TrajectoryWork]]:
    traces: dict[str, Sequence[TrajectoryWork]] = {}
    if options.traces is not None:
        traces[options.traces.name] = read_traces(options.traces)
    if options.data is not None:
        found = [name for name in SOURCES if (options.data / name).is_dir()]
        if not found:
            raise UsageProblem(f"{options.data} holds none of {', '.join(SOURCES)}")
        for name in found:
            options.progress.print(f"reading {name}")
            traces[name] = read_public(name, options.data, options.seed)
    return traces


def _score_predictors(name: str, options: BenchOptions) -> list[dict[str, Any]]:
    rows: dict[str, list[list[dict[str, float]]]] = defaultdict(list)
    for number, seed in enumerate(options.seeds, 1):
        options.progress.print(f"predictors of {name}, {number} of {options.repeats}")
        whole = (make(name, seed=seed), make(name, seed=seed, epoch=1).trajectories)
        part = (
            make(name, SIBLINGS_PROMPTS, seed=seed),
            make(name, SIBLINGS_PROMPTS, seed=seed, epoch=1).trajectories,
        )
        asked: dict[str, tuple[Workload, Predictor]] = {
            "prompt-mean": (whole[0], PromptMean(*whole)),
            "noisy": (whole[0], Noisy(whole[0], seed)),
            "siblings, no history": (part[0], Siblings(part[0])),
            "siblings, after one epoch": (part[0], Siblings(*part)),
        }
        for label, (workload, predictor) in asked.items():
            accuracy = measure_accuracy(workload, predictor, TURNS)
            rows[label].append([{key: getattr(each, key) for key in SCORES} for each in accuracy])
    return [
        {
            "workload": name,
            "predictor": label,
            "turn": turn,
            **rounded(_median([each[turn] for each in repeats])),
            **{
                f"{key}_range": range_of([each[turn][key] for each in repeats])
                for key in ("recall", "pearson")
            },
        }
        for label, repeats in rows.items()
        for turn in range(TURNS + 1)
    ]


BENCH = Bench(
    "workloads",
    "Lengths, steps and tool times of the simulator's workloads and of public traces (--data), and "
    "what each predictor finds of the longest. Takes about 2 minutes.",
    measure,
    decides=("sim/treadle_sim/workloads",),
)
