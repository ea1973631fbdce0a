"""The examples in Python run as they stand. Those in other languages:
test_examples_in_other_languages.py."""

import sys
from pathlib import Path

from support.commands import output_of
from support.mesh_in_process import fake_mesh
from support.processes import StartService

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


async def test_the_quickstart_plays_its_four_trajectories_and_says_so() -> None:
    async with fake_mesh() as mesh:
        code, stdout, _ = await output_of(
            sys.executable, "quickstart.py", mesh.address, cwd=EXAMPLES
        )
        assert code == 0
        lines = stdout.splitlines()
        assert [line.split(":")[0] for line in lines] == [
            f"lake-{n}/{s} finished" for n in (1, 2) for s in (0, 1)
        ]
        assert all("48 tokens in 3 turns, reward 1.5" in line for line in lines)
        assert not mesh.tools.sessions
        assert not mesh.scheduler.open_trajectories


async def test_the_example_of_rewards_has_its_trajectories_scored(
    start_service: StartService,
) -> None:
    settings = {"TREADLE_TOOLS_BUILTIN": "", "TREADLE_TOOLS_REWARDS": "exact_match"}
    tools = await start_service("treadle_tools", settings)
    async with fake_mesh() as mesh:
        mesh.scheduler.directory.tools_address = tools.address
        code, stdout, _ = await output_of(sys.executable, "rewards.py", mesh.address, cwd=EXAMPLES)
        assert code == 0
        lines = stdout.splitlines()
        assert len(lines) == 4
        assert all(
            "finished: reward 0.0" in line or "finished: reward 1.0" in line for line in lines
        ), lines


async def test_the_example_of_declarations_plays_in_limits_and_has_its_trajectories_scored(
    start_service: StartService,
) -> None:
    """WHEN it runs with its declared tags, and without. Result: two of three samples of each prompt
    are kept."""
    settings = {"TREADLE_TOOLS_BUILTIN": "frozen_lake", "TREADLE_TOOLS_REWARDS": "exact_match"}
    tools = await start_service("treadle_tools", settings)
    for arguments, tags in (
        (["--hardware"], {"p0": ["compute"], "p1": ["bandwidth"]}),
        ([], {"p0": [], "p1": []}),
    ):
        async with fake_mesh() as mesh:
            mesh.scheduler.directory.tools_address = tools.address
            code, stdout, _ = await output_of(
                sys.executable, "declared.py", mesh.address, *arguments, cwd=EXAMPLES
            )
            assert code == 0
            lines = stdout.splitlines()
            assert len(lines) == 6
            kept = [
                line
                for line in lines
                if "finished: reward 0.0, kept" in line or "reward 1.0, kept" in line
            ]
            assert len(kept) == 4, lines
            opened = mesh.scheduler.requests("OpenTrajectory")
            assert {request.prompt_id: list(request.hardware_tags) for request in opened} == tags
            assert not mesh.scheduler.open_trajectories
