"""The size and the shape of the code: a budget for each package, and few modules a folder.

A budget is a ceiling with a little room. Whoever needs more raises the number here and says why in the commit.
"""

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Hand-written lines and modules at most, by folder of the tree; MOST_LINES and MOST_MODULES hold for all together.
BUDGETS = {
    "bench": (11_080, 69),
    "cli": (10_430, 78),
    "clients/python": (8_390, 52),
    "core": (12_960, 73),
    "examples": (820, 8),
    "learned": (2_170, 14),
    "runtime": (3_230, 19),
    "scripts": (640, 4),
    "services/console": (1_510, 12),
    "services/gateway": (3_300, 22),
    "services/migrator": (860, 8),
    "services/placement": (270, 6),
    "services/predictor": (1_330, 13),
    "services/rollout": (1_790, 10),
    "services/scheduler": (2_130, 12),
    "services/sidecar": (4_340, 26),
    "services/tools": (10_120, 69),
    "sim": (7_180, 43),
}
MOST_LINES, MOST_MODULES, MOST_TEST_LINES = 82_500, 538, 56_760
MOST_LINES_A_MODULE = 450  # 100 to 400 lines are usual; a longer module holds more than one noun
MOST_MODULES_A_FOLDER = 15  # `__init__` counted; above, a folder wants subfolders with names that say a question


def hand_written() -> dict[Path, int]:
    """Lines of each Python file that git would commit, but for generated stubs."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    paths = [Path(name) for name in listed if "_pb2" not in name and (ROOT / name).is_file()]
    return {path: len((ROOT / path).read_text().splitlines()) for path in paths}


def test_every_package_keeps_its_budget() -> None:
    lines: Counter[str] = Counter()
    modules: Counter[str] = Counter()
    for path, count in hand_written().items():
        folder = "/".join(path.parts[: 2 if path.parts[0] in ("services", "clients") else 1])
        if folder != "tests":
            lines[folder] += count
            modules[folder] += 1
    assert set(lines) == set(BUDGETS)
    over = [name for name, budget in BUDGETS.items() if lines[name] > budget[0] or modules[name] > budget[1]]
    assert not over, {name: (lines[name], modules[name]) for name in over}
    assert lines.total() <= MOST_LINES
    assert modules.total() <= MOST_MODULES


def test_the_tests_keep_their_budget() -> None:
    assert sum(count for path, count in hand_written().items() if path.parts[0] == "tests") <= MOST_TEST_LINES


def test_no_folder_holds_more_modules_than_a_reader_can_survey() -> None:
    modules = Counter(str(path.parent) for path in hand_written() if path.parts[0] != "tests")
    assert not {name: n for name, n in modules.items() if n > MOST_MODULES_A_FOLDER}


def test_no_module_holds_more_than_one_noun() -> None:
    assert not {
        str(path): lines
        for path, lines in hand_written().items()
        if path.parts[0] != "tests" and lines > MOST_LINES_A_MODULE
    }
