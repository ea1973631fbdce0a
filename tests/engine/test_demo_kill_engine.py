"""Killing an engine in the middle of the demo's kind of work loses no trajectory: real engines,
real services.

Two engines on a core each, six trajectories of two turns. One engine's process gets SIGKILL while
its steps are decoding. Result: every trajectory finishes, with as many tokens as it asked for and a
logprob for each, steps that began on the killed engine end on the other one, and the temporary
files of the killed engine are removed.
"""

import io
import os
import signal
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from support.processes import fork_server
from support.real_engines import engine_forks, small_model_folder
from treadle import Client, Prompt, Sampling, Trajectory
from treadle.environments import user
from treadle_cli.demo.agents import read_chat
from treadle_cli.mesh.checks import engine_python, pinned_cores
from treadle_cli.mesh.engines import EnginePlan
from treadle_cli.mesh.mesh import Board, Mesh, MeshPlan
from treadle_cli.mesh.processes import ProcessTree

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

STEP_TOKENS = 24
TURNS = 2
KILL_AFTER_TOKENS = 16  # received by all trajectories together: both engines decode then


def sockets_folder(pid: int) -> Path:
    """The one folder of all sockets through which an engine's processes talk."""
    sockets = [Path(str(each.laddr)) for each in psutil.Process(pid).net_connections("unix")]
    [folder] = {path.parent for path in sockets if path.is_socket()}
    return folder


async def test_a_killed_engine_loses_no_trajectory_and_no_token(tmp_path: Path) -> None:
    plan = EnginePlan(
        2, 2, small_model_folder(tmp_path), engine_python(), pinned_cores(2), seed=0, flags=()
    )
    screen = io.StringIO()
    board = Board(Console(file=screen))
    async with ProcessTree(
        tmp_path / "logs", fork_server=fork_server(), engine_forks=engine_forks()
    ) as tree:
        mesh = await Mesh.start(MeshPlan(plan, tmp_path / "state", probes=False), tree, board)
        chat = read_chat(mesh.model_path)
        folders = [sockets_folder(engine.child.pid) for engine in mesh.engines]
        received = 0

        async def agent(trajectory: Trajectory, prompt: Prompt) -> float:
            nonlocal received
            for turn in range(TURNS):
                async for chunk in trajectory.generate(
                    Sampling(STEP_TOKENS, temperature=1.0, seed=turn, ignore_eos=True)
                ):
                    before, received = received, received + len(chunk.token_ids)
                    if before < KILL_AFTER_TOKENS <= received:
                        os.kill(mesh.engines[0].child.pid, signal.SIGKILL)
                if turn < TURNS - 1:
                    trajectory.observe(chat.go_on(trajectory.steps[-1].token_ids, [user("Go on.")]))
            return 1.0

        system = {"role": "system", "content": "Be brief."}
        prompts = [
            Prompt(f"story-{i}", chat.begin([system, user(f"Story number {i}?")])) for i in range(3)
        ]
        async with Client(mesh.where.scheduler) as client:
            result = await client.rollout(prompts, agent, samples_per_prompt=2)

        # it outlives its engine and says so
        assert "sidecar-engine-0" in [child.name for child in tree.children]

        assert [folder.exists() for folder in folders] == [False, True]
    assert not any(folder.exists() for folder in folders)

    assert [death.how for death in mesh.engine_deaths] == ["was killed by SIGKILL"]
    assert "engine-0 was killed by SIGKILL" in screen.getvalue()
    assert len(result.trajectories) == 6
    for trajectory in result.trajectories:
        assert (trajectory.outcome, trajectory.error) == ("finished", "")
        assert sum(trajectory.loss_mask) == TURNS * STEP_TOKENS
        assert len(trajectory.tokens) == len(trajectory.logprobs) == len(trajectory.loss_mask)
        for step in trajectory.steps:
            assert len(step.token_ids) == len(step.logprobs) == STEP_TOKENS
            assert all(logprob <= 0.0 for logprob in step.logprobs)
            covered = [
                index
                for span in step.version_spans
                for index in range(span.start_token, span.end_token)
            ]
            assert covered == list(range(STEP_TOKENS))
    moved = [
        step.engine_ids for t in result.trajectories for step in t.steps if len(step.engine_ids) > 1
    ]
    assert moved and all(engine_ids == ("engine-0", "engine-1") for engine_ids in moved)
    assert {t.steps[-1].engine_ids[-1] for t in result.trajectories} == {"engine-1"}
