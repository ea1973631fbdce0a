"""Kinds of simulated engine: how long a step takes, how much KV fits, and the shipped profiles.

The simulated engines follow these curves. The planner sees only `StepCurve.linear`, the straight
line that a sidecar would declare, so that a plan is not judged by its own cost model.

`profiles/*.json` holds one file an accelerator, written by `treadle bench fit --data DIR --profiles
FOLDER` (sim/README.md). The `origin` of a profile: `fitted`: kernels and whole engines were
measured on that model and accelerator. `transferred`: its kernels were measured, the overhead of
whole engines comes from another model or accelerator. `derived`: nothing was measured, a roofline
scales another accelerator's curve. `measured`: whole engines were measured.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from treadle_core.model import DecodeCurve

ROUNDING = 1e-9  # a line that rises by no more than this share of a step is flat
ENGINE_FIELDS = ("llm", "gpus", "origin", "kv_tokens", "kv_bytes_per_token")
CURVE_TERMS = ("per_kv_token_s", "prefill_fixed_s", "prefill_token_s", "prefill_pair_s")
DIGITS = 6  # significant digits in a profile: far below any error, and stable between machines
DEFAULT_SLOTS = 100  # sequences that decode at once; Heddle's engines run 100


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Seconds of one decode step of a batch, and of a prefill.

    Decode: the piecewise linear curve through (batch_sizes, step_s), which starts at batch 1 and
    goes on with its last slope, plus per_kv_token_s for each KV token read. Prefill of p new tokens
    behind c cached ones: prefill_fixed_s + prefill_token_s * p + prefill_pair_s * p * (c + p / 2) +
    prefill_square_s * (c + p)^2. A batch pays the fixed part once, and never less than a decode
    step of the same sequences, which reads all weights and all of their KV too. The square is for
    engines whose attention computes the queries of cached tokens again.
    """

    batch_sizes: tuple[float, ...]
    step_s: tuple[float, ...]
    per_kv_token_s: float
    prefill_fixed_s: float
    prefill_token_s: float
    prefill_pair_s: float
    prefill_square_s: float = 0.0

    def decode_s(self, batch: float) -> float:
        """Return the seconds of a step of `batch` sequences that hold no KV."""
        sizes, times = self.batch_sizes, self.step_s
        if len(sizes) > 1 and batch > sizes[-1]:
            return times[-1] + (batch - sizes[-1]) * (times[-1] - times[-2]) / (
                sizes[-1] - sizes[-2]
            )
        return float(np.interp(batch, sizes, times))

    def prefill_s(self, new_tokens: float, cached_tokens: float) -> float:
        """Return the seconds to prefill one sequence; 0 for no new tokens."""
        if new_tokens <= 0:
            return 0.0
        computed_s = self.prefill_computed_s(new_tokens, cached_tokens)
        return self.prefill_batch_s(computed_s, 1, new_tokens + cached_tokens)

    def prefill_computed_s(self, new_tokens: float, cached_tokens: float) -> float:
        """Return the seconds that one sequence adds to its prefill batch."""
        pairs, squares = (
            new_tokens * (cached_tokens + 0.5 * new_tokens),
            (cached_tokens + new_tokens) ** 2,
        )
        return (
            self.prefill_token_s * new_tokens
            + self.prefill_pair_s * pairs
            + self.prefill_square_s * squares
        )

    def prefill_batch_s(self, computed_s: float, sequences: int, kv_tokens: float) -> float:
        """Return the seconds of a prefill batch. computed_s: the sum over its sequences; kv_tokens:
        the sum of their contexts."""
        decode_s = self.decode_s(sequences) + self.per_kv_token_s * kv_tokens
        return max(self.prefill_fixed_s + computed_s, decode_s)

    def linear(self, slots: int) -> DecodeCurve:
        """Return the straight line that planners get: least squares over the batch sizes 1 to
        `slots`."""
        sizes = np.arange(1.0, slots + 1.0)
        times = np.array([self.decode_s(size) for size in sizes])
        slope = float(np.polyfit(sizes, times, 1)[0]) if slots > 1 else 0.0
        slope = slope if slope * slots > ROUNDING * times.max() else 0.0
        base = max(float(times.mean() - slope * sizes.mean()), 1e-6)
        return DecodeCurve(
            base,
            slope,
            self.per_kv_token_s,
            1.0 / self.prefill_token_s if self.prefill_token_s else 0.0,
            self.prefill_pair_s,
        )


@dataclass(frozen=True, slots=True)
class Speculation:
    """Acceptance of drafts that an engine verifies exactly: measured, it does not depend on the
    engine.

    draft_tokens: the lengths of drafts that it may choose from. accepted_tokens: for each of them
    the mean tokens that a verification yields, at least 1, by how many samples of the prompt have
    ended; the last value is of any more.
    """

    draft_tokens: tuple[int, ...]
    accepted_tokens: tuple[tuple[float, ...], ...]

    def accepted(self, drafts: int, siblings: int) -> float:
        """Return the tokens of a step, 1 without drafts."""
        if not drafts:
            return 1.0
        of_siblings = self.accepted_tokens[self.draft_tokens.index(drafts)]
        return of_siblings[min(siblings, len(of_siblings) - 1)]


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Kind of engine: a model on `gpus` accelerators of a kind, tensor parallel.

    slots: sequences that decode at once. kv_tokens: KV that fits beside the weights; 0: the weights
    do not fit. origin: of the curve. page_tokens: the radix cache finds multiples of it.
    host_kv_tokens: copies of contexts that the host's memory holds, 0 for none, read back at
    host_bytes_per_s. speculation: None: it verifies no drafts.
    """

    llm: str
    accelerator: str
    gpus: int
    slots: int
    kv_tokens: int
    kv_bytes_per_token: int
    curve: StepCurve
    origin: str = "measured"
    page_tokens: int = 1
    host_kv_tokens: int = 0
    host_bytes_per_s: float = 50e9  # of a GPU: PCIe 5 x16 reads 50 to 55 GB/s
    speculation: Speculation | None = None

    @property
    def name(self) -> str:
        return f"{self.llm}-{self.accelerator}x{self.gpus}"


class UnknownEngineError(LookupError):
    """No profile is shipped for that model on that many of those accelerators."""


_ENGINES = TypeAdapter(tuple[EngineModel, ...])


@cache
def profiles() -> tuple[EngineModel, ...]:
    """Return all shipped engines, by accelerator, model and degree, with DEFAULT_SLOTS."""
    folder = resources.files("treadle_sim") / "profiles"
    files = sorted(
        (file for file in folder.iterdir() if file.name.endswith(".json")),
        key=lambda file: file.name,
    )
    return tuple(
        profile for file in files for profile in parse_profiles(json.loads(file.read_text()))
    )


def engine_model(llm: str, accelerator: str, gpus: int, slots: int = DEFAULT_SLOTS) -> EngineModel:
    """Return a shipped engine. Raises UnknownEngineError, whose message lists the shipped ones;
    ValueError for no slots."""
    if slots < 1:
        raise ValueError(f"an engine needs at least one slot, not {slots} slots")
    for profile in profiles():
        if (profile.accelerator, profile.llm, profile.gpus) == (accelerator, llm, gpus):
            return replace(profile, slots=slots)
    known = ", ".join(
        sorted({f"{each.llm} on {each.accelerator} x{each.gpus}" for each in profiles()})
    )
    raise UnknownEngineError(f"no profile of {llm} on {gpus} {accelerator}; there are {known}")


def parse_profiles(document: dict[str, Any]) -> tuple[EngineModel, ...]:
    """Return the engines of one file, times in seconds. Raises KeyError or ValueError for another
    shape."""
    common = {"accelerator": document["accelerator"], "slots": DEFAULT_SLOTS}
    return _ENGINES.validate_python(
        [{**common, **engine, "curve": engine} for engine in document["engines"]]
    )


def render_profiles(accelerator: str, engines: list[EngineModel]) -> dict[str, Any]:
    """Return the content of one accelerator's file, times rounded to DIGITS."""

    def rounded(value: float) -> float:
        return float(f"{value:.{DIGITS}g}")

    return {
        "accelerator": accelerator,
        "engines": [
            {
                **{name: getattr(engine, name) for name in ENGINE_FIELDS},
                "batch_sizes": [rounded(size) for size in engine.curve.batch_sizes],
                "step_s": [rounded(step) for step in engine.curve.step_s],
                **{term: rounded(getattr(engine.curve, term)) for term in CURVE_TERMS},
            }
            for engine in engines
        ],
    }
