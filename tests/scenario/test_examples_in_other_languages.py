"""The examples in TypeScript and Go against a live mesh: the real scheduler, sidecars and tools
service, and scripted engines, one of which is lost in the middle of a turn.

Where this machine lacks what a language needs, its tests are skipped with that reason (pytest's
summary shows it); with TREADLE_REQUIRE_NODE=1 or TREADLE_REQUIRE_GO=1 that is a failure, for
machines that are meant to have it.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from support.commands import output_of
from support.conditions import until
from support.fake_engine import Script
from support.fake_servicer import Refusal
from support.fake_sglang import expected
from support.mesh_in_process import fake_mesh
from support.mesh_of_processes import Fleet, fleet
from support.processes import StartService
from support.secure_mesh import secure_mesh
from treadle.scheduler.v1 import scheduler_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PROMPT = [504, 236, 354]
TOKENS = 24
OLDEST_NODE = 20
LOST_AFTER = 6  # tokens of the engine that is lost
# Where Debian's packages put Go's, and what agent.go is with those of Debian 12, whose gRPC is
# older.
GO_PACKAGES = Path("/usr/share/gocode")
GRPC_WITH_NEW_CLIENT = 63  # 1.63
OLD_GRPC = {
    "grpc.NewClient(": "grpc.Dial(",
    "grpc.WithTransportCredentials(insecure.NewCredentials())": "grpc.WithInsecure()",
    '\t"google.golang.org/grpc/credentials/insecure"\n': "",
}
# gRPC for Go is compiled once, in a minute on two cores
pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]
OFFLINE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ENETUNREACH")


def skip(language: str, reason: str) -> NoReturn:
    """Skip with a reason, or fail where the language is required."""
    if os.environ.get(f"TREADLE_REQUIRE_{language.upper()}"):
        pytest.fail(f"TREADLE_REQUIRE_{language.upper()} is set and {reason}")
    pytest.skip(f"the example for {language} was not tested: {reason}")


def require_commands(language: str, install: str, *names: str) -> None:
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        skip(language, f"{', '.join(missing)} not found ({install})")


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """The output of a step of a build."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def build_node(folder: Path) -> list[str]:
    require_commands("node", "apt-get install nodejs npm", "node", "npm")
    if int(run("node", "--version").lstrip("v").partition(".")[0]) < OLDEST_NODE:
        skip("node", f"it is older than Node {OLDEST_NODE}")
    copy = folder / "examples" / "node"
    shutil.copytree(
        EXAMPLES / "node", copy, ignore=shutil.ignore_patterns("node_modules", "gen", "*.js")
    )
    (folder / "protos").symlink_to(ROOT / "protos")
    try:
        run("npm", "ci", "--ignore-scripts", cwd=copy)
    except AssertionError as failed:
        if any(word in str(failed) for word in OFFLINE):
            skip("node", "npm cannot reach its registry")
        raise
    run("npm", "run", "build", cwd=copy)
    return ["node", str(copy / "agent.js")]


def build_go(folder: Path) -> list[str]:
    """From Debian's packages, without the module proxy."""
    names = ("go", "protoc-gen-go", "protoc-gen-go-grpc")
    require_commands("go", "apt-get install golang-go protoc-gen-go protoc-gen-go-grpc", *names)
    grpc_version = GO_PACKAGES / "src/google.golang.org/grpc/version.go"
    if not grpc_version.exists() or not (GO_PACKAGES / "src/google.golang.org/protobuf").is_dir():
        skip(
            "go",
            "gRPC not found (apt-get install golang-google-grpc-dev "
            "golang-github-golang-protobuf-1-5-dev)",
        )
    source = folder / "src" / "treadle-agent"
    shutil.copytree(EXAMPLES / "go", source, ignore=shutil.ignore_patterns("gen"))
    version = re.search(r'Version = "1\.(\d+)', grpc_version.read_text())
    assert version is not None
    if int(version[1]) < GRPC_WITH_NEW_CLIENT:
        program = (source / "agent.go").read_text()
        for new, old in OLD_GRPC.items():
            assert program.count(new) == 1, new
            program = program.replace(new, old)
        (source / "agent.go").write_text(program)
    tools = run(ROOT / "scripts" / "codegen-venv.sh").strip()
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    env = {
        "GO111MODULE": "off",
        "GOPATH": f"{folder}{os.pathsep}{GO_PACKAGES}",
        "GOFLAGS": "",
        "PATH": path,
    }
    run(f"{tools}/buf", "generate", ROOT / "protos", cwd=source, env=env)
    run("go", "vet", ".", cwd=source, env=env)
    run("go", "build", "-o", "agent", ".", cwd=source, env=env)
    return [str(source / "agent")]


@pytest.fixture(scope="module", params=["node", "go"])
def agent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of an example, built in a folder of its own."""
    build = {"node": build_node, "go": build_go}[request.param]
    return build(tmp_path_factory.mktemp(request.param))


async def run_agent(
    agent: list[str], scheduler: str, *more: str, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    prompt = ",".join(map(str, PROMPT))
    words = (
        "--scheduler",
        scheduler,
        "--prompt",
        prompt,
        "--turns",
        "2",
        "--max-new-tokens",
        str(TOKENS),
        *more,
    )
    return await output_of(*agent, *words, cwd=ROOT, env=env)


@asynccontextmanager
async def live_mesh(start_service: StartService) -> AsyncIterator[Fleet]:
    settings = {"TREADLE_TOOLS_BUILTIN": "python", "TREADLE_TOOLS_REWARDS": "exact_match"}
    tools = await start_service("treadle_tools", settings)
    async with fleet(start_service, token_s=0.03, scheduler_settings={"TOOLS": tools.address}) as f:
        yield f


@pytest.mark.parametrize("how", ["its engine is killed", "its sidecar is killed"])
async def test_a_trajectory_in_another_language_loses_an_engine_and_no_token(
    agent: list[str], start_service: StartService, how: str
) -> None:
    """Two turns with a tool between them; the engine of the first one is killed after a few tokens.

    Result: the tokens of an undisturbed run, the tool's sums, a score, and a scheduler that knows
    the trajectory as finished.
    """
    async with live_mesh(start_service) as f:
        running = asyncio.create_task(run_agent(agent, f.scheduler.address))
        await until(
            lambda: any(engine.sampled >= LOST_AFTER for engine in f.engines) or running.done()
        )
        assert not running.done(), running.result()
        lost = next(number for number, engine in enumerate(f.engines) if engine.running)
        if "sidecar" in how:
            f.sidecars[lost].kill()
        else:
            await f.engines[lost].stop()
        code, stdout, stderr = await running
        assert code == 0, stderr
        answer = json.loads(stdout)
        context = list(PROMPT)
        for step in answer["steps"]:
            assert step["token_ids"] == expected(context, TOKENS)
            assert step["logprobs"] == pytest.approx(
                [-1.0 / (1 + token) for token in step["token_ids"]]
            )
            assert (step["finish_reason"], step["tool_output"]) == (
                "LENGTH",
                f"{sum(step['token_ids'])}\n",
            )
            context += [*step["token_ids"], *step["tool_output"].encode()]
        first, second = answer["steps"]
        assert first["engine_ids"] == [f"e{lost}", f"e{1 - lost}"]
        assert (first["starts"], second["starts"]) == (2, 1)
        assert second["engine_ids"] == [f"e{1 - lost}"]
        assert f"turn 0: e{lost} was lost after" in stderr
        assert answer["score"] == 1.0
        closed = await f.control.call(
            "GetTrajectory", pb.GetTrajectoryRequest(trajectory_id=answer["trajectory_id"])
        )
        assert closed.trajectory.state == pb.TRAJECTORY_STATE_FINISHED
        assert closed.trajectory.gen_tokens == 2 * TOKENS
        jobs = await f.control.call("ListJobs", pb.ListJobsRequest())
        assert not any(job.clients for job in jobs.jobs)


async def test_a_trajectory_in_another_language_shows_its_certificate(
    agent: list[str], tmp_path: Path
) -> None:
    async with secure_mesh(tmp_path) as mesh:
        folder = {"TREADLE_TLS_FOLDER": str(mesh.certificates / "client-acme")}
        code, stdout, stderr = await run_agent(agent, mesh.where.scheduler, env=folder)
        assert code == 0, stderr
        answer = json.loads(stdout)
        assert answer["trajectory_id"].startswith("acme::") and answer["score"] == 1.0
        assert [len(step["token_ids"]) for step in answer["steps"]] == [TOKENS, TOKENS]
        code, stdout, _ = await run_agent(
            agent, mesh.where.scheduler, env={**folder, "TREADLE_TLS_FOLDER": "/nowhere"}
        )
        assert (code, stdout) == (1, "")


async def test_a_missing_token_fails_the_trajectory(agent: list[str]) -> None:
    async with fake_mesh("e0") as mesh:
        mesh.engines["e0"].script = Script(skip_at=2)
        code, stdout, stderr = await run_agent(agent, mesh.address)
        assert (code, stdout) == (1, "")
        assert "offset 3 after 2 tokens" in stderr
        assert list(mesh.scheduler.outcomes.values()) == [pb.OUTCOME_FAILED]
        await until(lambda: not mesh.engines["e0"].running)
        calls = [*mesh.scheduler.calls, *mesh.engines["e0"].calls]
        assert all(call.deadline_s is not None for call in calls)


async def test_a_lost_answer_is_asked_for_again_by_the_same_request_and_a_full_queue_by_another_ticket(
    agent: list[str],
) -> None:
    """The answer to the first ScheduleStep is lost, the engine's queue is full once, and the mesh
    has no such tool.

    Result: one ticket is asked for twice by one request; the next one replaces it without
    suspecting the engine; the tool is called once, and the trajectory is closed as failed.
    """
    async with fake_mesh("e0") as mesh:
        mesh.scheduler.refuse_next(
            "ScheduleStep", Refusal(grpc.StatusCode.UNAVAILABLE, "AWAY", after=True)
        )
        full = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=0.05)
        mesh.engines["e0"].refuse_next("Generate", full)
        code, _, _ = await run_agent(agent, mesh.address)
        assert code == 1
        first, repeat, second = mesh.scheduler.requests("ScheduleStep")
        assert first == repeat
        assert first.request_id != second.request_id
        assert (second.turn, second.replaces_ticket_id, second.engine_refused) == (0, "k-1", True)
        assert len(mesh.tools.requests("Invoke")) == 1
        assert list(mesh.scheduler.outcomes.values()) == [pb.OUTCOME_FAILED]


def test_the_lock_file_of_node_names_no_registry() -> None:
    packages = json.loads((EXAMPLES / "node" / "package-lock.json").read_text())["packages"]
    assert [name for name, package in packages.items() if "resolved" in package] == []
