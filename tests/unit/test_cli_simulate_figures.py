"""What a simulation's figures, sentences and pictures are made of."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from treadle_cli.simulate.comparison import (
    Bound,
    Comparison,
    Row,
    choose_systems,
    compare,
    count_once_tokens,
    sort_longest_first,
)
from treadle_cli.simulate.output import describe
from treadle_cli.simulate.pictures import average_cells, make_scene
from treadle_cli.simulate.request import DEFAULT_SYSTEMS, Request, SimulationPlan, make_plan
from treadle_sim.systems import SYSTEMS, Run, Setting, System, simulate

ASKED = Request(
    workload="coding",
    llm="Qwen3-14B",
    accelerator="H200",
    gpus=2,
    slots=4,
    prompts=3,
    samples=4,
    systems="verl,treadle,oracle",
    degrees="best",
    predictor="noisy",
    seed=0,
    repeats=1,
    profile=None,
)


@cache
def compared(asked: Request) -> tuple[SimulationPlan, Comparison]:
    chosen = make_plan(asked)
    runs = {
        system.name: [simulate_best(system, setting) for setting in chosen.settings]
        for system in chosen.systems
    }
    return chosen, compare(chosen.systems, chosen.settings, runs)


def simulate_best(system: System, setting: Setting) -> Run:
    degrees = [0] if system.allocated else setting.degrees()
    return min(
        (simulate(system, setting, each) for each in degrees),
        key=lambda run: run.outcome.makespan_s,
    )


def slower(row: Row, by: float) -> Row:
    times = {
        name: by * getattr(row.median, name)
        for name in ("makespan_s", "half_ended_s", "most_ended_s")
    }
    return replace(row, median=replace(row.median, **times))


@given(
    st.lists(
        st.tuples(st.floats(0, 5), st.floats(0.01, 20), st.integers(-1, 100).filter(bool)),
        max_size=20,
    )
)
def test_cells_hold_all_of_an_engines_work(gaps: list[tuple[float, float, int]]) -> None:
    spans, at_s = [], 0.0
    for idle_s, length_s, batch in gaps:
        spans.append((at_s + idle_s, at_s + idle_s + length_s, batch))
        at_s += idle_s + length_s
    edges = np.linspace(0.0, max(at_s, 1.0), 38)
    decoding, prefill = average_cells(spans, edges)
    width = np.diff(edges)
    decoded = sum((end_s - start_s) * size for start_s, end_s, size in spans if size > 0)
    prefilled = sum(end_s - start_s for start_s, end_s, size in spans if size < 0)
    assert float(decoding @ width) == pytest.approx(decoded, rel=1e-6, abs=1e-6)
    assert float(prefill @ width) == pytest.approx(prefilled, rel=1e-6, abs=1e-6)
    assert decoding.min() >= -1e-6


def test_every_panel_shows_the_same_longest_trajectories_without_gaps_and_its_last() -> None:
    chosen, comparison = compared(ASKED)
    setting = chosen.settings[0]
    runs = [simulate(SYSTEMS[name], setting, 1, record=True) for name in ("verl", "treadle")]
    shown = make_scene(runs, setting.workload, comparison)
    assert shown.end_s == max(run.outcome.makespan_s for run in runs)
    for panel, run in zip(shown.panels, runs, strict=True):
        assert [bars.label for bars in panel.bars[:12]] == [
            bars.label for bars in shown.panels[0].bars[:12]
        ]
        assert len(panel.lanes) == len(run.cluster.engines)
        for bars, index in zip(panel.bars, sort_longest_first(setting.workload), strict=False):
            ordered = sorted(bars.spans, key=lambda span: span.start_s)
            assert ordered[0].start_s == 0.0
            assert ordered[-1].end_s == pytest.approx(run.outcome.times[index].finished_s)
            for before, after in itertools.pairwise(ordered):
                assert after.start_s == pytest.approx(before.end_s, abs=1e-9)


def test_the_best_baseline_heddle_and_treadle_are_choose_systems() -> None:
    _, comparison = compared(ASKED)
    systems = [SYSTEMS[name] for name in DEFAULT_SYSTEMS.split(",")]
    assert choose_systems(systems, comparison) == ["verl", "heddle", "treadle"]
    only_oracle = replace(comparison, best_baseline="")
    assert choose_systems([SYSTEMS["oracle"]], only_oracle) == ["oracle"]


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        (Bound(90.0, 90.0, 4.0, 8, 40.0), "takes 40.0 s. Its longest trajectory bounds it."),
        (
            Bound(90.0, 90.0, 70.0, 8, 40.0),
            "takes 40.0 s. The tools of its longest trajectory bound it.",
        ),
        (
            Bound(90.0, 30.0, 4.0, 1, 90.0),
            "alone on 1 GPU, takes 30.0 s, 4.0 s of them in tools. The amount of work",
        ),
        (
            Bound(90.0, 90.0, 0.0, 2, 89.0),
            "Its longest trajectory and the amount of work bound it about equally.",
        ),
    ],
)
def test_the_first_sentence_says_what_bounds_the_workload(bound: Bound, said: str) -> None:
    chosen, comparison = compared(ASKED)
    assert said in describe(chosen, replace(comparison, bound=bound)).bound


def test_where_treadle_loses_is_said_and_only_there() -> None:
    chosen, comparison = compared(ASKED)
    verl, treadle, oracle = comparison.rows
    won = describe(chosen, replace(comparison, rows=(slower(treadle, 1.5), treadle, oracle)))
    assert won.losses == ()
    assert not any(line.startswith("Where treadle loses") for line in won.lines())
    lost = describe(chosen, replace(comparison, rows=(verl, slower(treadle, 1.5), oracle)))
    assert lost.losses[0].startswith(f"verl ({verl.median.makespan_s:.1f} s) ends earlier than its")
    assert any(each.startswith("half of the trajectories have ended after") for each in lost.losses)


def test_what_is_prefilled_once_counts_prompts_once_and_last_answers_never() -> None:
    chosen = make_plan(replace(ASKED, prompts=1, samples=2))
    workload = chosen.settings[0].workload
    first, second = workload.trajectories
    answers = [max(1, step.obs_tokens) for work in (first, second) for step in work.steps[:-1]]
    assert count_once_tokens(workload) == first.prompt_tokens + sum(answers) + 1
