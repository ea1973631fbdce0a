"""A training run on real engines does every step once, although everything that takes part in it is
killed.

A small policy that knows nothing plays two prompts a step with four trained samples of six. The
trainer, the rollout service and an engine get SIGKILL at different steps, and are started again.
"""

import pytest
from treadle_cli.mesh.engines import DEFAULT_MODEL, engine_plan

from treadle_bench.bench import BenchOptions
from treadle_bench.grpo.measure import CAP, Cell, Size, training_mesh

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1_800)]


async def test_a_run_whose_parts_are_killed_does_every_step_once_with_whole_groups_within_its_bound() -> (
    None
):
    size = Size(steps=8, prompts=2, keep=4, pretrain=20, evaluated=0)
    options = BenchOptions(plan=engine_plan(2, 8, DEFAULT_MODEL, 0, []))
    async with training_mesh(size, options) as trainers:
        found = await trainers.disturb(Cell(bound=1, shaping=CAP, seed=0))
    assert set(found["killed_after_step"]) == {"trainer", "rollout service", "engine"}
    assert found["steps_in_order"]
    assert (found["steps"], found["trained_twice"], found["missing_trajectories"]) == (8, 0, 0)
    assert found["max_staleness"] <= 1
