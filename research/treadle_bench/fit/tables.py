"""Reads the public engine measurements that curves are fitted from; research/README.md names their
sources.

Times become seconds. Rows that contradict themselves are left out, each kind with its reason.
"""

import csv
import gzip
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treadle_cli.exits import UsageProblem
from treadle_sim.fitting import DecodePoint, PrefillPoint

KERNELS = Path("engine_aiconfigurator/DERIVED_decode_ms_per_token.csv.gz")
SERVED = Path("engine_aiconfigurator/silicon_e2e_ttft_tpot.csv.gz")
SPLITWISE = Path("engine_splitwise/perf_model.csv.gz")
SERVED_COLUMNS = (
    "backend model_path system precision mode isl osl batch_size tp_size pp_size "
    "silicon_ttft_ms silicon_tpot_ms"
)
SPLITWISE_COLUMNS = (
    "model hardware tensor_parallel batch_size prompt_size token_size prompt_time token_time"
)

ACCELERATOR_OF = {
    "a100_sxm": "A100",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "a100-80gb": "A100",
    "h100-80gb": "H100",
}
LARGEST_ENGINE = 8  # cards of one engine; rows with more come from an odd mapping of the source


class FitDataError(UsageProblem):
    """A table of measurements is missing or does not have the columns that it should."""


@dataclass(frozen=True, slots=True)
class KernelSet:
    """Which engine the kernels of a decode curve belong to."""

    accelerator: str
    engine: str
    llm: str
    gpus: int


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A whole engine, measured: `batch` requests at a time of `prompt_tokens` and `gen_tokens`;
    mean seconds to the first token and between tokens. precision: as the source writes it, "" where
    weights are bf16."""

    engine: str
    llm: str
    accelerator: str
    precision: str
    gpus: int
    batch: int
    prompt_tokens: int
    gen_tokens: int
    first_token_s: float
    token_s: float

    @property
    def request_s(self) -> float:
        """From a request's arrival to its last token."""
        return self.first_token_s + (self.gen_tokens - 1) * self.token_s


def read_kernels(data: Path) -> dict[KernelSet, list[DecodePoint]]:
    """Decode steps composed of measured kernels. Raises FitDataError."""
    found: dict[KernelSet, list[DecodePoint]] = defaultdict(list)
    for row in _rows(data / KERNELS, "system engine model tp batch context ms_per_token"):
        accelerator = ACCELERATOR_OF.get(row["system"])
        if accelerator is not None:
            batch, context = int(row["batch"]), int(row["context"])
            key = KernelSet(accelerator, row["engine"], row["model"], int(row["tp"]))
            found[key].append(DecodePoint(batch, batch * context, float(row["ms_per_token"]) / 1e3))
    return dict(found)


def read_served(data: Path) -> list[ServedRow]:
    """Engines measured whole, prefill and decode in one, one replica without pipeline stages.
    Raises FitDataError."""
    return [
        ServedRow(
            engine=row["backend"],
            llm=row["model_path"].rpartition("/")[2].removesuffix("-Instruct"),
            accelerator=ACCELERATOR_OF[row["system"]],
            precision=row["precision"],
            gpus=int(float(row["tp_size"])),
            batch=int(float(row["batch_size"])),
            prompt_tokens=int(row["isl"]),
            gen_tokens=int(row["osl"]),
            first_token_s=float(row["silicon_ttft_ms"]) / 1e3,
            token_s=float(row["silicon_tpot_ms"]) / 1e3,
        )
        for row in _rows(data / SERVED, SERVED_COLUMNS)
        if row["mode"] == "agg"
        and row["system"] in ACCELERATOR_OF
        and row["tp_size"]
        and float(row["tp_size"]) <= LARGEST_ENGINE
        and float(row["pp_size"] or 1) == 1
    ]


def read_splitwise(
    data: Path,
) -> dict[tuple[str, int], tuple[list[DecodePoint], list[PrefillPoint]]]:
    """Llama-2-70B by (accelerator, cards): its steps and its prefills. Raises FitDataError.

    Left out: the power-capped rows, which repeat the others' times; batch 64 on two cards, whose
    prompts would take less time than a quarter of them do (they did not fit); prefills of several
    prompts, which that engine runs in passes of its own choice.
    """
    steps: dict[tuple[str, int], list[DecodePoint]] = defaultdict(list)
    prefills: dict[tuple[str, int], list[PrefillPoint]] = defaultdict(list)
    for row in _rows(data / SPLITWISE, SPLITWISE_COLUMNS):
        accelerator = ACCELERATOR_OF.get(row["hardware"])
        gpus, batch = int(row["tensor_parallel"]), int(row["batch_size"])
        if row["model"] != "llama2-70b" or accelerator is None or (gpus == 2 and batch == 64):
            continue
        prompt, gen = int(row["prompt_size"]), int(row["token_size"])
        # token_time is a mean over the answer, at whose middle the context is this
        context = prompt + gen / 2
        steps[accelerator, gpus].append(
            DecodePoint(batch, batch * context, float(row["token_time"]) / 1e3)
        )
        if batch == 1:
            prefills[accelerator, gpus].append(
                PrefillPoint(prompt, 0, float(row["prompt_time"]) / 1e3)
            )
    return {key: (steps[key], prefills[key]) for key in sorted(steps)}


def _rows(path: Path, columns: str) -> Iterator[dict[str, str]]:
    try:
        with gzip.open(path, "rt", newline="") as file:
            reader = csv.DictReader(file)
            missing = set(columns.split()) - set(reader.fieldnames or ())
            if missing:
                raise FitDataError(f"{path} has no column {', '.join(sorted(missing))}")
            yield from reader
    except FileNotFoundError as error:
        raise FitDataError(
            f"no {path}: --data takes the folder that holds engine_aiconfigurator/"
        ) from error
    except (gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise FitDataError(f"{path} is not gzipped CSV") from error
