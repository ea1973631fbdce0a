"""The size of the house, as a reader meets it: modules a package and a folder, nouns a module, words of the pages.

A limit is a ceiling with a little room. A change that needs more makes room first; a limit is raised only with an ADR.
The files that a step passes through are counted in `tests/scenario/test_step_trace.py`.
"""

import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Modules at most, by folder of the tree; generated stubs, tests and `research` are not counted.
MOST_MODULES_OF = {
    "cli": 77,
    "clients/python": 52,
    "core": 73,
    "examples": 8,
    "learned": 14,
    "runtime": 20,
    "scripts": 4,
    "services/console": 12,
    "services/gateway": 22,
    "services/migrator": 9,
    "services/placement": 6,
    "services/predictor": 12,
    "services/rollout": 11,
    "services/scheduler": 12,
    "services/sidecar": 26,
    "services/tools": 53,
    "sim": 23,
}
MOST_MODULES = 436
MOST_MODULES_A_FOLDER = 15  # `__init__` counted; above, a folder wants subfolders with names that say a question
MOST_LINES_A_MODULE = 450  # 100 to 400 lines are usual; a longer module holds more than one noun
MOST_WORDS = 97_000  # of all pages; a reader with a task finds it in one page


def tracked(*patterns: str) -> list[Path]:
    """Files that git would commit, by path in the tree."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines() if (ROOT / name).is_file()]


def product_modules() -> list[Path]:
    """Hand-written modules of the product: without generated stubs, tests and `research`."""
    return [path for path in tracked("*.py") if "_pb2" not in path.name and path.parts[0] not in ("tests", "research")]


def package_of(path: Path) -> str:
    return "/".join(path.parts[: 2 if path.parts[0] in ("services", "clients") else 1])


def test_every_package_keeps_its_number_of_modules() -> None:
    modules = Counter(map(package_of, product_modules()))
    assert set(modules) == set(MOST_MODULES_OF)
    assert not {name: count for name, count in modules.items() if count > MOST_MODULES_OF[name]}
    assert modules.total() <= MOST_MODULES


@pytest.mark.parametrize("most", [MOST_MODULES_A_FOLDER])
def test_no_folder_holds_more_modules_than_a_reader_can_survey(most: int) -> None:
    modules = Counter(str(path.parent) for path in product_modules())
    assert not {name: count for name, count in modules.items() if count > most}


def test_no_module_holds_more_than_one_noun() -> None:
    lines = {str(path): len((ROOT / path).read_text().splitlines()) for path in product_modules()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES_A_MODULE}


def test_the_pages_keep_their_number_of_words() -> None:
    words = {str(path): len((ROOT / path).read_text().split()) for path in tracked("*.md")}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:20]
