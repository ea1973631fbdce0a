"""Which committed figures are older than the code that they measure: `make check` prints them.

Each JSON names the commit that it was measured on. Its bench names the code that decides the figure
(`Bench.decides`). A figure is old if the syntax tree of that code has changed since. Comments,
docstrings and line breaks are not part of the tree.
"""

import ast
import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "research" / "results"
UNKNOWN = "unknown"


def newest_commit(folders: Sequence[str]) -> str:
    """Return the short name of the last commit that changed these folders, with a "+" where files
    there differ from it; UNKNOWN outside of a checkout."""
    try:
        name = _git("log", "-1", "--format=%h", "--", *folders).decode().strip()
        changed = _git("status", "--porcelain", "--", *folders)
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return name + ("+" if changed else "")


def stale_figures(decides: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the commit of each committed figure that is old, by bench; UNKNOWN where the history
    does not have it. decides: folders by bench."""
    stale = {}
    for name, folders in decides.items():
        file = RESULTS / f"{name}.json"
        if file.exists():
            commit = json.loads(file.read_text()).get("measured_on", UNKNOWN)
            if not folders or commit == newest_commit(folders):
                continue
            if _digest_at(commit, folders) != digest(_files_now(folders)):
                stale[name] = commit
    return stale


def digest(files: Mapping[str, bytes]) -> str:
    """Return a digest of Python files, by name, that depends on what they do alone."""
    found = hashlib.sha256()
    for name, source in sorted(files.items()):
        found.update(f"{name}\n{ast.dump(_without_docstrings(source))}\n".encode())
    return found.hexdigest()


def _without_docstrings(source: bytes) -> ast.Module:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kept = [
                each
                for each in node.body
                if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]
            node.body = kept or [ast.Pass()]
    return tree


def _files_now(folders: Sequence[str]) -> dict[str, bytes]:
    names = _git("ls-files", "--", *folders).decode().split("\n")
    return {
        name: (ROOT / name).read_bytes()
        for name in names
        if name.endswith(".py") and (ROOT / name).exists()
    }


def _digest_at(commit: str, folders: Sequence[str]) -> str:
    try:
        packed = _git("archive", "--format=tar", commit.rstrip("+"), *folders)
    except subprocess.CalledProcessError:  # a folder that was not there, or no such commit here
        return UNKNOWN
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = ((each.name, archive.extractfile(each)) for each in archive)
        files = {name: file.read() for name, file in members if file and name.endswith(".py")}
    return digest(files)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout
