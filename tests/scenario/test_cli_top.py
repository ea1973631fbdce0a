"""`treadle top`: a snapshot of a real mesh, what a terminal of 80 columns shows of it, and how
often it asks."""

import asyncio
import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from support.commands import output_of
from support.conditions import until_said
from support.mesh_of_processes import PROMPT, Fleet, fleet
from support.processes import StartService, free_port
from treadle.migrator.v1 import migrator_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_cli import top as snapshots
from treadle_cli.mesh.scheduler import reach_scheduler
from treadle_cli.top import (
    EngineRow,
    Screen,
    Snapshot,
    TrajectoryRow,
    Watcher,
    latest_moves,
    rollouts_of,
    sort_longest_remaining,
)

PATIENCE_S = 60.0
TOP = (sys.executable, "-m", "treadle_cli", "top")


async def once(made: Fleet, folder: Path, *words: str) -> str:
    code, said, errors = await output_of(
        *TOP, "--once", *words, "--scheduler", made.scheduler.address, cwd=folder
    )
    assert code == 0, errors
    return said


def start_in_terminal(*words: str) -> tuple["subprocess.Popen[bytes]", int]:
    """A `treadle top` in a terminal of its own, and what reads that."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm"}
    shown = subprocess.Popen([*TOP, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    return shown, ours


async def test_a_snapshot_says_what_engines_and_trajectories_do(
    start_service: StartService, tmp_path: Path
) -> None:
    async with fleet(start_service) as made:
        await (await made.run("done")).close()
        await made.client.open(prompt_id="waits", sample=3, prompt=PROMPT)

        async def shown() -> dict[str, Any]:
            found = json.loads(await once(made, tmp_path, "--json"))
            assert isinstance(found, dict)
            return found

        found = await until_said(
            shown, lambda said: all(each["health"] == "ok" for each in said["engines"])
        )
        assert [each["engine_id"] for each in found["engines"]] == ["e0", "e1"]
        assert {each["weight_version"] for each in found["engines"]} == {"default"}
        [waiting] = found["trajectories"]
        assert (waiting["prompt_id"], waiting["sample"], waiting["state"]) == ("waits", 3, "idle")
        assert waiting["left_tokens"] is None, "nobody predicts it, and JSON has no NaN"
        assert found["moves"] == [] and found["policy"].startswith("progressive, planned")
        text = await once(made, tmp_path)
        assert max(map(len, text.splitlines())) <= 80
        assert re.search(r"e0 .* ok", text) and re.search(r"waits #3 .* idle", text)


async def test_trajectories_are_asked_for_seldom_and_engines_each_time(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SPARE", 1e9)
    async with (
        fleet(start_service, sidecars=1) as made,
        reach_scheduler(made.scheduler.address) as stub,
    ):
        watcher = Watcher(made.scheduler.address, stub, None)
        first = await watcher.look()
        await made.client.open(prompt_id="p", sample=0, prompt=PROMPT)
        await made.start_sidecar(1)
        await made.control.until_registered(2)
        second = await watcher.look()
        assert (len(first.engines), len(second.engines)) == (1, 2)
        assert second.trajectories == () and second.age_s > first.age_s
        assert len((await Watcher("", stub, None).look()).trajectories) == 1


async def test_a_mesh_that_is_seldom_asked_has_a_rate_too(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "SPARE", 0.0)
    monkeypatch.setattr(snapshots, "RATE_S", 0.0)
    async with (
        fleet(start_service, sidecars=1) as made,
        reach_scheduler(made.scheduler.address) as stub,
    ):
        watcher = Watcher(made.scheduler.address, stub, None)
        await watcher.look()
        await (await made.run("done")).close()
        assert (await watcher.look()).trajectories_per_minute > 0


async def test_a_terminal_is_redrawn_until_ctrl_c_and_then_is_as_it_was(
    start_service: StartService,
) -> None:
    async with fleet(start_service, sidecars=1) as made:
        shown, ours = start_in_terminal("--scheduler", made.scheduler.address)

        def read_until(mark: bytes) -> bytes:
            seen = b""
            while mark not in seen:
                seen += os.read(ours, 65536)
            return seen

        try:
            for _ in range(3):
                await asyncio.wait_for(
                    asyncio.to_thread(read_until, b"trajectories open"), PATIENCE_S
                )
            shown.send_signal(signal.SIGINT)
            await asyncio.wait_for(asyncio.to_thread(read_until, b"\x1b[?1049l"), PATIENCE_S)
            assert await asyncio.to_thread(shown.wait, PATIENCE_S) == 130
        finally:
            shown.kill()
            os.close(ours)


async def test_what_cannot_be_shown_says_what_to_do(tmp_path: Path) -> None:
    for words, says in (
        (("--json",), "--json prints one snapshot: give --once"),
        ((), "treadle top needs a terminal: give --once"),
        (("--once", "--scheduler", f"127.0.0.1:{free_port()}"), "no scheduler serves there"),
    ):
        code, _, errors = await output_of(*TOP, *words, cwd=tmp_path)
        assert code == 2 and says in " ".join(errors.split()), errors


def trajectory(name: str, opened_s: int, closed_s: int = 0, left: float = -1.0) -> pb.Trajectory:
    made = pb.Trajectory(
        trajectory_id=name, prompt_id=name, rollout_id="r", opened_at=Timestamp(seconds=opened_s)
    )
    if closed_s:
        made.closed_at.CopyFrom(Timestamp(seconds=closed_s))
    if left >= 0:
        made.predicted_remaining_tokens.p50 = left
    return made


def test_the_straggler_tax_is_the_share_of_time_for_the_last_tenth() -> None:
    ended = [trajectory(f"t{n}", 100, 100 + n) for n in range(1, 10)]
    [row] = rollouts_of([*ended, trajectory("last", 100)], now_s=118.0)
    assert (row.done, row.total, row.running_s) == (9, 10, 18.0)
    assert row.straggler_tax == pytest.approx(0.5), "nine tenths took 9 of 18 s"
    [row] = rollouts_of([*ended[:8], trajectory("a", 100), trajectory("b", 100)], now_s=118.0)
    assert math.isnan(row.straggler_tax)
    [row] = rollouts_of([*ended, trajectory("last", 100, 110)], now_s=500.0)
    assert row.straggler_tax == pytest.approx(0.1), "a rollout that is over does not go on"


def test_the_longest_remaining_stand_first_and_the_unpredicted_last() -> None:
    rows = sort_longest_remaining(
        [
            trajectory("unknown", 0),
            trajectory("short", 0, left=5),
            trajectory("long", 0, left=900),
            trajectory("c", 0, 1),
        ]
    )
    assert [row.trajectory_id for row in rows] == ["long", "short", "unknown"]


def test_moves_under_way_stand_before_those_that_ended() -> None:
    ended = migrator_pb2.Migration(trajectory_id="a", state=migrator_pb2.MIGRATION_STATE_DONE)
    ended.created_at.seconds, ended.ended_at.seconds = 50, 52
    under_way = migrator_pb2.Migration(
        trajectory_id="b", state=migrator_pb2.MIGRATION_STATE_PREPARING
    )
    under_way.created_at.seconds = 40
    found = [
        (row.trajectory_id, row.state, row.seconds)
        for row in latest_moves([ended, under_way], now_s=60.0)
    ]
    assert found == [("b", "preparing", 20.0), ("a", "done", 2.0)]


def drawn(snapshot: Snapshot, silent_s: float = 0.0) -> list[str]:
    page = io.StringIO()
    Console(file=page, width=80, height=24, force_terminal=True, color_system=None).print(
        Screen(snapshot, silent_s)
    )
    return page.getvalue().splitlines()


def test_a_full_mesh_fits_a_terminal_and_hostile_names_cannot_change_it() -> None:
    engine = EngineRow(
        "engine-of-a-long-name-0", 100, 128, 4000, 0.987, 12345.6, 6400, "a-long-version-name", "ok"
    )
    row = TrajectoryRow(
        "t" * 36,
        "\x1b[2J[red]boom\n" * 3,
        15,
        engine.engine_id,
        40,
        123_456,
        1e6,
        "stepping",
        3,
        1.0,
    )
    full = Snapshot("h:1", "planned", (engine,) * 40, (row,) * 6400, (), None, 12.0, 9.0)
    lines = drawn(full, silent_s=7.0)
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "\x1b" not in text and "[red]boom" in text
    assert "and 28 more engines" in text and "9 s ago" in text and "no answer for 7 s" in text
    assert re.search(r"and 6,?\d+ more trajectories", text)
    assert drawn(replace(full, engines=(), trajectories=())), "an empty mesh has a picture too"
