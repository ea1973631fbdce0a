"""Play questions of reasoning-gym with one reply each, scored by the dataset's own rule in this
process (ReasoningGym).

Some rules of reasoning-gym evaluate the answer as a program. Those are refused: play them in a
sandbox, `Sandboxed("reasoning_gym", [{"task": "countdown", "seed": 1, "index": 0}], ...)`, which
scores there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from treadle.environments.episode import Environment, Episode, Message, Reply, Task, Turn, answer_of
from treadle.trajectory import Trajectory

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

# Their score_answer passes the answer to eval, or to sympy's parsers, which do (reasoning-gym
# 0.1.25).
EVALUATED = frozenset(
    {
        *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),
        *(
            "simple_integration",
            "intermediate_integration",
            "polynomial_multiplication",
            "puzzle24",
            "countdown",
        ),
    }
)


class ReasoningGym(Environment):
    """A dataset of reasoning-gym: its first question is the first task.

    dataset: of reasoning_gym.create_dataset, or a composite. system: the system message, by default
    reasoning-gym's own, which requires an answer in <answer> tags. read_answer: the answer in a
    reply.
    """

    def __init__(
        self,
        dataset: ProceduralDataset,
        *,
        system: str | None = None,
        read_answer: Callable[[str], str] = answer_of,
    ) -> None:
        self._dataset, self._read = dataset, read_answer
        if system is None:
            from reasoning_gym.utils import SYSTEM_PROMPTS

            system = SYSTEM_PROMPTS["default"]
        self._system = system

    def tasks(self) -> list[Task]:
        """Return a task for each question. Raises ValueError for a question whose rule evaluates
        the answer."""
        return [self._task(index) for index in range(len(self._dataset))]

    async def start(self, task: Task, trajectory: Trajectory) -> Episode:
        """Start an episode, whose reply is scored in a thread: some rules take long."""
        return _Question(lambda reply: self._score(reply, task.data), trajectory)

    def _task(self, index: int) -> Task:
        entry = self._dataset[index]
        source = entry["metadata"].get("source_dataset", "reasoning_gym")
        if source in EVALUATED:
            instead = "play it with Sandboxed('reasoning_gym', ...)"
            raise ValueError(
                f"{source}: its rule evaluates the answer as a program in this process; {instead}"
            )
        system: list[Message] = (
            [{"role": "system", "content": self._system}] if self._system else []
        )
        return Task(
            f"{source}-{index}", [*system, {"role": "user", "content": entry["question"]}], entry
        )

    def _score(self, reply: Reply, entry: dict[str, Any]) -> float:
        try:
            return float(self._dataset.score_answer(self._read(reply.said), entry))
        except Exception:  # noqa: BLE001 - rules raise anything for an answer that they cannot read
            return 0.0


class _Question(Episode):
    def __init__(self, score: Callable[[Reply], float], trajectory: Trajectory) -> None:
        self._score, self._trajectory = score, trajectory

    async def step(self, reply: Reply) -> Turn:
        score = await self._trajectory.time_tool(lambda: asyncio.to_thread(self._score, reply))
        return Turn(reward=score, done=True)
