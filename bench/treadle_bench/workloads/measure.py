"""What the simulator's workloads are like, beside what the papers say of theirs, and beside public traces.

Keys: `workloads` the parametric ones (medians over repeats, each another seed), `traces` those of --traces and of the
sources found under --data, as they are; `predictors` recall of the longest tenth and correlation after 0, 1 and 2
steps. Distributions are percentiles over trajectories (tokens, steps) and over calls (tool_s, obs_tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from treadle_cli.problems import UsageProblem
from treadle_sim.predictors import Noisy, Predictor, PromptMean, Siblings, measure_accuracy
from treadle_sim.workloads.parametric import MODELS, WORKLOADS, make
from treadle_sim.workloads.public_traces import SOURCES, read_public
from treadle_sim.workloads.workload import TrajectoryWork, Workload, groups, read_traces

from treadle_bench.options import BenchOptions
from treadle_bench.workloads.plot import draw

PERCENTILES = (10, 50, 90, 99, 100)
TURNS = 2  # steps after which the papers ask a predictor
SIBLINGS_PROMPTS = 100  # of the product's estimator, which takes 0.5 ms an answer: a quarter of the batch
LEAST_REPEATS = 2  # samples that a prompt must have to tell how far apart they lie
UNTIMED = ("mcpmark", "tau_airline_gpt4o")  # sources whose tool seconds are drawn, not measured


async def run(options: BenchOptions) -> dict[str, Any]:
    """See the module. Raises TraceFileError, PublicTraceError and UsageProblem."""
    batches = {
        name: [make(name, seed=options.seed + repeat) for repeat in range(options.repeats)] for name in WORKLOADS
    }
    traces = _traces(options)
    found = {
        "workloads": [_parametric(name, of_name) for name, of_name in batches.items()],
        "traces": [_named(name, described(works), timed=name not in UNTIMED) for name, works in traces.items()],
        "predictors": [row for name in WORKLOADS for row in _predictors(name, options)],
    }
    if options.pictures is not None:
        timed = {name for name in traces if name not in UNTIMED}
        draw({name: of_name[0] for name, of_name in batches.items()}, traces, timed, found, options.pictures)
    return found


def described(works: Sequence[TrajectoryWork]) -> dict[str, Any]:
    """What a batch is like. `within_prompt` is the share of the variance of log lengths among samples of one prompt,
    None where no prompt has several."""
    tokens = np.array([work.gen_tokens for work in works], np.float64)
    steps = [step for work in works for step in work.steps]
    turns = np.array([len(work.steps) for work in works], np.float64)
    context = [
        work.prompt_tokens + work.gen_tokens + sum(step.obs_tokens for step in work.steps[:-1]) for work in works
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
    """Those of PERCENTILES, and the greatest value as "max"."""
    found = np.percentile(values, PERCENTILES).tolist()
    return {"max" if at == 100 else f"p{at}": value for at, value in zip(PERCENTILES, found, strict=True)}


def within_prompt(works: Sequence[TrajectoryWork]) -> float | None:
    """Mean variance of log lengths within a prompt over the variance of all of those prompts; within 0 to 1."""
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
    """None where either does not vary."""
    return float(np.corrcoef(one, other)[0, 1]) if np.ptp(one) > 0.0 and np.ptp(other) > 0.0 else None


def _parametric(name: str, batches: Sequence[Workload]) -> dict[str, Any]:
    each = [described(batch.trajectories) for batch in batches]
    row = _named(name, _median(each), timed=True)
    longest = [batch["longest_over_median"] for batch in each]
    row["longest_over_median_range"] = _range(longest)
    row["tool_s_mean_by_model"] = {
        llm: {
            "paper": WORKLOADS[name].tool_mean_s[llm],
            "drawn": round(described(make(name, llm=llm).trajectories)["tool_s_mean"], 4),
        }
        for llm in MODELS
    }
    return row


def _range(values: Sequence[float]) -> list[float]:
    return [round(min(values), 4), round(max(values), 4)]


def _median(rows: Sequence[Any]) -> Any:
    """Of numbers within equal shapes; None where one is."""
    first = rows[0]
    if isinstance(first, dict):
        return {key: _median([row[key] for row in rows]) for key in first}
    if all(row == first for row in rows):
        return first
    return None if any(row is None for row in rows) else float(np.median(rows))


def _named(name: str, row: dict[str, Any], *, timed: bool) -> dict[str, Any]:
    rounded = {key: _rounded(value) for key, value in row.items()}
    if not timed:
        rounded["tool_s"] = rounded["tool_s_mean"] = None  # the source has none
    return {"name": name, **rounded}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def _traces(options: BenchOptions) -> dict[str, Sequence[TrajectoryWork]]:
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


def _predictors(name: str, options: BenchOptions) -> list[dict[str, Any]]:
    rows: dict[str, list[list[dict[str, float]]]] = {}
    for repeat in range(options.repeats):
        options.progress.print(f"predictors of {name}, {repeat + 1} of {options.repeats}")
        seed = options.seed + repeat
        whole = (make(name, seed=seed), make(name, seed=seed, epoch=1).trajectories)
        part = (make(name, SIBLINGS_PROMPTS, seed=seed), make(name, SIBLINGS_PROMPTS, seed=seed, epoch=1).trajectories)
        asked: dict[str, tuple[Workload, Predictor]] = {
            "prompt-mean": (whole[0], PromptMean(*whole)),
            "noisy": (whole[0], Noisy(whole[0], seed)),
            "siblings, no history": (part[0], Siblings(part[0])),
            "siblings, after one epoch": (part[0], Siblings(*part)),
        }
        for label, (workload, predictor) in asked.items():
            rows.setdefault(label, []).append(
                [
                    {"recall": each.recall, "pearson": each.pearson, "pearson_log": each.pearson_log, "bias": each.bias}
                    for each in measure_accuracy(workload, predictor, TURNS)
                ]
            )
    return [
        {
            "workload": name,
            "predictor": label,
            "turn": turn,
            **_rounded(_median([each[turn] for each in repeats])),
            "recall_range": _range([each[turn]["recall"] for each in repeats]),
            "pearson_range": _range([each[turn]["pearson"] for each in repeats]),
        }
        for label, repeats in rows.items()
        for turn in range(TURNS + 1)
    ]
