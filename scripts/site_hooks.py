"""Give mkdocs the pages of the whole repository, each at its own path.

Pages are beside what they describe (services/*/README.md, research/results/*.md), and link to each
other and to source files. mkdocs reads one folder only. So the site gets every page that git would
commit, with the pictures and source files to which pages link: a link that works in a checkout
works in the site. Two pages are made here and are not committed: all commands of `treadle` with
their options, from the command line itself, and the reference of every RPC, from the comments of
the protos.
"""

import posixpath
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = "cli/commands.md"
RPCS = "docs/rpc.md"
LINK = re.compile(r"\]\(([^)\s#]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the patterns of the navigation."""
    pages = list_pages()
    nav = config.nav or []
    config.nav = expand(nav, pages, named_in(nav))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs_dir by those of the repository."""
    pages = list_pages()
    names = [*pages, *linked_files(pages), "docs/site.css"]
    own = [
        File.generated(
            config, name, abs_src_path=str(ROOT / name), inclusion=InclusionLevel.INCLUDED
        )
        for name in names
    ]
    for name, content in ((COMMANDS, describe_commands()), (RPCS, describe_rpcs())):
        own.append(File.generated(config, name, content=content, inclusion=InclusionLevel.INCLUDED))
    return Files([*(file for file in files if file.src_dir != config.docs_dir), *own])


def on_page_content(html: str, **_: Any) -> str:
    """Show a bar in a table's code as a bar: it is escaped in Markdown, and Python-Markdown keeps
    the backslash."""
    return re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), html)


def list_tracked() -> list[str]:
    """Return the files that git would commit, by their paths in the repository."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return sorted(name for name in set(listed) if name and (ROOT / name).is_file())


def list_pages() -> list[str]:
    """Return the pages of the site. Pages of hidden folders are for the forge alone."""
    return [name for name in list_tracked() if name.endswith(".md") and not name.startswith(".")]


def linked_files(pages: list[str]) -> list[str]:
    """Return tracked files that are not pages and to which a page links."""
    tracked = set(list_tracked())
    targets = {
        posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        for page in pages
        for target in LINK.findall((ROOT / page).read_text())
    }
    return sorted(name for name in targets & tracked if not name.endswith(".md"))


def named_in(nav: Any) -> set[str]:
    """Return the pages that a navigation names without a pattern."""
    if isinstance(nav, str):
        return set() if "*" in nav else {nav}
    parts = nav.values() if isinstance(nav, dict) else nav
    return {page for part in parts for page in named_in(part)}


def expand(nav: list[Any], pages: list[str], taken: set[str]) -> list[Any]:
    """Return a navigation with pages in place of its patterns, each page once. A section without
    pages is left out.

    taken: pages that have a place; those which are added here join them.
    """
    expanded: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            found = [page for page in pages if page not in taken and matches(page, entry)]
            taken.update(found)
            expanded += found
        elif isinstance(entry, dict):
            [(title, content)] = entry.items()
            inner = expand(content, pages, taken) if isinstance(content, list) else content
            if inner:
                expanded.append({title: inner})
        else:
            expanded.append(entry)
    return expanded


def matches(page: str, pattern: str) -> bool:
    """Return whether a page has the pattern's form; a star matches no slash."""
    return page.count("/") == pattern.count("/") and fnmatch(page, pattern)


def describe_commands() -> str:
    """Return a page with every command of `treadle`, its arguments and options."""
    import typer
    from treadle_cli.app import COMMANDS, app, load_command
    from typer.cli import get_docs_for_click

    command: Any = typer.main.get_command(app)
    command.commands |= {name: load_command(name) for name in COMMANDS}
    for each in (*command.commands.values(), *command.commands["predictor"].commands.values()):
        # without this the lists of commands cut the text at 45 characters
        each.short_help = (each.help or "").split("\n\n")[0]
    return get_docs_for_click(
        obj=command,
        ctx=typer.Context(command, info_name="treadle"),
        name="treadle",
        title="Commands and options",
    )


def describe_rpcs() -> str:
    """Return the page with every RPC and message, as the venv of the generator makes it."""
    command = f'"$("{ROOT}/scripts/codegen-venv.sh")/python" "{ROOT}/scripts/rpc_reference.py"'
    return subprocess.run(
        ["bash", "-c", command], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
