"""The documentation: it builds without a warning, loads nothing from elsewhere, and each of its
commands is run by CI or says why not (docs/commands.yml)."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from support.pages import ROOT, find_commands, list_pages

LISTED: list[dict[str, object]] = yaml.safe_load((ROOT / "docs/commands.yml").read_text())
TEST = re.compile(r"(tests/\S+\.py)::(\w+)")
BUILD_S = 300.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make docs` does it."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_S,
    )
    assert built.returncode == 0, built.stderr
    return folder


class _Loads(HTMLParser):
    """What a page loads: sources of scripts, pictures and frames, and style sheets."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        if tag == "link" and named.get("rel") not in ("canonical", "next", "prev"):
            self.urls.append(named.get("href") or "")
        self.urls.append(named.get("src") or "")


@pytest.mark.full
@pytest.mark.timeout(BUILD_S)
def test_the_site_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    """Links within it and their anchors are checked by mkdocs, and each page has its place in the
    navigation."""
    for page in list_pages():
        path = Path(page)
        folder = path.parent if path.name == "README.md" else path.with_suffix("")
        assert (site / folder / "index.html").is_file(), page
    parts = {
        "cli/commands": 'id="treadle-simulate"',
        "docs/rpc": 'id="treadle.scheduler.v1.SchedulerService.ScheduleStep"',
        "docs/reference/client": 'id="treadle.Client.push_weights"',  # of a base class
        "docs/reference/environments": 'id="treadle.environments.EnvManager"',
    }
    for generated, part in parts.items():
        assert part in (site / generated / "index.html").read_text(), generated


@pytest.mark.full
@pytest.mark.timeout(BUILD_S)
def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list_pages())
    elsewhere = {
        url
        for page in pages
        for url in _Loads(page.read_text()).urls
        if re.match(r"(\w+:)?//", url)
    }
    assert not elsewhere
    sheets = [path.read_text() for path in site.rglob("*.css")]
    assert sheets and not [
        sheet for sheet in sheets if re.search(r"url\(\s*['\"]?(https?:)?//", sheet)
    ]


def test_external_links_are_https() -> None:
    """CI has no network: their form alone is checked."""
    links = [
        link
        for page in list_pages()
        for link in re.findall(r"\]\(((?:http|ftp)\w*:[^)\s]*)", read(page))
    ]
    assert links
    assert not [
        link for link in links if not re.fullmatch(r"https://[\w.-]+\.[a-z]{2,}(/\S*)?", link)
    ]


def test_every_command_of_the_pages_is_listed_once_with_what_runs_it_or_why_nothing_does() -> None:
    shown: dict[str, str] = {}
    for page in list_pages():
        try:
            shown |= dict.fromkeys(find_commands(read(page)), page)
        except ValueError as error:
            pytest.fail(f"{page}: {error}")
    listed = [command for entry in LISTED for command in entry["commands"]]  # type: ignore[attr-defined]
    assert len(listed) == len(set(listed)), "a command is listed twice"
    missing = {command: page for command, page in shown.items() if command not in listed}
    assert not missing, f"add to docs/commands.yml, under `run` or `not_run`: {missing}"
    assert not set(listed) - set(shown), "no page shows these any more"


@pytest.mark.parametrize(
    "entry", LISTED, ids=lambda entry: str(entry.get("run") or entry.get("not_run"))[:60]
)
def test_what_is_said_to_run_commands_is_there(entry: dict[str, object]) -> None:
    """A test by its file and name, or a command of .ci/run."""
    assert set(entry) in ({"run", "commands"}, {"not_run", "commands"}) and entry["commands"]
    if "not_run" in entry:
        assert len(str(entry["not_run"]).split()) >= 4, "say why in a sentence"
        return
    run = str(entry["run"])
    if named := TEST.fullmatch(run):
        text = read(named[1])
        assert re.search(rf"^(async )?def {named[2]}\(", text, re.MULTILINE), f"no test {run}"
    else:
        lines = [line.removeprefix("timed ") for line in read(".ci/run").splitlines()]
        assert run in lines, f"{run} is neither FILE::TEST nor a line of .ci/run"


def test_commands_are_found_in_blocks_and_nowhere_else() -> None:
    page = """# T
    make a   # why

Text `make b`.

```sh
# nothing
X=1 make c#d
curl x \\
  -d '{}'
for each in a b; do
  make $each
done
```

```python
make = 1
```

- item

    - not code
"""
    assert find_commands(page) == [
        "make a",
        "X=1 make c#d",
        "curl x -d '{}'",
        "for each in a b; do make $each done",
    ]
    assert find_commands("```console\n$ treadle up\nready\n```\n") == ["treadle up"]
    with pytest.raises(ValueError, match="sh"):
        find_commands("```\ntreadle up\n```\n")


def read(name: str) -> str:
    return (ROOT / name).read_text()
