"""A reasoning-gym task: the question first, Python on the way, one answer that is scored by the task's own rule."""

from collections.abc import Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from treadle_tools.tool import InvalidArguments, Outcome, Sandbox

MOST_NAMED = 8  # task names in a refusal


class ReasoningTask:
    """One question. Arguments: task (a dataset of reasoning-gym), seed, index within the seed's questions.

    The answer is in this process; the agent's code runs in another (`Sandbox.python`).
    """

    def __init__(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> None:
        task, seed, index = str(arguments["task"]), int(arguments.get("seed", 0)), int(arguments.get("index", 0))
        if task not in DATASETS:
            some = f"{', '.join(sorted(DATASETS)[:MOST_NAMED])} and {len(DATASETS) - MOST_NAMED} more"
            raise InvalidArguments("task", f"{task!r} is no task of reasoning-gym; there are {some}")
        self._dataset = reasoning_gym.create_dataset(task, seed=seed, size=index + 1)
        self._entry = self._dataset[index]
        self._sandbox = sandbox

    def first(self) -> Outcome:
        """The question."""
        return Outcome(output=str(self._entry["question"]), reward=0.0)

    def step(self, arguments: Mapping[str, Any]) -> Outcome:
        """`code` runs Python and shows its output; `answer` is scored from 0 to 1 and ends the task."""
        if "code" in arguments:
            return self._sandbox.python(str(arguments["code"]))
        score = float(self._dataset.score_answer(str(arguments["answer"]), self._entry))
        return Outcome(output=f"score {score:g}", reward=score, done=True)
