"""The commands that stand on the pages of the documentation."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
SHELLS = frozenset({"sh", "bash", "shell"})
COMMENT = re.compile(r"(^|\s+)#(\s.*)?$")
# How a command begins, for blocks without a language.
PROGRAMS = "treadle|python|pip|make|docker|kubectl|curl|npm|go|git|export"
BEGINS = re.compile(rf"(\$ |[A-Z_]+=\S* |(\.venv/bin/)?({PROGRAMS}) )")


def list_pages() -> list[str]:
    """Pages of the site, by their paths in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return sorted(
        name
        for name in set(listed)
        if name and not name.startswith(".") and (ROOT / name).is_file()
    )


def find_commands(text: str) -> list[str]:
    """Commands in the indented blocks and in the shell blocks of a page, in their order; comments
    are left out.

    Raises ValueError where a block without a language begins like a command: it is to be marked as
    `sh`.
    """
    found: list[str] = []
    for token in MarkdownIt("commonmark").parse(text):
        language = token.info.split()[0] if token.info.strip() else ""
        if token.type == "code_block" or (token.type == "fence" and language in SHELLS):
            found += commands_of(token.content)
        elif token.type == "fence" and language == "console":  # what follows no prompt is output
            found += (line[2:] for line in token.content.splitlines() if line.startswith("$ "))
        elif token.type == "fence" and not language and BEGINS.match(token.content):
            raise ValueError(f"mark this block as ```sh: {token.content.splitlines()[0]}")
    return found


def commands_of(block: str) -> Iterator[str]:
    """Commands of a block, each in one line. A line goes on after a backslash, in deeper lines, and
    until `done`."""
    command = ""
    for line in block.splitlines():
        bare = COMMENT.sub("", line).rstrip()
        if not bare:
            continue
        goes_on = command.endswith("\\") or bare.startswith(" ") or bare in ("done", "fi", "}")
        if command and not goes_on:
            yield command
            command = ""
        command = f"{command.removesuffix(chr(92)).rstrip()} {bare.strip()}".strip()
    if command:
        yield command
