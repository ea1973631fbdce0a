"""The size of the house, as a reader meets it: modules a package and a folder, columns, words
of the pages.

A limit is a ceiling with a little room. A change that needs more makes room first; a limit is
raised only with an ADR. The files that a step passes through are counted in
`tests/scenario/test_step_trace.py`.
"""

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Modules at most, by folder of the tree; generated stubs, tests and `research` are not counted.
MOST_MODULES_OF = {
    "cli": 61,
    "clients/python": 45,
    "core": 61,
    "examples": 8,
    "learned": 11,
    "runtime": 18,
    "scripts": 5,
    "services/console": 10,
    "services/gateway": 19,
    "services/migrator": 9,
    "services/placement": 6,
    "services/predictor": 13,
    "services/rollout": 11,
    "services/scheduler": 11,
    "services/sidecar": 25,
    "services/tools": 50,
    "sim": 21,
}
MOST_MODULES = 384
MOST_MODULES_A_FOLDER = (
    15  # `__init__` counted; above, a folder wants subfolders with names that say a question
)
MOST_COLUMNS = 100
MOST_WORDS = 96_000  # of all pages; a reader with a task finds it in one page


def tracked(*patterns: str) -> list[Path]:
    """Files that git would commit, by path in the tree."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines() if (ROOT / name).is_file()]


def product_modules() -> list[Path]:
    """Hand-written modules of the product: without generated stubs, tests and `research`."""
    return [
        path
        for path in tracked("*.py")
        if "_pb2" not in path.name and path.parts[0] not in ("tests", "research")
    ]


def package_of(path: Path) -> str:
    return "/".join(path.parts[: 2 if path.parts[0] in ("services", "clients") else 1])


def test_every_package_keeps_its_number_of_modules() -> None:
    modules = Counter(map(package_of, product_modules()))
    assert set(modules) == set(MOST_MODULES_OF)
    assert not {name: count for name, count in modules.items() if count > MOST_MODULES_OF[name]}
    assert modules.total() <= MOST_MODULES


def test_no_folder_holds_more_modules_than_a_reader_can_survey() -> None:
    modules = Counter(str(path.parent) for path in product_modules())
    assert not {name: count for name, count in modules.items() if count > MOST_MODULES_A_FOLDER}


def test_no_line_of_the_product_is_wider_than_the_formatter_makes_it() -> None:
    wide = [
        f"{path}:{number}"
        for path in product_modules()
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1)
        if len(line) > MOST_COLUMNS
    ]
    assert not wide


def test_the_pages_keep_their_number_of_words() -> None:
    words = {str(path): len((ROOT / path).read_text().split()) for path in tracked("*.md")}
    assert sum(words.values()) <= MOST_WORDS, sorted(words.items(), key=lambda item: -item[1])[:20]
