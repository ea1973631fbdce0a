"""Answers of reasoning-gym tasks are never run as code, whichever task's rule reads them."""

import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pycosat
import pytest
from reasoning_gym.factory import DATASETS, create_dataset
from treadle.environments import ReasoningGym, Reply
from treadle.environments.reasoning import EVALUATED
from treadle_tools.builtin.reasoning import ReasoningTask, is_formula
from treadle_tools.tool import Outcome

# Tasks that are made of others, which an opening does not name; and what the stand-in of pycosat
# cannot make, on a machine that had no C compiler.
NEEDS_MORE = {"composite", *(["zebra_puzzles"] if hasattr(pycosat, "PycosatMissing") else [])}


class NoSandbox:
    """No code is run beside the environment."""

    cores = 1

    def python(self, code: str) -> Outcome:
        raise AssertionError(code)


def hostile(path: Path) -> list[str]:
    """Answers that make a file where they are run."""
    make = f"open({str(path)!r}, 'w')"
    return [
        make,
        f"[{make}]",
        f"[[{make}, 1], [2, 3]]",
        f"exec({make!r})",
        f"__import__('os').system('touch {path}')",
        f"(lambda: {make})()",
        f"sqrt(4)+{make}.close()",
        f"x.__class__.__base__.__subclasses__()[{make}]",
        f"{{{make}: 1}}",
        f"\n{make}\n",
    ]


# One library of questions leaves its file open.
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("task", sorted(DATASETS.keys() - NEEDS_MORE))
def test_no_answer_is_run(task: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"task": task, "seed": 3}
    made = ReasoningTask(arguments, NoSandbox())
    for answer in hostile(tmp_path / "run"):
        outcome = made.step({"answer": answer})
        assert outcome.done
        assert outcome.reward is not None
        assert 0.0 <= outcome.reward <= 1.0
        assert not (tmp_path / "run").exists(), answer


class Alone:
    """What an episode of the client needs of its trajectory."""

    async def time_tool(self, work: Callable[[], Awaitable[Any]]) -> Any:
        return await work()


@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("task", sorted(DATASETS.keys() - NEEDS_MORE))
async def test_no_answer_is_run_in_the_clients_process(task: str, tmp_path: Path) -> None:
    """Where a rule would run it, the client refuses to play the task."""
    played = ReasoningGym(create_dataset(task, seed=3, size=1))
    if task in EVALUATED:
        with pytest.raises(ValueError, match="as a program"):
            played.tasks()
        return
    [asked] = played.tasks()
    for answer in hostile(tmp_path / "run"):
        episode = await played.start(asked, Alone())  # type: ignore[arg-type]
        turn = await episode.step(Reply(f"<answer>{answer}</answer>", (), None))  # type: ignore[arg-type]
        assert turn.done
        assert not (tmp_path / "run").exists(), answer


def test_no_task_needs_matplotlib() -> None:
    """It is left out of the image of the tools service. An agent's code, which runs in a fork,
    finds none either."""
    script = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "mpl_toolkits"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from treadle_tools.builtin.reasoning import ReasoningTask
for task in ("game_of_life", "game_of_life_halting"):
    made = ReasoningTask({"task": task}, None)
    print(made.step({"answer": str(made._entry["answer"])}).reward)
try:
    import matplotlib.pyplot
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["1.0", "1.0", "matplotlib"], "")


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("x**2/2 + C", True),
        ("  (3 + 4.5)*2 - 1e3 ", True),
        ("sqrt(2)*sin(x)", True),
        ("24", True),
        ("", True),
        ("x.real", False),
        ("().__class__", False),
        ("exec(x)", False),
        ("'a'", False),
        ("[x]", False),
        ("x = 1", False),
        ("lambda: 1", False),
        ("x if y else z", False),
        ("f(", False),
        ("1; 2", False),
        ("x\n  y", False),
    ],
)
def test_a_formula_has_numbers_letters_and_functions_of_mathematics_alone(
    text: str, is_one: bool
) -> None:
    assert is_formula(text) is is_one


@pytest.mark.parametrize(
    "task", ["string_insertion", "n_queens", "puzzle24", "countdown", "simple_integration"]
)
def test_a_right_answer_still_scores(task: str) -> None:
    made = ReasoningTask({"task": task, "seed": 1}, NoSandbox())
    outcome = made.step({"answer": str(made._entry["answer"])})
    assert outcome.reward == 1.0
