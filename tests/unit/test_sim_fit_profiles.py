"""What is shipped, and what comes of a profile that somebody measured."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from treadle_cli.app import app
from treadle_sim.engine_model import (
    EngineModel,
    UnknownEngineError,
    engine_model,
    parse_profiles,
    profiles,
    render_profiles,
)
from treadle_sim.fitting import MeasuredProfileError, fit_measured
from typer.testing import CliRunner

SHIPPED = profiles()


@pytest.mark.parametrize("profile", SHIPPED, ids=lambda p: f"{p.llm}-{p.accelerator}x{p.gpus}")
def test_a_shipped_step_grows_with_batch_and_prefill_with_tokens(profile: EngineModel) -> None:
    steps = [profile.curve.decode_s(batch) for batch in range(1, 300)]
    assert all(low <= high for low, high in itertools.pairwise(steps))
    assert steps[0] < steps[-1]
    assert profile.curve.per_kv_token_s > 0
    assert (
        profile.curve.prefill_s(100, 0)
        < profile.curve.prefill_s(1000, 0)
        < profile.curve.prefill_s(1000, 9000)
    )


@pytest.mark.parametrize(
    ("llm", "accelerator"),
    list(
        itertools.product(("Qwen3-8B", "Qwen3-14B", "Qwen3-32B"), ("H100", "H200", "H800", "H20"))
    ),
)
def test_more_gpus_are_faster_but_less_than_in_proportion(llm: str, accelerator: str) -> None:
    engines = [engine_model(llm, accelerator, gpus) for gpus in (1, 2, 4, 8)]
    for few, many in itertools.pairwise(engines):
        for batch in (1, 16):
            assert (
                few.curve.decode_s(batch) / 2
                < many.curve.decode_s(batch)
                < few.curve.decode_s(batch)
            )
        assert (
            few.curve.prefill_s(8192, 0) / 2
            < many.curve.prefill_s(8192, 0)
            < few.curve.prefill_s(8192, 0)
        )
        assert many.kv_tokens > 2 * few.kv_tokens


def test_what_is_shipped_is_what_data_sheets_lead_to_expect() -> None:
    """Qwen3-14B on one H200: 29.5 GB at 4.8 TB/s are 6.2 ms."""
    assert 0.0062 < engine_model("Qwen3-14B", "H200", 1).curve.decode_s(1) < 1.5 * 0.0062
    assert engine_model("Qwen3-32B", "H100", 1).kv_tokens == 0, "the weights do not fit"
    assert engine_model("Qwen3-32B", "H100", 2).kv_tokens > 0
    assert {profile.accelerator for profile in SHIPPED if profile.origin == "derived"} == {
        "H800",
        "H20",
    }
    compute, bandwidth = (engine_model("Qwen3-14B", card, 1).curve for card in ("H800", "H20"))
    assert bandwidth.decode_s(8) < compute.decode_s(8)
    assert bandwidth.prefill_s(4096, 0) > 4 * compute.prefill_s(4096, 0)


def test_an_engine_that_is_not_shipped_is_named_beside_those_that_are() -> None:
    with pytest.raises(UnknownEngineError, match=r"Qwen3-14B on 3 H100; .*Qwen3-14B on H100 x4"):
        engine_model("Qwen3-14B", "H100", 3)
    with pytest.raises(ValueError, match="0 slots"):
        engine_model("Qwen3-14B", "H100", 1, slots=0)


def test_a_rendered_profile_reads_back() -> None:
    mine = [profile for profile in SHIPPED if profile.accelerator == "H100"]
    assert parse_profiles(json.loads(json.dumps(render_profiles("H100", mine)))) == tuple(mine)


def measured(**changes: Any) -> dict[str, Any]:
    decode = [
        {
            "batch": batch,
            "kv_tokens": batch * context,
            "step_s": 0.05 + 0.004 * batch + 1e-6 * batch * context,
        }
        for batch, context in itertools.product((1, 2, 4, 8), (100, 1000))
    ]
    prefill = [
        {"new_tokens": new, "cached_tokens": cached, "seconds": 0.02 + 0.001 * new}
        for new, cached in itertools.product((64, 512), (0, 512))
    ]
    engine = {"accelerator": "cpu", "llm": "small", "gpus": 1, "slots": 8, "kv_tokens": 2e4}
    return {**engine, "decode": decode, "prefill": prefill, **changes}


def test_an_engine_comes_back_from_what_was_measured_on_it() -> None:
    fit = fit_measured(measured())
    assert fit.engine.curve.decode_s(3) == pytest.approx(0.062, rel=1e-6)
    assert fit.engine.curve.per_kv_token_s == pytest.approx(1e-6, rel=1e-6)
    assert fit.engine.curve.prefill_s(256, 100) == pytest.approx(0.276, rel=1e-6)
    assert (fit.engine.slots, fit.engine.kv_tokens, fit.engine.name) == (8, 20_000, "small-cpux1")
    without = fit_measured(measured(prefill=[])).engine.curve
    assert without.prefill_s(256, 0) == without.decode_s(1) + 256 * without.per_kv_token_s, (
        "as a decode step at least"
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"decode": []}, "decode: must have at least 1 item"),
        ({"decode": {"batch": 1}}, "decode: must be a valid tuple"),
        (
            {"decode": [{"batch": 0, "kv_tokens": 0, "step_s": 1.0}]},
            r"decode\[0\].batch: must be .* to 1, is 0",
        ),
        ({"decode": [{"batch": 1, "kv_tokens": 0, "step_s": 0}]}, "step_s: must be greater than 0"),
        (
            {"decode": [{"batch": 1, "kv_tokens": 0, "step_s": float("nan")}]},
            "step_s: must be a finite number",
        ),
        ({"prefill": [{"new_tokens": 5, "seconds": 1.0}]}, "cached_tokens: is missing"),
        ({"slots": True}, "slots: must be a valid integer, is True"),
        ({"llm": ""}, "llm: must have at least 1 character"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_by_the_field(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(MeasuredProfileError, match=named):
        fit_measured(measured(**changes))


def test_the_command_fits_a_profile_and_draws_it(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(measured()))
    result = CliRunner().invoke(
        app, ["fit", "--profile", str(tmp_path / "mine.json"), "--out", str(tmp_path / "out")]
    )
    assert "1000.0 ns" in result.stdout and "decode error" in result.stdout
    written = json.loads((tmp_path / "out" / "mine-fit.json").read_text())
    assert written["engine"]["curve"]["per_kv_token_s"] == pytest.approx(1e-6)
    assert (tmp_path / "out" / "mine-fit.png").stat().st_size > 10_000
