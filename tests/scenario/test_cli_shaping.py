"""`treadle shaping`, against a real rollout service that a fake scheduler names."""

import asyncio
import io
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import treadle
from rich.console import Console
from support.finished_trajectories import RolloutCalls, finished, rollout_service
from support.mesh_in_process import FakeMesh, fake_mesh
from treadle_cli.shaping import WIDTH, print_shaping


@pytest.fixture
async def calls(nats_url: str) -> AsyncIterator[RolloutCalls]:
    """Two of three samples are kept, of 5 and 50 tokens; the third, of 500 tokens, comes too
    late."""
    async with rollout_service(nats_url) as calls:
        await calls.create(samples=3, keep=2)
        for sample, sampled in enumerate((5, 50, 500)):
            await calls.submit(finished(f"t{sample}", sample=sample, sampled=sampled))
        yield calls


@pytest.fixture
async def mesh(calls: RolloutCalls) -> AsyncIterator[FakeMesh]:
    async with fake_mesh("e0") as mesh:
        mesh.scheduler.directory.rollout_address = calls.address
        yield mesh


async def shaping(mesh: FakeMesh, *words: str) -> tuple[int | None, str]:
    """Its exit code, and what it wrote; of an error the last line."""
    command = ["-m", "treadle_cli", "shaping", *words, "--scheduler", mesh.address]
    wide = os.environ | {"COLUMNS": "120"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=PIPE, stderr=PIPE, env=wide
    )
    written, errors = await process.communicate()
    return process.returncode, written.decode() or errors.decode().splitlines()[-1]


async def test_it_shows_what_was_sampled_beside_what_is_trained(mesh: FakeMesh) -> None:
    code, said = await shaping(mesh, "r")
    assert code == 0, said
    lines = said.splitlines()
    assert lines[0] == "r: 2 of 3 sampled trajectories are trained"
    sampled, trained = (
        next(line for line in lines if line.startswith(f"  {kind}"))
        for kind in ("sampled", "trained")
    )
    assert sampled.count("━") > trained.count("━") > 0, "the long one was not trained"
    assert any(line.startswith("  group_settled") and line.endswith(" 1") for line in lines)
    found = json.loads((await shaping(mesh, "r", "--json"))[1])
    assert (found["trained"], found["sampled"], found["drops"]) == (2, 3, {"group_settled": 1})


async def test_it_says_what_is_wrong_with_a_request(mesh: FakeMesh) -> None:
    for words in ((), ("r", "--history", "h")):
        assert await shaping(mesh, *words) == (
            2,
            "treadle: shaping takes either a ROLLOUT or --history NAME",
        )
    code, said = await shaping(mesh, "--history", "h")
    assert code == 1 and "no rollout of history h is over yet" in said


async def test_alarms_stand_before_all_figures(mesh: FakeMesh) -> None:
    async with mesh.client() as client:
        report = await client.shaping_report("r")
    page = io.StringIO()
    print_shaping(
        replace(report, alarms=("Long samples are starved.",)), "r", Console(file=page, width=200)
    )
    text = page.getvalue()
    assert 0 < text.index("ALARM  Long samples are starved.") < text.index("tokens of a trajectory")
    assert "No kind of samples is starved" not in text
    empty = treadle.Distribution((), (), 0.0)
    unmeasured = replace(
        report, length=empty, reward=empty, success_rate=empty, drops={}, stale_tokens={3: 7}
    )
    page = io.StringIO()
    print_shaping(unmeasured, "r", Console(file=page, width=200))
    text = page.getvalue()
    assert "No kind of samples is starved" in text and "tokens of a trajectory" not in text
    assert "  none" in text and f"3 versions old  {'━' * WIDTH} 7" in text
