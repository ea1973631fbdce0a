"""The examples run as they stand; the one for Node shows that the contract is language-neutral.

Where this machine has no node and npm, or npm cannot reach its registry, its tests are skipped with that reason
(pytest's summary shows it); with TREADLE_REQUIRE_NODE=1 that is a failure, for machines that are meant to have them.
"""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from support.fake_engine import Script, logprob_at, token_at
from support.mesh_in_process import FakeMesh, fake_mesh
from support.processes import StartService
from treadle.scheduler.v1 import scheduler_pb2

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NODE = EXAMPLES / "node"
PROMPT = [504, 2365, 354]
COMMAND_S = 90.0  # npm ci takes 3 s with a warm cache
_OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")


async def output_of(*command: str, cwd: Path = EXAMPLES) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, stdout.decode(), stderr.decode()


async def test_the_quickstart_plays_its_four_trajectories_and_says_so() -> None:
    async with fake_mesh() as mesh:
        code, stdout, _ = await output_of(sys.executable, "quickstart.py", mesh.address)
        assert code == 0
        lines = stdout.splitlines()
        assert [line.split(":")[0] for line in lines] == [f"lake-{n}/{s} finished" for n in (1, 2) for s in (0, 1)]
        assert all("48 tokens in 3 turns, reward 1.5" in line for line in lines)
        assert not mesh.tools.sessions
        assert not mesh.scheduler.open_trajectories


async def test_the_example_of_rewards_has_its_trajectories_scored(start_service: StartService) -> None:
    settings = {"TREADLE_TOOLS_BUILTIN": "", "TREADLE_TOOLS_REWARDS": "exact_match"}
    tools = await start_service("treadle_tools", settings)
    async with fake_mesh() as mesh:
        mesh.scheduler.directory.tools_address = tools.address
        code, stdout, _ = await output_of(sys.executable, "rewards.py", mesh.address)
        assert code == 0
        lines = stdout.splitlines()
        assert len(lines) == 4
        assert all("finished: reward 0.0" in line or "finished: reward 1.0" in line for line in lines), lines


def skip_node(reason: str) -> None:
    """Skips with a reason, or fails where Node is required."""
    if os.environ.get("TREADLE_REQUIRE_NODE"):
        pytest.fail(f"TREADLE_REQUIRE_NODE is set and {reason}")
    pytest.skip(f"the Node example was not tested: {reason}")


@pytest.fixture
async def example(tmp_path: Path) -> Path:
    """The example's folder with its packages: installed by its user, else here into a copy."""
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if missing:
        skip_node(f"{' and '.join(missing)} are not installed")
    if (NODE / "node_modules").is_dir():
        return NODE
    copy = tmp_path / "examples" / "node"
    copy.mkdir(parents=True)
    for name in ("package.json", "package-lock.json", ".npmrc", "generate.mjs"):
        shutil.copy(NODE / name, copy / name)
    (tmp_path / "protos").symlink_to(EXAMPLES.parent / "protos")
    code, _, stderr = await output_of("npm", "ci", "--ignore-scripts", cwd=copy)
    if code != 0 and any(word in stderr for word in _OFFLINE):
        skip_node("npm cannot reach its registry")
    assert code == 0, stderr
    return copy


async def run_example(example: Path, mesh: FakeMesh) -> tuple[int, str, str]:
    return await output_of("node", "generate.mjs", mesh.address, ",".join(map(str, PROMPT)), "5", cwd=example)


async def test_node_opens_generates_and_closes_from_the_protos_alone(example: Path) -> None:
    async with fake_mesh("e0") as mesh:
        code, stdout, stderr = await run_example(example, mesh)
        assert (code, stderr) == (0, "")
        answer = json.loads(stdout)
        assert answer["token_ids"] == [token_at(PROMPT, i) for i in range(5)]
        assert answer["logprobs"] == [logprob_at(i) for i in range(5)]
        assert (answer["finish_reason"], answer["weight_versions"]) == ("FINISH_REASON_LENGTH", ["0"])
        assert mesh.scheduler.outcomes == {answer["trajectory_id"]: scheduler_pb2.OUTCOME_FINISHED}
        calls = [*mesh.scheduler.calls, *mesh.engines["e0"].calls]
        assert all(call.deadline_s is not None for call in calls)


async def test_node_closes_its_trajectory_as_failed_when_a_token_is_missing(example: Path) -> None:
    async with fake_mesh("e0") as mesh:
        mesh.engines["e0"].script = Script(skip_at=2)
        code, stdout, stderr = await run_example(example, mesh)
        assert (code, stdout) == (1, "")
        assert "offset 3 after 2 tokens" in stderr
        assert list(mesh.scheduler.outcomes.values()) == [scheduler_pb2.OUTCOME_FAILED]


def test_the_lock_file_names_no_registry() -> None:
    packages = json.loads((NODE / "package-lock.json").read_text())["packages"]
    assert [name for name, package in packages.items() if "resolved" in package] == []
