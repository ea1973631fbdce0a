"""Pages from templates: values are escaped in HTML and not in Markdown, and a name without a value is an error."""

import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError
from treadle_cli.templates import render


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "pages_of_a_test"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name in ("page.html.j2", "page.md.j2"):
        (folder / name).write_text('{{ who }} {{ share | number(".1%") }}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, folder.name, raising=False)
    return folder.name


def test_values_are_escaped_in_html_alone(package: str) -> None:
    assert render(package, "page.html.j2", who="<b>", share=0.5) == "&lt;b&gt; 50.0%\n"
    assert render(package, "page.md.j2", who="<b>", share=0.5) == "<b> 50.0%\n"


def test_a_name_without_a_value_is_an_error(package: str) -> None:
    with pytest.raises(UndefinedError, match="who"):
        render(package, "page.md.j2", share=0.5)
