"""Reading public measurements, and a fit of all of them from tables that were made to an exact
engine."""

import csv
import gzip
import io
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from treadle_cli.exits import UsageProblem
from treadle_sim.engine_model import StepCurve

from treadle_bench.bench import BenchOptions
from treadle_bench.fit.measure import measure
from treadle_bench.fit.tables import (
    KERNELS,
    SERVED,
    SPLITWISE,
    FitDataError,
    read_served,
    read_splitwise,
)

FACTOR, LAYER_S, SEQUENCE_S, COMPUTE = 0.9, 4e-5, 2e-5, 1.5
LAYERS, TOKEN_FLOPS, FLOPS_PER_S = 64, 2 * 32.76e9, 989e12


def kernels_s(system: str, gpus: int, batch: int, kv: float) -> float:
    """A lane of memory a GPU; H200 is a third faster."""
    scale = (1.0 if system == "h100_sxm" else 0.7) / gpus
    return scale * (0.024 + 2e-6 * batch + 8e-8 * kv)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes(gzip.compress(text.getvalue().encode()))


def served_row(gpus: int, batch: int, prompt: int, gen: int) -> dict[str, Any]:
    kernels = kernels_s("h100_sxm", gpus, batch, batch * (prompt + gen / 2))
    steps = (gen - 1) * (FACTOR * kernels + LAYER_S * LAYERS + SEQUENCE_S * batch)
    prefills_s = batch * prompt * COMPUTE * TOKEN_FLOPS / (gpus * FLOPS_PER_S)
    return {
        "backend": "sglang",
        "model_path": "Qwen/Qwen3-32B",
        "system": "h100_sxm",
        "precision": "",
        "mode": "agg",
        "isl": prompt,
        "osl": gen,
        "batch_size": float(batch),
        "tp_size": float(gpus),
        "pp_size": 1.0,
        "silicon_ttft_ms": 1e3 * prefills_s,
        "silicon_tpot_ms": 1e3 * steps / (gen - 1),
    }


def splitwise_row(gpus: int, batch: int, prompt: int) -> dict[str, Any]:
    return {
        "model": "llama2-70b",
        "hardware": "a100-80gb",
        "tensor_parallel": gpus,
        "batch_size": batch,
        "prompt_size": prompt,
        "token_size": 128,
        "prompt_time": 40 + 0.1 * prompt,
        "token_time": 50 + 0.2 * batch,
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    kernels = [
        {
            "system": system,
            "engine": "sglang",
            "model": "Qwen3-32B",
            "tp": gpus,
            "batch": batch,
            "context": context,
            "ms_per_token": 1e3 * kernels_s(system, gpus, batch, batch * context),
        }
        for system, gpus, batch, context in product(
            ("h100_sxm", "h200_sxm"), (2, 4), (1, 8, 64, 256), (1024, 4096, 8192)
        )
    ]
    odd = {**kernels[0], "model": "Qwen3-14B"}
    write(tmp_path / KERNELS, [*kernels, odd])
    served = [
        served_row(*shape) for shape in product((2, 4), (8, 16, 32), (1024, 2048, 4096), (128, 512))
    ]
    write(
        tmp_path / SERVED,
        [
            *served,
            {**served[0], "tp_size": 64.0},
            {**served[0], "mode": "disagg"},
            {**served[0], "system": "b200_sxm"},
        ],
    )
    shapes = [(1, 512), (1, 2048), (1, 8192), (8, 512), (32, 512), (64, 512)]
    write(tmp_path / SPLITWISE, [splitwise_row(2, batch, prompt) for batch, prompt in shapes])
    return tmp_path


def test_rows_of_impossible_engines_and_of_other_deployments_are_not_read(data: Path) -> None:
    rows = read_served(data)
    assert len(rows) == 36
    assert {row.gpus for row in rows} == {2, 4}
    (steps, prefills) = read_splitwise(data)["A100", 2]
    assert {point.batch for point in steps} == {1, 8, 32}
    assert [point.new_tokens for point in prefills] == [512, 2048, 8192]


def quietly(data: Path, out: Path | None = None) -> BenchOptions:
    profiles = out / "profiles" if out is not None else None
    return BenchOptions(data=data, pictures=out, profiles=profiles, progress=Console(quiet=True))


async def test_the_engine_behind_the_tables_is_found_printed_written_and_drawn(
    data: Path, tmp_path: Path
) -> None:
    """The fit reads kernels and requests of one card, and makes the engines of two measured cards
    and of two that nobody measured.

    Result: exact on both degrees; the model with one context is named as not fitted; everything
    asked for is there.
    """
    out = tmp_path / "out"
    figures = await measure(quietly(data, out))
    (served,) = [each for each in figures["served"] if each["engine"] == "sglang"]
    assert served["level"]["kernel_factor"] == pytest.approx(FACTOR, rel=1e-3)
    assert served["level"]["layer_s"] == pytest.approx(LAYER_S, rel=1e-2)
    assert served["request_error_unseen_gpus"]["held_out_p90"] < 0.01
    found = {
        (each["accelerator"], each["gpus"]): each
        for each in figures["engines"]
        if each["engine"] == "sglang"
    }
    assert {key: engine["origin"] for key, engine in found.items() if key[1] == 2} == {
        ("H100", 2): "fitted",
        ("H200", 2): "transferred",
        ("H800", 2): "derived",
        ("H20", 2): "derived",
    }
    expected = FACTOR * kernels_s("h200_sxm", 4, 8, 0.0) + LAYER_S * LAYERS + SEQUENCE_S * 8
    assert StepCurve(**found["H200", 4]["curve"]).decode_s(8) == pytest.approx(expected, rel=1e-3)
    assert figures["skipped"] == ["Qwen3-14B on H100 x2 (sglang), 1 context length(s)"]
    page = (out / "fit.md").read_text()
    assert "Qwen3-32B, H200 x4" in page and "derived |" not in page
    assert (out / "fit.png").stat().st_size > 10_000
    written = sorted(file.stem for file in (out / "profiles").iterdir())
    assert written == ["a100", "h100", "h20", "h200", "h800"]


async def test_a_table_that_is_missing_or_another_is_named(data: Path) -> None:
    (data / SPLITWISE).write_bytes(b"model,hardware\n")
    with pytest.raises(FitDataError, match="not gzipped"):
        read_splitwise(data)
    write(data / SPLITWISE, [{"model": "x", "hardware": "y"}])
    with pytest.raises(FitDataError, match="no column batch_size"):
        read_splitwise(data)
    (data / SPLITWISE).unlink()
    with pytest.raises(UsageProblem, match=r"no .*perf_model.csv.gz"):
        await measure(quietly(data))


async def test_it_needs_the_folder_of_measurements() -> None:
    with pytest.raises(UsageProblem, match="needs --data"):
        await measure(BenchOptions())
