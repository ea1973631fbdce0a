"""Print the test files that can see a change: `changed_tests.py [COMMIT]`, against HEAD by default.

A test sees a file when it imports it, directly or through others, or names its module in a string,
as tests do that start a service as a process. Of `conftest.py` it sees the fixtures that it takes.
A file that is not Python counts as a change of all modules in its folder and below, and of the
architecture tests, which read pages, manifests and protos.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Folders that hold packages; the services' folders are among them.
SOURCES = [
    *("clients/python", "core", "learned", "runtime", "sim", "cli", "research", "tests"),
    *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("services/*"))),
]
CONFTEST = Path("tests/conftest.py")
ARCHITECTURE = Path("tests/architecture")


def git(*words: str) -> list[Path]:
    """Return the paths that a git command prints, one a line."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines()]


def modules_of(paths: list[Path]) -> dict[str, Path]:
    """Map names under which Python files are imported to the files; a package is its `__init__`."""
    found = {}
    for path in paths:
        for source in SOURCES:
            if path.is_relative_to(source):
                parts = path.relative_to(source).with_suffix("").parts
                found[".".join(part for part in parts if part != "__init__")] = path
    return found


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield names of modules that the code imports or has as a string; many name nothing in this
    tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A service is started by its module, or by its short name where several are.
            yield from (node.value, f"{node.value}.__main__", f"treadle_{node.value}.__main__")


def seen_by(tree: ast.AST, modules: dict[str, Path]) -> set[Path]:
    """Return the files of this tree that the code names itself."""
    return {modules[name] for name in names_in(tree) if name in modules}


def fixtures(modules: dict[str, Path]) -> dict[str, set[Path]]:
    """Return what each fixture of `conftest.py` sees, by its name."""
    tree = parse(CONFTEST)
    imported = {
        alias.asname or alias.name: seen_by(ast.Module([node], []), modules)
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    functions = [
        node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return {
        function.name: set().union(
            seen_by(function, modules),
            *(
                imported.get(node.id, set())
                for node in ast.walk(function)
                if isinstance(node, ast.Name)
            ),
        )
        for function in functions
    } | imported


def changed_tests(changed: set[Path], tracked: list[Path]) -> list[Path]:
    """Return the test files that can see one of the changed files, in order."""
    python = [path for path in tracked if path.suffix == ".py"]
    modules = modules_of(python)
    sees = {path: seen_by(parse(path), modules) for path in python}
    of_fixture = fixtures(modules)
    tests = [path for path in python if path.name.startswith("test_")]
    for test in tests:
        words = {node.arg for node in ast.walk(parse(test)) if isinstance(node, ast.arg)}
        sees[test] = sees[test].union(*(of_fixture[word] for word in words & of_fixture.keys()))
    others = {path for path in changed if path.suffix != ".py"}
    folders = {path.parent for path in others} - {Path()}
    changed = changed | {path for path in python if folders & {*path.parents}}
    chosen = []
    for test in tests:
        reached, open_ = {test}, [test]
        while open_:
            for path in sees[open_.pop()] - reached:
                reached.add(path)
                open_.append(path)
        if reached & changed or (others and test.is_relative_to(ARCHITECTURE)):
            chosen.append(test)
    return chosen


def main() -> None:
    commit = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    tracked = [
        path
        for path in git("ls-files", "--cached", "--others", "--exclude-standard")
        if (ROOT / path).exists()
    ]
    changed = {
        *git("diff", "--name-only", commit),
        *git("ls-files", "--others", "--exclude-standard"),
    }
    for path in changed_tests(changed & {*tracked}, tracked):
        print(path)


if __name__ == "__main__":
    main()
