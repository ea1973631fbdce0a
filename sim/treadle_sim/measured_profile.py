"""A profile that was measured on a live engine, as JSON (sim/README.md, "Profiles"), and the engine fitted from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from treadle_sim.decode_fit import DecodePoint, fit_decode
from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.fit_error import FitError
from treadle_sim.prefill_fit import PrefillPoint, fit_prefill


class MeasuredProfileError(ValueError):
    """A measured profile lacks a field or holds a value that cannot be; the message names it."""


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """An engine fitted from what was measured on it, the measurements, and the errors against them."""

    engine: EngineModel
    decode: tuple[DecodePoint, ...]
    prefill: tuple[PrefillPoint, ...]
    decode_error: FitError
    prefill_error: FitError | None


def fit_measured(document: dict[str, Any]) -> MeasuredEngine:
    """Fits a measured profile; without prefills they cost nothing. Raises MeasuredProfileError."""
    decode = tuple(
        DecodePoint(_number(row, "batch", 1.0), _number(row, "kv_tokens", 0.0), _number(row, "step_s", 0.0, above=True))
        for row in _rows(document, "decode")
    )
    prefill = tuple(
        PrefillPoint(
            _number(row, "new_tokens", 1.0),
            _number(row, "cached_tokens", 0.0),
            _number(row, "seconds", 0.0, above=True),
        )
        for row in _rows(document, "prefill")
    )
    if not decode:
        raise MeasuredProfileError("decode is empty: an engine's profile needs at least one measured step")
    steps = fit_decode(decode)
    prompts = fit_prefill(prefill) if prefill else None
    terms = (prompts.fixed_s, prompts.token_s, prompts.pair_s, prompts.square_s) if prompts else (0.0, 0.0, 0.0)
    accelerator, llm = _text(document, "accelerator"), _text(document, "llm")
    gpus = int(_number(document, "gpus", 1.0))
    engine = EngineModel(
        name=f"{llm}-{accelerator}x{gpus}",
        accelerator=accelerator,
        llm=llm,
        gpus=gpus,
        slots=int(_number(document, "slots", 1.0)),
        kv_tokens=int(_number(document, "kv_tokens", 0.0)),
        kv_bytes_per_token=int(_number({"kv_bytes_per_token": 0, **document}, "kv_bytes_per_token", 0.0)),
        curve=StepCurve(steps.batch_sizes, steps.step_s, steps.per_kv_token_s, *terms),
        hardware_tags=(accelerator,),
        page_tokens=int(_number({"page_tokens": 1, **document}, "page_tokens", 1.0)),
    )
    return MeasuredEngine(engine, decode, prefill, steps.error, prompts.error if prompts else None)


def _rows(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    rows = document.get(key, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise MeasuredProfileError(f"{key} is not a list of objects")
    return rows


def _text(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    if not isinstance(value, str) or not value:
        raise MeasuredProfileError(f"{key} is missing or no text")
    return value


def _number(document: dict[str, Any], key: str, least: float, above: bool = False) -> float:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MeasuredProfileError(f"{key} is missing or no number")
    if value < least or (above and value == least):
        raise MeasuredProfileError(f"{key} is {value}, and must be {'above' if above else 'at least'} {least:g}")
    return float(value)
