"""Fit decode and prefill curves to measured steps, with their errors, and an engine from a measured
profile.

All fits are least squares of the relative error without negative coefficients, so that no larger
batch and no longer context is ever predicted to be faster. A decode curve is piecewise linear in
the batch, plus a term for each KV token read; measured batch sizes become its knots one after
another, as long as each lowers the held-out error. A prefill costs a fixed part, a part for each
new token, one for each pair of a new token and one before it, and one for each pair of any two
tokens, for attention that computes the queries of cached tokens too.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from treadle_core.engine_queue.pace import non_negative_least_squares

from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.workloads.workload import Count, FiniteNumber, Name, PositiveCount, describe_first

Array = npt.NDArray[np.float64]

FOLDS = 5
# A further knot has to lower the held-out mean square error by this share; less is noise of the
# folds.
KNOT_GAIN = 0.05
MOST_KNOTS = 6


@dataclass(frozen=True, slots=True)
class FitError:
    """Error of a fit, |predicted / measured - 1|: median and 90th percentile, in sample and held
    out."""

    points: int
    median: float
    p90: float
    held_out_median: float
    held_out_p90: float

    @classmethod
    def of(cls, seen: Array, held_out: Array) -> Self:
        """Return the error from the relative errors (signed or not) of the same points, fitted with
        them and without them."""
        near, far = np.abs(seen), np.abs(held_out)
        return cls(
            points=int(near.size),
            median=float(np.median(near)),
            p90=float(np.quantile(near, 0.9)),
            held_out_median=float(np.median(far)),
            held_out_p90=float(np.quantile(far, 0.9)),
        )


def fit_relative(matrix: Array) -> tuple[Array, Array]:
    """Fit a linear model whose rows were divided by the measured value, so that all targets are 1;
    return its coefficients and relative errors."""
    terms = non_negative_least_squares(matrix, np.ones(len(matrix)))
    return terms, matrix @ terms - 1.0


def held_out_errors(matrix: Array, groups: Sequence[Hashable]) -> Array:
    """Return the relative errors (rows,) of `fit_relative`, each row by a fit without the rows of
    its group; in sample if there is only one group."""
    if len(set(groups)) < 2:
        return fit_relative(matrix)[1]
    errors = np.zeros(len(matrix))
    for group in dict.fromkeys(groups):
        out = np.array([label == group for label in groups])
        errors[out] = matrix[out] @ fit_relative(matrix[~out])[0] - 1.0
    return errors


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """Measured step: sequences, KV tokens of all of them together, seconds."""

    batch: Annotated[FiniteNumber, Field(ge=1)]
    kv_tokens: Annotated[FiniteNumber, Field(ge=0)]
    step_s: Annotated[FiniteNumber, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class DecodeFit:
    """Fitted decode curve: step_s at each of batch_sizes with no KV, seconds for each KV token, and
    the error."""

    batch_sizes: tuple[float, ...]
    step_s: tuple[float, ...]
    per_kv_token_s: float
    error: FitError

    def predict(self, batch: Array, kv_tokens: Array) -> Array:
        """Return the seconds of steps within the measured batch sizes."""
        return np.asarray(
            np.interp(batch, self.batch_sizes, self.step_s) + self.per_kv_token_s * kv_tokens
        )


def fit_decode(points: Sequence[DecodePoint]) -> DecodeFit:
    """Return the curve of least relative error. Raises ValueError for no points or a time that is
    not positive."""
    if not points or any(point.step_s <= 0 or point.batch < 1 for point in points):
        raise ValueError("a decode curve needs steps of at least one sequence that took time")
    ordered = sorted(points, key=lambda point: (point.batch, point.kv_tokens))
    batch = np.array([point.batch for point in ordered])
    kv_tokens = np.array([point.kv_tokens for point in ordered])
    step_s = np.array([point.step_s for point in ordered])
    # Repeats of one measurement share a cell, so that they are held out together.
    numbers: dict[tuple[float, float], int] = {}
    cells = [numbers.setdefault((point.batch, point.kv_tokens), len(numbers)) for point in ordered]

    def design(knots: Sequence[float]) -> Array:
        """Return the columns of the fit: the step at the first knot, the rise from each knot to the
        next, KV tokens."""
        rises = [np.clip((batch - low) / (high - low), 0.0, 1.0) for low, high in pairwise(knots)]
        return np.asarray(
            np.column_stack([np.ones_like(batch), *rises, kv_tokens]) / step_s[:, None]
        )

    def loss(knots: set[float]) -> float:
        folds = [cell % FOLDS for cell in cells]
        return float(np.mean(held_out_errors(design(sorted(knots)), folds) ** 2))

    sizes = [float(size) for size in np.unique(batch)]
    chosen = {sizes[0], sizes[-1]}
    best = loss(chosen)
    while len(chosen) < MOST_KNOTS:
        tried = [(loss(chosen | {size}), size) for size in sizes if size not in chosen]
        if not tried or min(tried)[0] > (1.0 - KNOT_GAIN) * best:
            break
        best, size = min(tried)
        chosen.add(size)
    matrix = design(sorted(chosen))
    coefficients, errors = fit_relative(matrix)
    return DecodeFit(
        batch_sizes=tuple(sorted(chosen)),
        step_s=tuple(float(step) for step in np.cumsum(coefficients[:-1])),
        per_kv_token_s=float(coefficients[-1]),
        error=FitError.of(errors, held_out_errors(matrix, cells)),
    )


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Measured prefill: tokens computed, tokens before them that were in the cache, seconds."""

    new_tokens: Annotated[FiniteNumber, Field(ge=1)]
    cached_tokens: Annotated[FiniteNumber, Field(ge=0)]
    seconds: Annotated[FiniteNumber, Field(gt=0)]


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Fitted prefill time: fixed_s + token_s * p + pair_s * p * (c + p / 2) + square_s * (c + p)^2
    for p new tokens behind c cached ones."""

    fixed_s: float
    token_s: float
    pair_s: float
    square_s: float
    error: FitError


def fit_prefill(points: Sequence[PrefillPoint]) -> PrefillFit:
    """Return the terms of least relative error. Raises ValueError for no points, or one without
    tokens or time."""
    if not points or any(point.seconds <= 0 or point.new_tokens < 1 for point in points):
        raise ValueError("a prefill's cost needs prefills of at least one token that took time")
    new = np.array([point.new_tokens for point in points])
    cached = np.array([point.cached_tokens for point in points])
    seconds = np.array([point.seconds for point in points])
    # Without a cached token the last two cannot be separated, and pairs of new tokens are what all
    # attention computes.
    square = np.where((cached > 0).any(), (cached + new) ** 2, 0.0)
    matrix = (
        np.column_stack([np.ones_like(new), new, new * (cached + 0.5 * new), square])
        / seconds[:, None]
    )
    terms, errors = fit_relative(matrix)
    # repeats of a prefill are held out together
    shapes = list(zip(new.tolist(), cached.tolist(), strict=True))
    fixed_s, token_s, pair_s, square_s = terms.tolist()
    return PrefillFit(
        fixed_s, token_s, pair_s, square_s, FitError.of(errors, held_out_errors(matrix, shapes))
    )


class MeasuredProfileError(ValueError):
    """A measured profile lacks a field or holds an impossible value; the message names it."""


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """Engine fitted from measurements on it, the measurements, and the errors against them."""

    engine: EngineModel
    decode: tuple[DecodePoint, ...]
    prefill: tuple[PrefillPoint, ...]
    decode_error: FitError
    prefill_error: FitError | None


# Tools that measure write a whole number as 5e5 too.
_Whole = BeforeValidator(
    lambda value: int(value) if isinstance(value, float) and value.is_integer() else value
)


class _MeasuredFile(BaseModel):
    """Profile that was measured on a live engine (sim/README.md, "Profiles")."""

    llm: Name
    accelerator: Name
    gpus: Annotated[PositiveCount, _Whole]
    slots: Annotated[PositiveCount, _Whole]
    kv_tokens: Annotated[Count, _Whole]
    kv_bytes_per_token: Annotated[Count, _Whole] = 0
    page_tokens: Annotated[PositiveCount, _Whole] = 1
    decode: Annotated[tuple[DecodePoint, ...], Field(min_length=1)]
    prefill: tuple[PrefillPoint, ...] = ()


def fit_measured(document: Any) -> MeasuredEngine:
    """Fit a profile that was measured on a live engine, as parsed JSON. A profile without prefills
    gets prefills that cost nothing. Raises MeasuredProfileError."""
    try:
        given = _MeasuredFile.model_validate(document)
    except ValidationError as error:
        raise MeasuredProfileError(": ".join(filter(None, describe_first(error)))) from None
    steps = fit_decode(given.decode)
    prompts = fit_prefill(given.prefill) if given.prefill else None
    terms = (
        (prompts.fixed_s, prompts.token_s, prompts.pair_s, prompts.square_s)
        if prompts
        else (0.0, 0.0, 0.0)
    )
    engine = EngineModel(
        given.llm,
        given.accelerator,
        given.gpus,
        given.slots,
        given.kv_tokens,
        given.kv_bytes_per_token,
        StepCurve(steps.batch_sizes, steps.step_s, steps.per_kv_token_s, *terms),
        "measured on a live engine",
        given.page_tokens,
    )
    return MeasuredEngine(
        engine, given.decode, given.prefill, steps.error, prompts.error if prompts else None
    )
