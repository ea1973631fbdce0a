"""Play a reasoning-gym task: the question first, Python on the way, one answer that is scored by
the task's own rule.

Invariant: an answer is never run as code. Some rules evaluate it as Python: those about lists and
strings take Python's literals here, and those about formulas get numbers, letters, operators and
functions of mathematics alone.
"""

import ast
import io
import math
import sys
import tokenize
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from treadle_tools.tool import InvalidArguments, Outcome, Sandbox

# cellpylib, which two tasks use, imports matplotlib to draw, and no task draws. So it finds empty
# modules: the image of the tools service has no matplotlib, and elsewhere each worker saves 30 MB.
# They are gone before an agent's code runs.
DRAWING = (
    *("matplotlib", "matplotlib.animation", "matplotlib.collections", "matplotlib.pyplot"),
    *("mpl_toolkits", "mpl_toolkits.mplot3d"),
)
stand_ins = {name: ModuleType(name) for name in DRAWING if name not in sys.modules}
for module in stand_ins.values():
    vars(module)["Axes3D"] = None  # the one name that is imported from one of them
sys.modules.update(stand_ins)
import reasoning_gym  # noqa: E402
from reasoning_gym.algorithmic import binary_matrix, spiral_matrix, string_insertion  # noqa: E402
from reasoning_gym.factory import DATASETS  # noqa: E402
from reasoning_gym.games import n_queens  # noqa: E402

for name in stand_ins:
    del sys.modules[name]

MOST_NAMED = 8  # task names in a refusal
FORMULAS = frozenset(
    (
        "simple_integration",
        "intermediate_integration",
        "polynomial_multiplication",
        "puzzle24",
        "countdown",
    )
)
OPERATORS = frozenset("+-*/^(),") | {"**"}
FUNCTIONS = frozenset(
    (
        "sqrt",
        "exp",
        "log",
        "ln",
        "abs",
        "Abs",
        "pi",
        "sin",
        "cos",
        "tan",
        "sec",
        "csc",
        "cot",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "asinh",
        "acosh",
        "atanh",
    )
)
LAYOUT = (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER)

for module in (binary_matrix, n_queens, spiral_matrix, string_insertion):
    module.eval = ast.literal_eval  # their score_answer evaluates the answer


class ReasoningTask:
    """One question of a reasoning-gym dataset, as an environment.

    Arguments: task (a dataset of reasoning-gym), seed, index within the seed's questions.

    The answer is in this process; the agent's code runs in another (`Sandbox.python`).
    """

    def __init__(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> None:
        task, seed, index = (
            str(arguments["task"]),
            int(arguments.get("seed", 0)),
            int(arguments.get("index", 0)),
        )
        if task not in DATASETS:
            some = (
                f"{', '.join(sorted(DATASETS)[:MOST_NAMED])} and {len(DATASETS) - MOST_NAMED} more"
            )
            raise InvalidArguments(
                "task", f"{task!r} is no task of reasoning-gym; there are {some}"
            )
        self._task = task
        self._dataset = reasoning_gym.create_dataset(task, seed=seed, size=index + 1)
        self._entry = self._dataset[index]
        self._sandbox = sandbox

    def first(self) -> Outcome:
        """Return the question."""
        return Outcome(output=str(self._entry["question"]), reward=0.0)

    def step(self, arguments: Mapping[str, Any]) -> Outcome:
        """Run `code` and show its output, or score `answer` from 0 to 1, which ends the task."""
        if "code" in arguments:
            return self._sandbox.python(str(arguments["code"]))
        score = self._score(str(arguments["answer"]))
        return Outcome(output=f"score {score:g}", reward=score, done=True)

    def _score(self, answer: str) -> float:
        if self._task in FORMULAS and not is_formula(answer):
            return 0.0
        try:
            score = float(self._dataset.score_answer(answer, self._entry))
        except Exception:  # noqa: BLE001 - some rules raise for what they cannot read
            return 0.0
        return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


def is_formula(text: str) -> bool:
    """Return whether a text is made of numbers, single letters, operators and functions of
    mathematics alone.
    """
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text.strip()).readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return all(
        token.type in LAYOUT
        or token.type == tokenize.NUMBER
        or (token.type == tokenize.OP and token.string in OPERATORS)
        or (token.type == tokenize.NAME and (len(token.string) == 1 or token.string in FUNCTIONS))
        for token in tokens
    )
