"""The page of a fit in Markdown, as it stands in bench/results/fit.md."""

from __future__ import annotations

from collections.abc import Iterator

from treadle_sim.fitting.fit import FitReport

COMMAND = "treadle fit --data DIR --out bench/results --profiles sim/treadle_sim/profiles"

WEAKNESSES = (
    "- The level comes from one model (Qwen3-32B, taken to be bf16) on one card (H100), batches 16 to 128 (vLLM: 8 to",
    "  128), degrees 2 to 8. Smaller batches, one GPU, other models and other cards are carried over; the two checks",
    "  above are the evidence for that. A step of one sequence, where a tail ends, was not measured whole.",
    "- The first check is of another engine as well as another model. With 128 requests at a time and answers of 512",
    "  tokens it is predicted 17% too slow on one GPU and a quarter too fast on eight.",
    "- vLLM was measured with two prompt sizes: with one of them unseen, attention cannot be told from the rest.",
    "- A100: attention kernels of that engine jump between two regimes, which no curve linear in KV tokens follows.",
    "- H800 and H20 have no data at all; their curves are data sheets and a roofline.",
    "- The fixed cost of a prefill is half a decode step by argument; splitwise's engine of 2023 pays more (above).",
    "- Weights are bf16 and models dense: nothing here covers fp8, mixtures of experts or speculative decoding.",
)


def page(report: FitReport) -> str:
    """Everything a reader needs to judge the curves: what was fitted, how far off it is, and where it is weak."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: FitReport) -> Iterator[str]:
    yield "# fit: engine curves"
    yield ""
    yield f"`{COMMAND}`. No random numbers and no clock: repeats give the same figures. Method and assumptions:"
    yield '`sim/README.md`, "Profiles". Errors are |predicted / measured - 1|. Picture: `fit.png`.'
    yield ""
    yield "## Engines measured whole"
    yield ""
    yield "Seconds of a request; held out: all rows of one degree, one batch or one prompt size at a time. Step alone:"
    yield "the time that a longer answer takes beyond a shorter one, held out by degree."
    yield ""
    yield "| engine | rows (left out) | median | p90 | unseen degree | unseen batch | unseen prompt size | step alone |"
    yield "|---|---|---|---|---|---|---|---|"
    for fit in report.served:
        errors = (fit.unseen_gpus, fit.unseen_batch, fit.unseen_prompt, fit.steps)
        held = " | ".join(f"{error.held_out_median:.1%}, p90 {error.held_out_p90:.1%}" for error in errors)
        yield (
            f"| {fit.engine}, {fit.llm} on {fit.accelerator} | {len(fit.rows)} ({fit.left_out}) "
            f"| {fit.unseen_gpus.median:.1%} | {fit.unseen_gpus.p90:.1%} | {held} |"
        )
    yield ""
    yield "| engine | times kernels | µs a layer | µs a sequence | prefill over its peak | all-reduce | attention |"
    yield "|---|---|---|---|---|---|---|"
    for fit in report.served:
        level = fit.level
        yield (
            f"| {fit.engine} | {level.kernel_factor:.3f} | {level.layer_s * 1e6:.1f} | {level.sequence_s * 1e6:.1f} "
            f"| {level.compute:.2f} | {level.link:.2f} | {level.pair:.2f} |"
        )
    yield ""
    yield "## Data that no fit saw"
    yield ""
    yield "| prediction | rows | median | p90 | signed median |"
    yield "|---|---|---|---|---|"
    for check in report.checks:
        yield f"| {check.label} | {check.rows} | {check.median:.1%} | {check.p90:.1%} | {check.bias:+.1%} |"
    yield ""
    yield "## Decode curves"
    yield ""
    yield "Against kernels (against whole steps for splitwise); held out: one measured cell at a time. Derived curves"
    yield "have no points. Step: one sequence, then 100 sequences, both without KV. KV tokens 0: it does not fit."
    yield ""
    yield "| engine | origin | knots | points | median | p90 | held out | step, ms | ns a KV token | KV tokens |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for fitted in report.engines:
        profile, curve, error = fitted.profile, fitted.profile.curve, fitted.decode_error
        errors_of = (
            f"{error.points} | {error.median:.1%} | {error.p90:.1%} "
            f"| {error.held_out_median:.1%}, p90 {error.held_out_p90:.1%}"
            if error
            else "| | |"
        )
        steps = f"{curve.decode_s(1) * 1e3:.2f}, {curve.decode_s(100) * 1e3:.2f}"
        yield (
            f"| {profile.llm}, {profile.accelerator} x{profile.gpus}, {fitted.engine} | {profile.origin} "
            f"| {len(curve.batch_sizes)} | {errors_of} | {steps} "
            f"| {curve.per_kv_token_s * 1e9:.1f} | {profile.kv_tokens:,} |"
        )
    yield ""
    for skipped in report.skipped:
        yield f"Not fitted: {skipped}."
    yield ""
    yield "## Prefills of splitwise"
    yield ""
    yield "Held out: one prompt size at a time, the shortest and the longest included."
    yield ""
    yield "| engine | points | median | p90 | held out | fixed over a step |"
    yield "|---|---|---|---|---|---|"
    for fitted in report.engines:
        profile, prefill = fitted.profile, fitted.prefill_error
        if prefill:
            share = profile.curve.prefill_fixed_s / profile.curve.decode_s(1)
            yield (
                f"| {profile.llm}, {profile.accelerator} x{profile.gpus} | {prefill.points} | {prefill.median:.1%} "
                f"| {prefill.p90:.1%} | {prefill.held_out_median:.1%}, p90 {prefill.held_out_p90:.1%} | {share:.2f} |"
            )
    yield ""
    yield "## Where it is weak"
    yield ""
    yield from WEAKNESSES
