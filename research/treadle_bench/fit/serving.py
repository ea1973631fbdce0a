"""Fits what whole engines add to kernels (sampling, norms, scheduler, gaps between launches), and
what prefill costs.

The data are engines that were measured whole. Whatever the order in which such an engine takes
prompts and steps, a request there lasts for its own decode steps and for one prefill of each of the
`batch` requests that are served at a time (each request that leaves makes room for one prompt). So,
with n = gen_tokens - 1 steps at the mean context of the answer,

    request_s = n * (kernel_factor * kernels(batch, kv) + layer_s * layers + sequence_s * batch)
              + batch * (compute * flops / peak + link * reduced bytes / link speed + pair *
              attention flops / peak)

which is linear in its six coefficients. Time to first token and time between tokens alone depend on
that order; their sum over a request does not, which is why it is fitted. Rows whose requests do not
fit the KV cache together are left out: they wait for room, which is no cost of a step.

Accelerators and language models are as data sheets give them. Peaks are dense bf16 without
sparsity. Memory counts in 1e9 bytes, a little less than the card holds (an H100 of 80 GB reports
85.5e9 bytes): the engine's context, CUDA graphs and fragments take the difference.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
from treadle_sim.fitting import Array, DecodeFit, FitError, fit_relative, held_out_errors

from treadle_bench.fit.tables import ServedRow

BF16_BYTES = 2
# Share of the memory that the engine takes for weights and KV, SGLang's --mem-fraction-static on
# large cards.
MEMORY_FRACTION = 0.88
# A rollout cannot use an engine without room for the KV of one trajectory at the papers' cap of 40K
# tokens.
LEAST_KV_TOKENS = 40_960


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One card: bytes of memory, bytes/s of memory, bf16 FLOP/s, and bytes/s to its peers in one
    direction."""

    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    bf16_flops: float
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Llm:
    """A dense decoder with grouped-query attention; parameters include the embeddings."""

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights in bf16."""
        return self.parameters * BF16_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of all layers in bf16, over all cards of an engine."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BF16_BYTES

    @property
    def token_flops(self) -> float:
        """FLOPs of one token through the weights."""
        return 2.0 * self.parameters

    @property
    def pair_flops(self) -> float:
        """FLOPs of attention between a token and an earlier one: scores and values, a multiply and
        an add each."""
        return 4.0 * self.layers * self.heads * self.head_dim

    def reduced_bytes(self, gpus: int) -> float:
        """Bytes that each card sends to its peers for one token: two ring all-reduces a layer."""
        return 2.0 * self.layers * self.hidden * BF16_BYTES * 2.0 * (gpus - 1) / gpus


ACCELERATORS = {
    card.name: card
    for card in (
        Accelerator("A100", 80e9, 2.04e12, 312e12, 300e9),
        Accelerator("H100", 80e9, 3.35e12, 989e12, 450e9),
        Accelerator("H200", 141e9, 4.8e12, 989e12, 450e9),
        # an H100 whose NVLink is cut to 400 GB/s both ways
        Accelerator("H800", 80e9, 3.35e12, 989e12, 200e9),
        Accelerator("H20", 96e9, 4.0e12, 148e12, 450e9),
    )
}
LLMS = {
    llm.name: llm
    for llm in (
        Llm("Qwen3-8B", 8.19e9, 36, 4096, 32, 8, 128),
        Llm("Qwen3-14B", 14.77e9, 40, 5120, 40, 8, 128),
        Llm("Qwen3-32B", 32.76e9, 64, 5120, 64, 8, 128),
        Llm("Llama-2-70B", 68.98e9, 80, 8192, 64, 8, 128),
        Llm("Llama-3.1-70B", 70.55e9, 80, 8192, 64, 8, 128),
        Llm("Llama-3.1-8B", 8.03e9, 32, 4096, 32, 8, 128),
    )
}


def kv_tokens(llm: Llm, accelerator: Accelerator, gpus: int) -> int:
    """Tokens of KV that fit beside the weights on `gpus` cards; 0 where fewer than LEAST_KV_TOKENS
    would."""
    free = MEMORY_FRACTION * accelerator.memory_bytes * gpus - llm.weight_bytes
    tokens = int(free // llm.kv_bytes_per_token)
    return tokens if tokens >= LEAST_KV_TOKENS else 0


@dataclass(frozen=True, slots=True)
class ServingLevel:
    """What one engine software adds to kernels and pays for prefill.

    kernel_factor: of kernel time, below 1 if kernels run faster one after another than when each is
    measured alone. layer_s: a step's fixed seconds for each layer. sequence_s: a step's seconds for
    each sequence. compute, link, pair: how many times longer than its peak the hardware takes for a
    prefill's weights, all-reduces and attention.
    """

    kernel_factor: float
    layer_s: float
    sequence_s: float
    compute: float
    link: float
    pair: float

    def steps_s(self, kernels_s: Array, batch: Array, llm: Llm) -> Array:
        """Seconds of whole steps from seconds of their kernels."""
        return np.asarray(
            self.kernel_factor * kernels_s + self.layer_s * llm.layers + self.sequence_s * batch
        )

    def prefill_token_s(self, llm: Llm, accelerator: Accelerator, gpus: int) -> float:
        """Seconds for each new token, attention aside."""
        compute = llm.token_flops / (gpus * accelerator.bf16_flops)
        return (
            self.compute * compute
            + self.link * llm.reduced_bytes(gpus) / accelerator.link_bytes_per_s
        )

    def prefill_pair_s(self, llm: Llm, accelerator: Accelerator, gpus: int) -> float:
        """Seconds for each pair of a new token and one before it."""
        return self.pair * llm.pair_flops / (gpus * accelerator.bf16_flops)

    def request_s(self, rows: Sequence[ServedRow], curves: Sequence[DecodeFit], llm: Llm) -> Array:
        """Predicted seconds of a request of each row, on the row's own accelerator and with its
        kernels' curve."""
        return np.asarray(_design(rows, curves, llm) @ np.array(astuple(self)))


@dataclass(frozen=True, slots=True)
class ServingFit:
    """A level, the rows that it was fitted on, and its errors with one degree, batch or prompt size
    unseen.

    steps: of decode steps alone, from answers of different lengths to the same prompts; held out by
    degree.
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
    """Fit the level of one engine, model and accelerator; `curves` by degree. Raises ValueError for
    no usable rows."""
    used = [row for row in rows if row.gpus in curves and has_room(row)]
    if not used:
        raise ValueError("no measured engine has both kernels and room for its requests")
    llm = LLMS[used[0].llm]
    request_s = np.array([row.request_s for row in used])
    matrix = _design(used, [curves[row.gpus] for row in used], llm) / request_s[:, None]

    best, errors = fit_relative(matrix)
    unseen_gpus = held_out_errors(matrix, [row.gpus for row in used])
    return ServingFit(
        engine=used[0].engine,
        llm=llm.name,
        accelerator=used[0].accelerator,
        rows=tuple(used),
        predicted_s=tuple(float(value) for value in (errors + 1.0) * request_s),
        left_out=len(rows) - len(used),
        level=ServingLevel(*(float(value) for value in best)),
        unseen_gpus=FitError.of(errors, unseen_gpus),
        unseen_batch=FitError.of(errors, held_out_errors(matrix, [row.batch for row in used])),
        unseen_prompt=FitError.of(
            errors, held_out_errors(matrix, [row.prompt_tokens for row in used])
        ),
        steps=FitError.of(_step_errors(used, errors), _step_errors(used, unseen_gpus)),
    )


def has_room(row: ServedRow) -> bool:
    """Whether the row's requests fit the KV cache together."""
    room = kv_tokens(LLMS[row.llm], ACCELERATORS[row.accelerator], row.gpus)
    return row.batch * (row.prompt_tokens + row.gen_tokens) <= room


def _design(rows: Sequence[ServedRow], curves: Sequence[DecodeFit], llm: Llm) -> Array:
    """Seconds of a request for each unit of a level's coefficients, in the order of its fields:
    (rows, 6)."""
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
    """Relative errors of a step alone: of the time that a longer answer takes beyond a shorter one,
    all else equal."""
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
