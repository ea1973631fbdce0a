"""A resource plan changes the real engines of a mesh, and one whose engine cannot start changes
nothing for long."""

import io
import json
import os
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from support.processes import fork_server
from support.real_engines import engine_forks, small_model_folder
from treadle import Client, Sampling
from treadle_cli.apply import run_apply
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh import checks
from treadle_cli.mesh.engines import EnginePlan
from treadle_cli.mesh.mesh import Board, LocalEngines, Mesh, MeshPlan
from treadle_cli.mesh.processes import ProcessTree
from treadle_cli.resources.servicer import serve_resources
from treadle_core.model import DEFAULT_BASE_S

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2 or checks.has_gpu(), reason="needs two cores and no GPU"
    ),
]

START_S = 240.0
ONE_WIDE = {"engines": [{"degree": 2, "slots": 4, "count": 1}]}
NOT_STARTABLE = {
    "engines": [
        {"accelerator": "cpu", "degree": 1, "slots": 2, "flags": ["--no-such-flag"], "count": 1}
    ]
}
TOKENS = 6


async def test_a_plan_changes_the_engines_and_one_that_cannot_start_is_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines of a core each. Result: with a trajectory open, a plan is refused and nothing
    changes; then one engine has both cores, four slots and a measured curve, and the others are
    gone; an engine with a flag that SGLang does not know is named with the end of its log, and
    after it an engine of the class before serves a trajectory."""
    # A first probe that is cut off is repeated a minute later, and `apply` waits for the curve.
    monkeypatch.setenv("TREADLE_SIDECAR_PROBE_S", "30")
    cores = checks.pinned_cores(2)
    plan = EnginePlan(
        2, 2, small_model_folder(tmp_path), checks.engine_python(), cores, seed=0, flags=()
    )
    screen = io.StringIO()
    console = Console(file=screen, width=200)

    async def apply(document: object, *, dry_run: bool = False) -> int:
        screen.truncate(0)
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(document))
        return await run_apply(file, mesh.where.scheduler, None, dry_run, 0.0, START_S, console)

    async with ProcessTree(
        tmp_path / "logs", fork_server=fork_server(), engine_forks=engine_forks()
    ) as tree:
        mesh_plan = MeshPlan(plan, tmp_path / "state", takes_resource_plans=True)
        mesh = await Mesh.start(mesh_plan, tree, Board(console))
        local = LocalEngines(mesh, checks.list_units())
        async with (
            serve_resources(mesh.where.resources, local, mesh.where.scheduler, mesh.board.note),
            Client(mesh.where.scheduler) as client,
        ):
            async with await client.open(prompt=[5, 6, 7], prompt_id="p0", sample=0):
                assert await apply(ONE_WIDE, dry_run=True) == 0
                assert "stop: engine-0, engine-1" in screen.getvalue()
                with pytest.raises(UsageProblem, match="trajectories are open: apply it between"):
                    await apply(ONE_WIDE)
            assert [each.info.engine_id for each in await mesh.list_engines()] == [
                "engine-0",
                "engine-1",
            ]

            assert await apply(ONE_WIDE) == 0
            (wide,) = await mesh.list_engines()
            assert (wide.info.engine_id, wide.info.slot_limit) == ("engine-2", 4)
            assert wide.info.decode_curve.base_s != DEFAULT_BASE_S
            (engine,) = mesh.engines
            assert psutil.Process(engine.child.pid).cpu_affinity() == [*cores]

            assert await apply(NOT_STARTABLE) == 1
            assert (
                "engine-3 did not come up" in screen.getvalue()
                and "--no-such-flag" in screen.getvalue()
            )
            (former,) = await mesh.list_engines()
            assert (former.info.engine_id, former.info.slot_limit) == ("engine-4", 4)
            assert await local.running() == {"engine-4": engine.kind}
            async with await client.open(prompt=[5, 6, 7], prompt_id="p1", sample=0) as trajectory:
                async for _ in trajectory.generate(
                    Sampling(TOKENS, temperature=1.0, seed=1, ignore_eos=True)
                ):
                    pass
            assert len(trajectory.steps[0].token_ids) == TOKENS
            assert trajectory.steps[0].engine_ids == ("engine-4",)
            assert mesh.engine_deaths == []
