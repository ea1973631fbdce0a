"""What is generated from protos/ is committed as it is, a breaking change is found, and the bundle
is whole."""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
STUB_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def stubs_under(folder: Path) -> dict[str, bytes]:
    """Relative path → content of every generated file."""
    files = [file for pattern in STUB_PATTERNS for file in folder.rglob(pattern)]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_regenerating_the_stubs_changes_nothing(tmp_path: Path) -> None:
    generated = run(SCRIPTS / "generate-protos.sh", tmp_path)
    assert generated.returncode == 0, generated.stderr
    committed, fresh = stubs_under(ROOT / "clients" / "python"), stubs_under(tmp_path)
    assert sorted(committed) == sorted(fresh)
    assert [name for name in fresh if fresh[name] != committed[name]] == []


def test_every_proto_package_is_its_path_and_versioned() -> None:
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    assert protos
    for proto in protos:
        package = ".".join(proto.parent.relative_to(ROOT / "protos").parts)
        assert f"\npackage {package};\n" in proto.read_text(), proto
        assert package.endswith(".v1"), proto


def replace(old: str, new: str) -> Callable[[str], str]:
    def edit(text: str) -> str:
        assert text.count(old) == 1
        return text.replace(old, new)

    return edit


SCHEDULER = "treadle/scheduler/v1/scheduler.proto"


@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (
            replace("  bool resume = 3;", "  bool resume = 6;"),
            'field "3" with name "resume" on message "OpenJobRequest"',
        ),
        (replace("  double weight = 4;", "  float weight = 4;"), 'Field "4" with name "weight"'),
        (replace("  rpc GetDirectory(", "  rpc GetPlaces("), 'RPC "GetDirectory"'),
        (replace("  OUTCOME_CANCELLED = 4;", "  OUTCOME_CANCELLED = 5;"), 'value "4"'),
    ],
    ids=["a renumbered field", "another type", "a renamed RPC", "a renumbered value"],
)
def test_a_breaking_change_is_found(tmp_path: Path, edit: Callable[[str], str], found: str) -> None:
    protos = tmp_path / "protos"
    shutil.copytree(ROOT / "protos", protos)
    (protos / SCHEDULER).write_text(edit((protos / SCHEDULER).read_text()))
    checked = run(SCRIPTS / "check-protos.sh", protos)
    assert checked.returncode != 0
    assert found in checked.stdout, checked.stdout


def test_an_addition_is_compatible_and_belongs_to_the_contract_once_it_is_released(
    tmp_path: Path,
) -> None:
    """A field is added, the protos are released, and the field is removed again.

    Result: the addition passes, the removal does not.
    """
    protos = tmp_path / "protos"
    shutil.copytree(ROOT / "protos", protos)
    before = (protos / SCHEDULER).read_text()
    added = replace("message OpenJobRequest {", "message OpenJobRequest {\n  string note = 6;")(
        before
    )
    (protos / SCHEDULER).write_text(added)
    released = run(SCRIPTS / "check-protos.sh", "--release", protos)
    assert released.returncode == 0, released.stdout
    (protos / SCHEDULER).write_text(before)
    checked = run(SCRIPTS / "check-protos.sh", protos)
    assert checked.returncode != 0
    assert 'field "6" with name "note"' in checked.stdout


def test_the_bundle_is_reproducible_and_has_what_its_pages_link_to(tmp_path: Path) -> None:
    first, second = (
        run(SCRIPTS / "bundle-protos.sh", tmp_path / name).stdout.strip() for name in ("a", "b")
    )
    assert Path(first).read_bytes() == Path(second).read_bytes()
    buf = run(SCRIPTS / "codegen-venv.sh").stdout.strip() + "/buf"
    built = run(buf, "build", f"{first}#strip_components=1,subdir=protos", "-o", "/dev/null")
    assert built.returncode == 0, built.stderr
    assert run("tar", "-xf", first, "-C", tmp_path).returncode == 0
    [root] = tmp_path.glob("treadle-protos-*")
    pages = list(root.rglob("*.md"))
    links = [
        (page, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    ]
    assert {page.name for page in pages} >= {"README.md", "clients.md", "rpc.md"}
    assert [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_the_reference_has_every_rpc_and_its_links_lead_somewhere() -> None:
    python = run(SCRIPTS / "codegen-venv.sh").stdout.strip() + "/python"
    page = run(python, SCRIPTS / "rpc_reference.py").stdout
    texts = [proto.read_text() for proto in (ROOT / "protos").rglob("*.proto")]
    rpcs = [name for text in texts for name in re.findall(r"^  rpc (\w+)\(", text, re.MULTILINE)]
    assert rpcs and all(f"**{name}** " in page for name in rpcs)
    anchors = re.findall(r'<a id="([^"]+)">', page)
    assert len(anchors) == len(set(anchors))
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= set(anchors)
