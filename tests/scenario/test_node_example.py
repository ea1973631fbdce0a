"""The contract is language-neutral: the Node example generates a step straight from protos/.

Where this machine has no node and npm, or npm cannot reach its registry, the tests are skipped with that reason
(pytest's summary shows it); with TREADLE_REQUIRE_NODE=1 that is a failure, for machines that are meant to have them.
"""

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from support.fake_engine import Script, logprob_at, token_at
from support.mesh_in_process import FakeMesh, fake_mesh
from treadle.scheduler.v1 import scheduler_pb2

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "node"
PROMPT = [504, 2365, 354]
COMMAND_S = 90.0  # npm ci takes 3 s with a warm cache
_OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")


def not_run(reason: str) -> None:
    """Skips with a reason, or fails where Node is required."""
    if os.environ.get("TREADLE_REQUIRE_NODE"):
        pytest.fail(f"TREADLE_REQUIRE_NODE is set and {reason}")
    pytest.skip(f"the Node example was not tested: {reason}")


async def output_of(*command: str, cwd: Path) -> tuple[int, str, str]:
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


@pytest.fixture
async def example(tmp_path: Path) -> Path:
    """The example's folder with its packages: installed by its user, else here into a copy."""
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    if missing:
        not_run(f"{' and '.join(missing)} are not installed")
    if (EXAMPLE / "node_modules").is_dir():
        return EXAMPLE
    copy = tmp_path / "examples" / "node"
    copy.mkdir(parents=True)
    for name in ("package.json", "package-lock.json", ".npmrc", "generate.mjs"):
        shutil.copy(EXAMPLE / name, copy / name)
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    code, _, stderr = await output_of("npm", "ci", "--ignore-scripts", cwd=copy)
    if code != 0 and any(word in stderr for word in _OFFLINE):
        not_run("npm cannot reach its registry")
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
    packages = json.loads((EXAMPLE / "package-lock.json").read_text())["packages"]
    assert [name for name, package in packages.items() if "resolved" in package] == []
