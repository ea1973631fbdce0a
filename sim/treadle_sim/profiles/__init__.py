"""Engines that were fitted once and are shipped with the simulator: one JSON file an accelerator.

`treadle fit --data DIR --profiles FOLDER` writes these files; sim/README.md says from what. `origin` of a profile:
`fitted`: kernels and whole engines measured on that model and accelerator. `transferred`: its kernels measured, the
level of whole engines taken from another model or accelerator. `derived`: no data, scaled by a roofline from another
accelerator. `measured`: whole engines measured, no kernels needed.

A profile that was measured on a live engine, as JSON (sim/README.md, "Profiles"), and the engine fitted from it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from treadle_sim.engine_model import EngineModel, StepCurve
from treadle_sim.fitting.curves import DecodePoint, FitError, PrefillPoint, fit_decode, fit_prefill

CURVE_TERMS = ("per_kv_token_s", "prefill_fixed_s", "prefill_token_s", "prefill_pair_s")
DIGITS = 6  # significant ones in a file: far below any error, and stable between machines
DEFAULT_SLOTS = 100  # sequences that decode at once; Heddle's engines run 100


class UnknownEngineError(LookupError):
    """No profile is shipped for that model on that many of those accelerators."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One fitted engine and where its figures come from. kv_tokens 0: it does not fit."""

    llm: str
    accelerator: str
    gpus: int
    origin: str
    kv_tokens: int
    kv_bytes_per_token: int
    curve: StepCurve

    def engine(self, slots: int) -> EngineModel:
        """As the simulator takes it."""
        return EngineModel(
            name=f"{self.llm}-{self.accelerator}x{self.gpus}",
            accelerator=self.accelerator,
            llm=self.llm,
            gpus=self.gpus,
            slots=slots,
            kv_tokens=self.kv_tokens,
            kv_bytes_per_token=self.kv_bytes_per_token,
            curve=self.curve,
            hardware_tags=(self.accelerator,),
        )


def profiles() -> list[Profile]:
    """All that are shipped, by accelerator, model and degree."""
    return list(_shipped().values())


def engine_model(llm: str, accelerator: str, gpus: int, slots: int = DEFAULT_SLOTS) -> EngineModel:
    """A shipped engine. Raises UnknownEngineError, which names the ones there are; ValueError for no slots."""
    if slots < 1:
        raise ValueError(f"an engine of {slots} slots")
    found = _shipped().get((accelerator, llm, gpus))
    if found is None:
        known = ", ".join(sorted({f"{p.llm} on {p.accelerator} x{p.gpus}" for p in profiles()}))
        raise UnknownEngineError(f"no profile of {llm} on {gpus} {accelerator}; there are {known}")
    return found.engine(slots)


@cache
def _shipped() -> dict[tuple[str, str, int], Profile]:
    files = sorted(
        (file for file in resources.files(__name__).iterdir() if file.name.endswith(".json")), key=lambda f: f.name
    )
    found = [profile for file in files for profile in parse_profiles(json.loads(file.read_text()))]
    return {(profile.accelerator, profile.llm, profile.gpus): profile for profile in found}


def parse_profiles(document: dict[str, Any]) -> list[Profile]:
    """The engines of one file, times in seconds. Raises KeyError, TypeError or ValueError for another shape."""
    return [
        Profile(
            llm=str(engine["llm"]),
            accelerator=str(document["accelerator"]),
            gpus=int(engine["gpus"]),
            origin=str(engine["origin"]),
            kv_tokens=int(engine["kv_tokens"]),
            kv_bytes_per_token=int(engine["kv_bytes_per_token"]),
            curve=StepCurve(
                batch_sizes=tuple(float(size) for size in engine["batch_sizes"]),
                step_s=tuple(float(step) for step in engine["step_s"]),
                **{term: float(engine[term]) for term in CURVE_TERMS},
            ),
        )
        for engine in document["engines"]
    ]


def render_profiles(accelerator: str, engines: list[Profile]) -> dict[str, Any]:
    """The file that parse_profiles reads, figures rounded to DIGITS."""
    return {
        "accelerator": accelerator,
        "engines": [
            {
                "llm": profile.llm,
                "gpus": profile.gpus,
                "origin": profile.origin,
                "kv_tokens": profile.kv_tokens,
                "kv_bytes_per_token": profile.kv_bytes_per_token,
                "batch_sizes": [_rounded(size) for size in profile.curve.batch_sizes],
                "step_s": [_rounded(step) for step in profile.curve.step_s],
                **{term: _rounded(getattr(profile.curve, term)) for term in CURVE_TERMS},
            }
            for profile in engines
        ],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


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
