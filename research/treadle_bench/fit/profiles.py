"""Fits all engines that the public measurements cover: the shipped profiles, their errors, and
checks on other data.

Kernels give a step's shape (`treadle_sim.fitting`), engines measured whole its level and the cost
of prefill (`serving`). Curves of accelerators without data are scaled from a measured one by a
roofline, and are marked `derived`: what reads memory (weights at small batches, KV) scales with
bandwidth; what computes (prefill, and the weights once a batch is large) scales with FLOP/s, at the
share of the peak that prefill reached on the measured card. The host's part of a step (launches,
sampling, the scheduler) is the same everywhere. sim/README.md has the reasons and every assumption.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from treadle_sim.engine_model import DEFAULT_SLOTS, EngineModel, StepCurve
from treadle_sim.fitting import Array, DecodeFit, DecodePoint, FitError, fit_decode, fit_prefill

from treadle_bench.fit.serving import (
    ACCELERATORS,
    LLMS,
    Accelerator,
    Llm,
    ServingFit,
    ServingLevel,
    fit_serving,
    has_room,
    kv_tokens,
)
from treadle_bench.fit.tables import (
    FitDataError,
    KernelSet,
    ServedRow,
    read_kernels,
    read_served,
    read_splitwise,
)

# A forward pass of a few tokens costs about a decode step, one of many its tokens: the larger of
# the two. StepCurve adds them instead; with half a step as the fixed part the sum is nowhere more
# than half a step off.
FIXED_SHARE_OF_STEP = 0.5
SHIPPED_ENGINE = (
    "sglang"  # the engine that Treadle's sidecar drives; other engines are fitted to compare
)
# the one dense bf16 model that is measured both by kernel and whole
CALIBRATED_ON = ("Qwen3-32B", "H100")
LEAST_CONTEXTS = 3  # fewer context lengths do not tell a KV token's time from a sequence's
# the measured card whose memory and links are nearest
DERIVED_FROM = {"H800": "H100", "H20": "H200"}


@dataclass(frozen=True, slots=True)
class FittedEngine:
    """A profile, the engine software it stands for, the measured steps behind it, and its errors.

    points: steps as fitted, at the level of whole engines. decode_error: of the curve against
    kernels or, for a whole engine, against its steps. None where nothing was measured.
    """

    profile: EngineModel
    engine: str
    points: tuple[DecodePoint, ...] = ()
    decode_error: FitError | None = None
    prefill_error: FitError | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """A prediction of data that no fit saw: (measured, predicted, GPUs) of each row."""

    label: str
    pairs: tuple[tuple[float, float, int], ...]

    @property
    def _errors(self) -> Array:
        measured, predicted, _ = np.array(self.pairs).T
        return np.asarray(predicted / measured - 1.0)

    @property
    def rows(self) -> int:
        return len(self.pairs)

    @property
    def median(self) -> float:
        """Of the relative error's size."""
        return float(np.median(np.abs(self._errors)))

    @property
    def p90(self) -> float:
        """90th percentile of the relative error's size."""
        return float(np.quantile(np.abs(self._errors), 0.9))

    @property
    def bias(self) -> float:
        """Median of the relative error with its sign."""
        return float(np.median(self._errors))


@dataclass(frozen=True, slots=True)
class FitReport:
    """The result of `treadle bench fit`. skipped: kernel sets that are too small to fit."""

    served: tuple[ServingFit, ...]
    engines: tuple[FittedEngine, ...]
    skipped: tuple[str, ...]
    checks: tuple[Check, ...]

    @property
    def shipped(self) -> list[EngineModel]:
        """The profiles of SGLang, and those of Splitwise's engine, which has other models."""
        return [
            fitted.profile
            for fitted in self.engines
            if fitted.engine in (SHIPPED_ENGINE, "splitwise")
        ]


def fit_public(data: Path) -> FitReport:
    """Fit everything in the folder that holds the tables. Raises FitDataError."""
    kernel_sets = read_kernels(data)
    served_rows = read_served(data)
    curves = {
        key: fit_decode(points)
        for key, points in kernel_sets.items()
        if _contexts(points) >= LEAST_CONTEXTS
    }
    levels = {}
    for engine in sorted({key.engine for key in curves}):
        degrees = _degrees(curves, engine, *CALIBRATED_ON)
        rows = [row for row in _served(served_rows, engine, *CALIBRATED_ON) if row.gpus in degrees]
        if any(has_room(row) for row in rows):
            levels[engine] = fit_serving(rows, degrees)
    if SHIPPED_ENGINE not in levels:
        raise FitDataError(
            f"no whole engine of {' on '.join(CALIBRATED_ON)} under {SHIPPED_ENGINE} to set the "
            "level by"
        )
    curves = {key: curve for key, curve in curves.items() if key.engine in levels}
    checks = (_other_model(served_rows, curves, levels), _other_card(served_rows, curves, levels))
    engines = [
        *_measured_kernels(curves, kernel_sets, levels),
        *_derived(curves, levels[SHIPPED_ENGINE]),
        *_splitwise(data),
    ]
    return FitReport(
        served=tuple(levels.values()),
        engines=tuple(sorted(engines, key=_order)),
        skipped=tuple(
            f"{key.llm} on {key.accelerator} x{key.gpus} ({key.engine}), {_contexts(points)} "
            "context length(s)"
            for key, points in kernel_sets.items()
            if key not in curves
        ),
        checks=tuple(check for check in checks if check.pairs),
    )


def _measured_kernels(
    curves: dict[KernelSet, DecodeFit],
    kernel_sets: dict[KernelSet, list[DecodePoint]],
    levels: dict[str, ServingFit],
) -> Iterator[FittedEngine]:
    for key, kernels in curves.items():
        llm, card, level = LLMS[key.llm], ACCELERATORS[key.accelerator], levels[key.engine].level
        seen = kernel_sets[key]
        steps = level.steps_s(
            np.array([p.step_s for p in seen]), np.array([p.batch for p in seen]), llm
        )
        origin = "fitted" if (key.llm, key.accelerator) == CALIBRATED_ON else "transferred"
        yield FittedEngine(
            profile=_profile(
                key.llm,
                key.accelerator,
                key.gpus,
                origin,
                serving_curve(kernels, level, llm, card, key.gpus),
            ),
            engine=key.engine,
            points=tuple(
                DecodePoint(point.batch, point.kv_tokens, float(step))
                for point, step in zip(seen, steps, strict=True)
            ),
            decode_error=kernels.error,
        )


def _derived(curves: dict[KernelSet, DecodeFit], served: ServingFit) -> Iterator[FittedEngine]:
    for name, source in DERIVED_FROM.items():
        for key, kernels in curves.items():
            if (key.accelerator, key.engine) == (source, SHIPPED_ENGINE):
                curve = derived_curve(
                    kernels,
                    served.level,
                    LLMS[key.llm],
                    ACCELERATORS[source],
                    ACCELERATORS[name],
                    key.gpus,
                )
                yield FittedEngine(_profile(key.llm, name, key.gpus, "derived", curve), key.engine)


def _splitwise(data: Path) -> Iterator[FittedEngine]:
    for (accelerator, gpus), (steps, prefills) in read_splitwise(data).items():
        decode, prefill = fit_decode(steps), fit_prefill(prefills)
        curve = StepCurve(
            decode.batch_sizes,
            decode.step_s,
            decode.per_kv_token_s,
            prefill.fixed_s,
            prefill.token_s,
            prefill.pair_s,
        )
        yield FittedEngine(
            _profile("Llama-2-70B", accelerator, gpus, "measured", curve),
            "splitwise",
            tuple(steps),
            decode.error,
            prefill.error,
        )


def _other_model(
    rows: list[ServedRow], curves: dict[KernelSet, DecodeFit], levels: dict[str, ServingFit]
) -> Check:
    """Llama-3.1-8B under TensorRT-LLM from Qwen3-8B's kernels and SGLang's level: another model and
    another engine."""
    kernels = _degrees(curves, SHIPPED_ENGINE, "Qwen3-8B", "H100")
    used = [row for row in _served(rows, "trtllm", "Llama-3.1-8B", "H100") if row.gpus in kernels]
    level, llm = levels[SHIPPED_ENGINE].level, LLMS["Llama-3.1-8B"]
    predicted = level.request_s(used, [kernels[row.gpus] for row in used], llm) if used else ()
    return Check(
        "a request of Llama-3.1-8B on TensorRT-LLM, H100, from Qwen3-8B on SGLang",
        tuple(
            (row.request_s, float(second), row.gpus)
            for row, second in zip(used, predicted, strict=True)
        ),
    )


def _other_card(
    rows: list[ServedRow], curves: dict[KernelSet, DecodeFit], levels: dict[str, ServingFit]
) -> Check:
    """H200 over H100 for Llama-3.1-70B under vLLM: whether the level of one card holds for the
    other. Its weights are fp8 and the kernels bf16, so only the ratio of the cards is compared."""
    llm, engine = LLMS["Llama-3.1-70B"], "vllm"
    old, new = (
        {
            (row.gpus, row.batch, row.prompt_tokens, row.gen_tokens): row
            for row in rows
            if (row.engine, row.llm, row.accelerator) == (engine, llm.name, card)
        }
        for card in ("H100", "H200")
    )
    ratios = []
    for shape in sorted(old.keys() & new.keys()) if engine in levels else ():
        level = levels[engine].level
        gpus, batch, prompt, gen = shape
        pair = [KernelSet(card, engine, llm.name, gpus) for card in ("H100", "H200")]
        if all(key in curves for key in pair) and batch * (prompt + gen) <= kv_tokens(
            llm, ACCELERATORS["H100"], gpus
        ):
            before, after = level.request_s(
                [old[shape], new[shape]], [curves[key] for key in pair], llm
            )
            ratios.append(
                (new[shape].request_s / old[shape].request_s, float(after / before), gpus)
            )
    return Check("H200 over H100, a request of Llama-3.1-70B on vLLM", tuple(ratios))


def _profile(llm: str, accelerator: str, gpus: int, origin: str, curve: StepCurve) -> EngineModel:
    room = kv_tokens(LLMS[llm], ACCELERATORS[accelerator], gpus)
    return EngineModel(
        llm, accelerator, gpus, DEFAULT_SLOTS, room, LLMS[llm].kv_bytes_per_token, curve, origin
    )


def _served(rows: list[ServedRow], engine: str, llm: str, accelerator: str) -> list[ServedRow]:
    kind = (engine, llm, accelerator, "")
    return [row for row in rows if (row.engine, row.llm, row.accelerator, row.precision) == kind]


def _degrees(
    curves: dict[KernelSet, DecodeFit], engine: str, llm: str, accelerator: str
) -> dict[int, DecodeFit]:
    kind = (engine, llm, accelerator)
    return {
        key.gpus: curve
        for key, curve in curves.items()
        if (key.engine, key.llm, key.accelerator) == kind
    }


def _contexts(points: list[DecodePoint]) -> int:
    return len({point.kv_tokens / point.batch for point in points})


def _order(fitted: FittedEngine) -> tuple[str, str, float, int]:
    profile = fitted.profile
    return fitted.engine, profile.accelerator, LLMS[profile.llm].parameters, profile.gpus


def serving_curve(
    kernels: DecodeFit, level: ServingLevel, llm: Llm, card: Accelerator, gpus: int
) -> StepCurve:
    """The curve of a whole engine on the card that its kernels were measured on."""
    sizes = np.array(kernels.batch_sizes)
    steps = level.steps_s(np.array(kernels.step_s), sizes, llm)
    return _curve(
        sizes, steps, level.kernel_factor * kernels.per_kv_token_s, level, llm, card, gpus
    )


def derived_curve(
    kernels: DecodeFit,
    level: ServingLevel,
    llm: Llm,
    measured: Accelerator,
    card: Accelerator,
    gpus: int,
) -> StepCurve:
    """The curve of a whole engine on `card`, from kernels that were measured on `measured`."""
    slower = measured.memory_bytes_per_s / card.memory_bytes_per_s
    compute_s = level.compute * llm.token_flops / (gpus * card.bf16_flops)
    link_s = (
        level.link
        * llm.reduced_bytes(gpus)
        * (1.0 / card.link_bytes_per_s - 1.0 / measured.link_bytes_per_s)
    )
    sizes = np.array(kernels.batch_sizes)
    memory_s = slower * level.kernel_factor * np.array(kernels.step_s)
    sizes, memory_s = _with_crossings(sizes, memory_s, compute_s)
    kernels_s = np.maximum(memory_s, compute_s * sizes) + link_s * sizes
    steps = kernels_s + level.layer_s * llm.layers + level.sequence_s * sizes
    return _curve(
        sizes, steps, slower * level.kernel_factor * kernels.per_kv_token_s, level, llm, card, gpus
    )


def _with_crossings(sizes: Array, times: Array, slope: float) -> tuple[Array, Array]:
    """Add a knot wherever the curve crosses slope * size, so that the larger of the two has all its
    corners."""
    above = times - slope * sizes
    crossings = [
        low + (high - low) * left / (left - right)
        for low, high, left, right in zip(sizes, sizes[1:], above, above[1:], strict=False)
        if left * right < 0
    ]
    more = np.sort(np.concatenate([sizes, crossings]))
    return more, np.interp(more, sizes, times)


def _curve(
    sizes: Array,
    steps: Array,
    kv_token_s: float,
    level: ServingLevel,
    llm: Llm,
    card: Accelerator,
    gpus: int,
) -> StepCurve:
    return StepCurve(
        batch_sizes=tuple(float(size) for size in sizes),
        step_s=tuple(float(step) for step in steps),
        per_kv_token_s=kv_token_s,
        prefill_fixed_s=FIXED_SHARE_OF_STEP * float(steps[0]),
        prefill_token_s=level.prefill_token_s(llm, card, gpus),
        prefill_pair_s=level.prefill_pair_s(llm, card, gpus),
    )
