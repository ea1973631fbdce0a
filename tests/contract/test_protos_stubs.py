"""The committed stubs are what the pinned generator makes of protos/."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
STUB_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def stubs_under(folder: Path) -> dict[str, bytes]:
    """Relative path → content of every generated file."""
    files = [file for pattern in STUB_PATTERNS for file in folder.rglob(pattern)]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_regenerating_the_stubs_changes_nothing(tmp_path: Path) -> None:
    generated = subprocess.run(
        [ROOT / "scripts" / "generate-protos.sh", tmp_path], capture_output=True, text=True, check=False
    )
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
