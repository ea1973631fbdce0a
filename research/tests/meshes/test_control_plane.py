"""`treadle bench control-plane` without a mesh: its arithmetic, and how it reads an engine."""

import json

import pytest
from support.fake_sglang import FakeSglang, fake_sglang

from treadle_bench.control_plane.measure import ScheduleTimes, StepTime, summarize, time_engine


def test_the_figures_are_medians_of_differences_within_pairs() -> None:
    pairs = [
        (StepTime(0.10, 1.0), StepTime(0.102, 1.02)),
        # a slow moment of the machine: both sides of the pair see it
        (StepTime(0.50, 2.0), StepTime(0.503, 2.02)),
        (StepTime(0.10, 1.0), StepTime(0.101, 1.03)),
    ]
    found = summarize(
        ScheduleTimes([0.001, 0.002, 0.003], [0.01], [1234.56], [0.02], [900.0, 1000.0, 1100.0]),
        pairs,
    )
    assert found["schedule_step_p50_ms"] == 2.0
    assert found["schedule_steps_per_s"] == 1234.6
    assert found["steps_with_facts_per_s"] == 1000.0
    assert found["sidecar_first_token_added_ms"] == 2.0
    assert found["sidecar_step_added_pct"] == pytest.approx(2.0)
    json.dumps(found)


async def test_the_engine_alone_is_timed_to_its_first_and_last_token_and_must_give_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fake_sglang() as engine:
        times = await time_engine(engine.url, [1, 2, 3])
        assert 0 < times.first_token_s <= times.whole_s
        # after its first token
        monkeypatch.setattr(FakeSglang, "_ending", lambda *step: {"type": "stop"})
        with pytest.raises(ValueError, match="gave 1 of 32"):
            await time_engine(engine.url, [1, 2, 3])
