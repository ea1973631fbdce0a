"""The level of whole engines: what sampling, norms, scheduler and launch gaps add to kernels, and what prefill costs.

Fitted on engines that were measured whole. A request's life there holds, whatever the order in which the engine takes
prompts and steps, its own decode steps and one prefill of each of the `batch` requests that are served at a time (each
request that leaves makes room for one prompt). So, with n = gen_tokens - 1 steps at the mean context of the answer,

    request_s = n * (kernel_factor * kernels(batch, kv) + layer_s * layers + sequence_s * batch)
              + batch * (compute * flops / peak + link * reduced bytes / link speed + pair * attention flops / peak)

which is linear in its six coefficients. Time to first token and time between tokens alone depend on that order; their
sum over a request does not, which is why it is what is fitted. Rows whose requests do not fit the KV cache together are
left out: they wait for room, which is no cost of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from treadle_sim.fitting.curves import Array, DecodeFit, FitError, held_out, non_negative_least_squares, relative_fit
from treadle_sim.fitting.hardware import ACCELERATORS, LLMS, Accelerator, Llm, kv_tokens
from treadle_sim.fitting.tables import ServedRow


@dataclass(frozen=True, slots=True)
class ServingLevel:
    """What a family of engines adds to kernels and pays for prefill.

    kernel_factor: of kernel time, below 1 where kernels run faster back to back than when each is measured alone.
    layer_s: a step's fixed seconds for each layer. sequence_s: a step's seconds for each sequence. compute, link, pair:
    how many times longer than its peak the hardware takes for a prefill's weights, all-reduces and attention.
    """

    kernel_factor: float
    layer_s: float
    sequence_s: float
    compute: float
    link: float
    pair: float

    def steps_s(self, kernels_s: Array, batch: Array, llm: Llm) -> Array:
        """Seconds of whole steps from seconds of their kernels."""
        return np.asarray(self.kernel_factor * kernels_s + self.layer_s * llm.layers + self.sequence_s * batch)

    def prefill_token_s(self, llm: Llm, accelerator: Accelerator, gpus: int) -> float:
        """Seconds for each new token, attention aside."""
        compute = llm.token_flops / (gpus * accelerator.bf16_flops)
        return self.compute * compute + self.link * llm.reduced_bytes(gpus) / accelerator.link_bytes_per_s

    def prefill_pair_s(self, llm: Llm, accelerator: Accelerator, gpus: int) -> float:
        """Seconds for each pair of a new token and one before it."""
        return self.pair * llm.pair_flops / (gpus * accelerator.bf16_flops)

    def request_s(self, rows: Sequence[ServedRow], curves: Sequence[DecodeFit], llm: Llm) -> Array:
        """Predicted seconds of a request of each row, on the row's own accelerator and with its kernels' curve."""
        return np.asarray(_design(rows, curves, llm) @ np.array(astuple(self)))


@dataclass(frozen=True, slots=True)
class ServingFit:
    """A family's level, the rows that it was fitted on, and its errors with one degree, batch or prompt size unseen.

    steps: of decode steps alone, from answers of different lengths to the same prompts; held out by degree.
    """

    engine: str
    llm: str
    accelerator: str
    rows: tuple[ServedRow, ...]
    predicted_s: tuple[float, ...]
    left_out: int
    level: ServingLevel
    unseen_gpus: FitError
    unseen_batch: FitError
    unseen_prompt: FitError
    steps: FitError


def fit_serving(rows: Sequence[ServedRow], curves: dict[int, DecodeFit]) -> ServingFit:
    """The level of one engine, model and accelerator; `curves` by degree. Raises ValueError for no usable rows."""
    used = [row for row in rows if row.gpus in curves and _has_room(row)]
    if not used:
        raise ValueError("no measured engine has both kernels and room for its requests")
    llm = LLMS[used[0].llm]
    request_s = np.array([row.request_s for row in used])
    matrix = _design(used, [curves[row.gpus] for row in used], llm) / request_s[:, None]

    def unseen(groups: list[int]) -> Array:
        return held_out(groups, relative_fit(matrix), len(used))

    best = non_negative_least_squares(matrix, np.ones(len(used)))
    errors = matrix @ best - 1.0
    unseen_gpus = unseen([row.gpus for row in used])
    return ServingFit(
        engine=used[0].engine,
        llm=llm.name,
        accelerator=used[0].accelerator,
        rows=tuple(used),
        predicted_s=tuple(float(value) for value in (errors + 1.0) * request_s),
        left_out=len(rows) - len(used),
        level=ServingLevel(*(float(value) for value in best)),
        unseen_gpus=FitError.of(errors, unseen_gpus),
        unseen_batch=FitError.of(errors, unseen([row.batch for row in used])),
        unseen_prompt=FitError.of(errors, unseen([row.prompt_tokens for row in used])),
        steps=FitError.of(_step_errors(used, errors), _step_errors(used, unseen_gpus)),
    )


def has_room(rows: Sequence[ServedRow]) -> bool:
    """Whether any row's requests fit the KV cache together, so that a level can be fitted."""
    return any(_has_room(row) for row in rows)


def _has_room(row: ServedRow) -> bool:
    room = kv_tokens(LLMS[row.llm], ACCELERATORS[row.accelerator], row.gpus)
    return row.batch * (row.prompt_tokens + row.gen_tokens) <= room


def _design(rows: Sequence[ServedRow], curves: Sequence[DecodeFit], llm: Llm) -> Array:
    """Seconds of a request for each unit of a level's coefficients, in the order of its fields: (rows, 6)."""
    lines = []
    for row, curve in zip(rows, curves, strict=True):
        card = ACCELERATORS[row.accelerator]
        steps, batch, prompt = row.gen_tokens - 1, row.batch, row.prompt_tokens
        held = batch * (prompt + row.gen_tokens / 2)
        kernels = float(curve.predict(np.array([batch]), np.array([held]))[0])
        flops_per_s = row.gpus * card.bf16_flops
        lines.append(
            (
                steps * kernels,
                steps * llm.layers,
                steps * batch,
                batch * prompt * llm.token_flops / flops_per_s,
                batch * prompt * llm.reduced_bytes(row.gpus) / card.link_bytes_per_s,
                batch * prompt * prompt / 2 * llm.pair_flops / flops_per_s,
            )
        )
    return np.array(lines, dtype=float)


def _step_errors(rows: Sequence[ServedRow], errors: Array) -> Array:
    """Relative errors of a step alone: of the time that a longer answer takes beyond a shorter one, all else equal."""
    kinds: dict[tuple[int, int, int], list[tuple[int, float, float]]] = defaultdict(list)
    for row, error in zip(rows, errors, strict=True):
        kind = (row.gpus, row.batch, row.prompt_tokens)
        kinds[kind].append((row.gen_tokens, row.request_s, row.request_s * (1.0 + float(error))))
    found = []
    for answers in kinds.values():
        (_, short_s, short_predicted_s), (_, long_s, long_predicted_s) = min(answers), max(answers)
        if long_s > short_s:
            found.append((long_predicted_s - short_predicted_s) / (long_s - short_s) - 1.0)
    return np.array(found)
