"""Tasks of the package `verifiers` (0.4), where it is installed: its own classes, fake engines.

It pins packages that this project has in other versions, so it is no dependency of the tests:
install it beside them to run these.
"""

from collections.abc import Iterable
from typing import Any

import pytest
import treadle
from support.mesh_in_process import fake_mesh
from support.scripted_chat import read, scripted_chat
from treadle.environments import EnvManager, VerifiersTasks

vf: Any = pytest.importorskip("verifiers.v1")


class Sum(vf.Task):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: Any) -> float:
        return float(self.data.name in trace.last_reply)

    @vf.reward(weight=0.5)  # type: ignore[untyped-decorator]
    async def short(self, trace: Any) -> float:
        return float(trace.num_output_tokens <= 4)


class Sums(vf.Taskset):  # type: ignore[misc]
    def load(self) -> Iterable[Any]:
        for a in range(3):
            yield Sum(vf.TaskData(prompt=f"{a} + 1?", system_prompt="Sums.", name=str(a + 1)))


class Dated(Sum):
    @vf.reward  # type: ignore[untyped-decorator]
    async def clean(self, trace: Any, runtime: Any) -> float:
        return 1.0


class Prepared(Sum):
    async def setup(self, trace: Any, runtime: Any) -> None:
        return None


async def test_tasks_of_a_taskset_are_asked_and_scored_by_their_own_rewards() -> None:
    """The second reply has the right answer in its reasoning alone."""
    taskset = Sums(vf.TasksetConfig(id="sums"))
    async with fake_mesh("e0") as mesh, mesh.client() as client:
        played = EnvManager(
            client,
            VerifiersTasks(taskset.take(2)),
            chat=scripted_chat(["It is 1.", "<think>It is 2?</think>It is 7."]),
            sampling=treadle.Sampling(max_new_tokens=4),
        )
        result = await played.rollout(samples_per_prompt=1, concurrency=1)
    assert [(t.error, t.reward) for t in result.trajectories] == [("", 1.5), ("", 0.5)]
    assert [read(t.tokens) for t in result.trajectories] == [
        f"system: Sums.$user: {a} + 1?$assistant: ~" for a in range(2)
    ]
    assert [t.prompt_id for t in result.trajectories] == [task.key for task in taskset.take(2)]


@pytest.mark.parametrize(
    ("task", "needs"),
    [
        (Dated(vf.TaskData(prompt="?")), "looks into the runtime"),
        (Prepared(vf.TaskData(prompt="?")), "setup or finalize"),
        (Sum(vf.TaskData(prompt="?", image="python")), "a container"),
        (Sum(vf.TaskData()), "no prompt"),
    ],
)
def test_a_task_that_needs_more_than_a_conversation_is_refused(task: Any, needs: str) -> None:
    with pytest.raises(ValueError, match=needs):
        VerifiersTasks([task]).tasks()
