"""Check the built-in rewards on the golds of public sets: `python -m treadle_bench.golds.check
--data DIR`.

Each task's gold is scored as an answer to itself, in three rewritings (`form`, `spaces`, `units`),
against another task's gold (`another`) and against itself with one digit or letter changed
(`altered`). The first four are right, the last two are wrong. A third of the golds, chosen by their
hash, is the part `aside`: for a last check, after all failures of the part `open` are cured.

Keys of what is printed: of each set `tasks`, `unscored` (tasks that no built-in reward scores), and
of each part and kind of answer how many are `right` (as they should be) `of` how many. `failures`
has the others. Reference solutions of code are run as they are, without a sandbox.
"""

import argparse
import ast
import gzip
import json
import multiprocessing
import os
import random
import re
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track
from treadle_cli.exits import Terminal
from treadle_tools.rewards import exact_match, mathematics, python_tests
from treadle_tools.tool import Outcome

SEED = 3  # of what is altered
ASIDE = 3  # one gold of so many is in the part `aside`
# Also what begins with _
IMPORT = "from solution import *\nfrom solution import {entry}"
DEFINITION = re.compile(r"^(?:def|class)\s+(\w+)", re.MULTILINE)
PROGRAMS_AT_ONCE = 40  # that one run of pytest tests
REWRITINGS = ("form", "spaces", "units")
RIGHT = ("itself", *REWRITINGS)
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """A task of a set. reward: the function that scores it. gold: what it is scored against; of
    code, the tests. answer: a right one."""

    reward: str
    gold: Any
    answer: str

    def arguments(self, answer: str) -> Arguments:
        """Return the arguments of the reward for an answer."""
        if self.reward == "python_tests":
            return {
                "files": {"solution.py": answer},
                "tests": {"test_it.py": self.gold},
                "all_or_nothing": True,
            }
        options = {"ignore_case": True} if self.reward == "exact_match" else {}
        return {"answer": answer, "expected": self.gold, **options}


@dataclass(frozen=True)
class Case:
    """One comparison. part: open or aside. weight: how many tasks have this gold."""

    set_name: str
    part: str
    kind: str
    task: Task
    answer: str
    weight: int


def read_tasks(path: Path) -> Iterator[Task | None]:
    """Yield the tasks of a set, None for one that no built-in reward scores.

    A set is a file of JSON lines, compressed by gzip, whose records hold the fields of its origin.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield _task_of(json.loads(line))


def _task_of(record: Mapping[str, Any]) -> Task | None:
    match record:
        case {"test": test, "entry_point": entry, "prompt": prompt, "canonical_solution": body}:
            tests = f"{IMPORT.format(entry=entry)}\n{test}\n\ndef test_it():\n    check({entry})\n"
            return Task("python_tests", tests, prompt + body)
        case {"test_list": tests, "code": code, "test_setup_code": setup}:
            asserts = "\n    ".join(tests)
            called = [name for name in DEFINITION.findall(code) if name in asserts]
            line = IMPORT.format(entry=", ".join(called or ["*"]))
            text = f"{line}\n{setup}\n\ndef test_it():\n    {asserts}\n"
            return Task("python_tests", text, code)
        case {"ground_truth": str(gold)} | {"problem": _, "solution": str(gold)}:
            return Task("math_equal", gold, gold)
        case {"question": str(), "answer": str(gold), "type": _}:
            return Task("exact_match", gold, gold)
        case {"question": str(), "answer": str(gold)}:
            return Task("math_equal", gold, gold)
        case {"category": "memory", "ground_truth": [*golds]}:
            return Task("exact_match", golds, golds[0])
    return None


def cases_of(set_name: str, tasks: Iterable[Task]) -> Iterator[Case]:
    """Yield what is compared of a set: each gold once, and each final answer once rewritten."""
    counts = Counter((task.reward, json.dumps(task.gold), task.answer) for task in tasks)
    by_final: dict[str, list[tuple[Task, int]]] = defaultdict(list)
    for (reward, gold, answer), count in counts.items():
        task = Task(reward, json.loads(gold), answer)
        by_final[final_of(task)].append((task, count))
    rng = random.Random(SEED)
    finals = list(by_final)
    for at, (final, same) in enumerate(by_final.items()):
        part = "open" if zlib.crc32(final.encode()) % ASIDE else "aside"
        for task, count in same:
            yield Case(set_name, part, "itself", task, task.answer, count)
        task, weight = same[0][0], sum(count for _, count in same)
        answers = {kind: REWRITE[task.reward](kind, final) for kind in REWRITINGS}
        if len(finals) > 1:
            answers["another"] = finals[at - 1]
        if task.reward != "python_tests" and (altered := alter(final, rng)) is not None:
            answers["altered"] = altered
        for kind, answer in answers.items():
            yield Case(set_name, part, kind, task, answer, weight)


def final_of(task: Task) -> str:
    """Return the final answer of a gold that is a whole solution, without a point behind it."""
    if task.reward != "math_equal":
        return task.answer
    formula = mathematics.read_gold(task.answer)
    return formula.text + formula.unit


def rewrite_formula(kind: str, gold: str) -> str:
    """Return a formula as another model may write it."""
    formula = mathematics.read_gold(gold)
    if kind == "form":
        fraction = r"\dfrac" if r"\dfrac" not in gold else r"\frac"
        text = re.sub(r"\\[dt]?frac(?![A-Za-z])", lambda _: fraction, gold)
        if r"\left" not in text and text[:1] in ("(", "[") and text[-1:] in (")", "]"):
            text = rf"\left{text[:-1]}\right{text[-1]}"
        return rf"First I try \boxed{{0}}, which is wrong. The final answer is $\boxed{{{text}}}$."
    if kind == "spaces":
        if re.search(r"[A-Za-z]{3}", re.sub(r"\\[A-Za-z]+(\{[^{}]*\})?", "", gold)):
            return f" {gold} ".replace(" ", "  ") + "\n"
        if r"\begin" in gold or r"\left" in gold:
            return f" {gold} "
        signs = r"(?<![\^_{(\[,=<>/|:\\\s])(?<!\\right)\s*([+\-=<>])\s*(?=[^,)\]}])"
        return " " + re.sub(signs, r" \1 ", gold) + " "
    if formula.unit:
        return formula.text
    if re.search(r"\\(?:text|mbox)|[=<>]|\\[lg]eq?(?![A-Za-z])|\\in(?![A-Za-z])", gold):
        return rf"\boxed{{\displaystyle {gold}}}"
    is_word = re.fullmatch(r"[A-Za-z][A-Za-z ]+", gold)
    return rf"\boxed{{\text{{{gold}}}}}" if is_word else rf"\boxed{{{gold}\text{{ units}}}}"


def rewrite_text(kind: str, gold: str) -> str:
    """Return a text in other letters, with more spaces, or with spaces that do not break."""
    if kind == "form":
        swapped = gold.swapcase()  # but for letters that have no other case alone
        return swapped if swapped.casefold() == gold.casefold() else gold
    return gold.replace(" ", "   " if kind == "spaces" else "\N{NO-BREAK SPACE}") + "\n"


def rewrite_code(kind: str, code: str) -> str:
    """Return a program as another formatter writes it, with comments, or with tests of its own."""
    if kind == "form":
        return ast.unparse(ast.parse(code))
    if kind == "spaces":
        return "# A solution\n\n" + code.replace("\r\n", "\n").rstrip() + "\n\n\n# Its end\n"
    return f"{code}\n\n\ndef test_mine():\n    assert True\n"


REWRITE: Mapping[str, Callable[[str, str], str]] = {
    "math_equal": rewrite_formula,
    "exact_match": rewrite_text,
    "python_tests": rewrite_code,
}


def alter(gold: str, rng: random.Random) -> str | None:
    """Return a gold with one digit changed, or else one letter outside of LaTeX's commands."""
    digits = [found.start() for found in re.finditer(r"\d", gold)]
    if digits:
        at = rng.choice(digits)
        # A leading zero would change nothing else.
        digit = rng.choice([each for each in "123456789" if each != gold[at]])
        return gold[:at] + digit + gold[at + 1 :]
    letters = [
        found.start("letter")
        for found in re.finditer(r"\\(?:begin|end)\{\w+\}|\\[A-Za-z]+|(?P<letter>[A-Za-z])", gold)
        if found["letter"]
    ]
    if not letters:
        return None
    at = rng.choice(letters)
    return gold[:at] + ("w" if gold[at] in "qQ" else "q") + gold[at + 1 :]


def score(cases: Sequence[Case]) -> list[tuple[Case, float]]:
    """Return the reward of each case; -1 where there is none."""
    if len(cases) > 1 and (share := _score_together(cases)) in (0.0, 1.0):
        return [(case, share) for case in cases]
    functions = {
        "math_equal": mathematics.math_equal,
        "exact_match": exact_match,
        "python_tests": _python_tests,
    }
    scored = []
    for case in cases:
        outcome = functions[case.task.reward](case.task.arguments(case.answer))
        scored.append((case, -1.0 if outcome.reward is None else outcome.reward))
    return scored


def _score_together(cases: Sequence[Case]) -> float | None:
    """Return the share of programs that pass in one run of pytest, which is much quicker."""
    return _python_tests(
        {
            "files": {f"solution_{at}.py": case.answer for at, case in enumerate(cases)},
            "tests": {
                f"test_{at}.py": case.task.gold.replace("solution", f"solution_{at}", 2)
                for at, case in enumerate(cases)
            },
        }
    ).reward


def _python_tests(arguments: Arguments) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        python_tests.WORK = Path(folder) / "work"
        return python_tests.python_tests(arguments)


def check(paths: Iterable[Path], part: str, workers: int) -> dict[str, Any]:
    """Score all cases of some sets. part: open, aside or all."""
    sets: dict[str, dict[str, Any]] = {}
    cases: list[Case] = []
    for path in paths:
        name = path.name.removesuffix(".jsonl.gz")
        tasks = list(read_tasks(path))
        scored = [task for task in tasks if task is not None]
        sets[name] = {"tasks": len(tasks), "unscored": len(tasks) - len(scored)}
        cases += [case for case in cases_of(name, scored) if part in ("all", case.part)]
    right: Counter[tuple[str, str, str]] = Counter()
    of: Counter[tuple[str, str, str]] = Counter()
    failures = []
    with multiprocessing.Pool(workers) as pool:
        batches = list(_batches(cases))
        found = pool.imap_unordered(score, batches, chunksize=4)
        for scored_batch in track(found, "scoring", len(batches), console=Terminal(stderr=True)):
            for case, reward in scored_batch:
                key = (case.set_name, case.part, case.kind)
                of[key] += case.weight
                if reward == float(case.kind in RIGHT):
                    right[key] += case.weight
                else:
                    failures.append(
                        {
                            "set": case.set_name,
                            "kind": case.kind,
                            "gold": case.task.gold,
                            "answer": case.answer,
                            "reward": reward,
                        }
                    )
    for set_name, its_part, kind in sorted(of):
        counted = {"right": right[set_name, its_part, kind], "of": of[set_name, its_part, kind]}
        sets[set_name].setdefault(its_part, {})[kind] = counted
    return {"sets": sets, "failures": failures}


def _batches(cases: Iterable[Case]) -> Iterator[Sequence[Case]]:
    """Yield cases that are scored together: programs of the same kind; of the others one each."""
    programs: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.task.reward == "python_tests":
            programs[case.kind].append(case)
        else:
            yield (case,)
    for alike in programs.values():
        for at in range(0, len(alike), PROGRAMS_AT_ONCE):
            yield alike[at : at + PROGRAMS_AT_ONCE]


def main() -> None:
    """Print what `check` finds in all sets of --data as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="a folder of NAME.jsonl.gz")
    parser.add_argument("--sets", default="*", help="a pattern of their names")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--part", choices=("open", "aside", "all"), default="all")
    options = parser.parse_args()
    if not (paths := sorted(options.data.glob(f"{options.sets}.jsonl.gz"))):
        parser.error(f"--data: no set {options.sets}.jsonl.gz in {options.data}")
    found = check(paths, options.part, options.workers)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
