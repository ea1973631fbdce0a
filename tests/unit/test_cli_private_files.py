"""Files and folders that no other user of the machine may read, or put in the place of ours."""

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from support.other_user import OTHER_USER, needs_root
from treadle_cli.certs import Authority, identities, make_certificates
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.engines import EnginePlan, with_key
from treadle_cli.options import make_private_folder, new_run_folder
from treadle_sidecar.engine.process import EngineSpec, engine_command

KEY = "correct-horse-battery-staple"


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Many systems have this one; `new_run_folder` changes that of the process."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_run_and_all_that_is_written_after_it_are_for_its_user(tmp_path: Path) -> None:
    folder = new_run_folder(tmp_path / "runs")
    (folder / "trajectories.jsonl").write_text("whole conversations")
    (folder / "logs").mkdir()
    found = [tmp_path / "runs", folder, folder / "logs", folder / "trajectories.jsonl"]
    assert [mode(path) for path in found] == [0o700, 0o700, 0o700, 0o600]


@needs_root
def test_a_run_is_written_to_no_folder_in_which_another_user_could_replace_it(
    tmp_path: Path,
) -> None:
    """A folder of another user's, and one that all may write; in one like /tmp nobody can."""
    theirs, open_to_all, like_tmp = (tmp_path / name for name in ("theirs", "open", "tmp"))
    for folder, allowed in ((theirs, 0o755), (open_to_all, 0o777), (like_tmp, 0o1777)):
        folder.mkdir()
        folder.chmod(allowed)
    os.chown(theirs, OTHER_USER, OTHER_USER)
    for folder in (theirs, open_to_all):
        with pytest.raises(UsageProblem, match="name a folder of your own"):
            new_run_folder(folder)
        assert list(folder.iterdir()) == []
    assert mode(new_run_folder(like_tmp)) == 0o700


def spoil(folder: Path, how: str) -> None:
    """What another user could have prepared, or could change."""
    key, certificate = folder / "ca.key", folder / "ca.crt"
    if how == "folder of another user":
        os.chown(folder, OTHER_USER, OTHER_USER)
    elif how == "folder that others may write":
        folder.chmod(0o770)
    elif how == "link of another user":
        folder.rename(folder.with_name("elsewhere"))
        folder.symlink_to(folder.with_name("elsewhere"))
        os.lchown(folder, OTHER_USER, OTHER_USER)
    elif how == "key of another user":
        os.chown(key, OTHER_USER, OTHER_USER)
    elif how == "key that others may write":
        key.chmod(0o620)
    elif how == "key that others may read":
        key.chmod(0o644)
    elif how == "certificate of another user":
        os.chown(certificate, OTHER_USER, OTHER_USER)
    else:
        certificate.unlink()


@needs_root
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("folder of another user", "name a folder of your own"),
        ("folder that others may write", "run chmod go-w"),
        ("link of another user", "name a folder of your own"),
        ("key of another user", "name a folder of your own"),
        ("key that others may write", "run chmod go-w"),
        ("key that others may read", "can be read by other users"),
        ("certificate of another user", "name a folder of your own"),
        ("no certificate", "cannot be read"),
    ],
)
def test_an_authority_that_another_user_made_or_can_change_signs_nothing(
    tmp_path: Path, how: str, says: str
) -> None:
    folder = tmp_path / "certs"
    make_certificates(folder)
    assert mode(folder) == mode(folder / "scheduler") == 0o700
    assert {mode(key) for key in folder.rglob("*.key")} == {0o600}
    spoil(folder, how)
    before = sorted(path.stat().st_mtime_ns for path in folder.rglob("*"))
    with pytest.raises(UsageProblem, match=says) as refused:
        make_certificates(folder)
    assert str(folder) in str(refused.value)
    assert sorted(path.stat().st_mtime_ns for path in folder.rglob("*")) == before


@needs_root
def test_a_certificate_is_not_written_into_a_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "client"
    folder.mkdir()
    os.chown(folder, OTHER_USER, OTHER_USER)
    with pytest.raises(UsageProblem, match="belongs to another user"):
        Authority.create().issue(folder, identities(())["scheduler"], timedelta(days=1))
    assert list(folder.iterdir()) == []


@needs_root
def test_a_folder_that_another_user_made_first_is_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "treadle-mesh-0"
    assert mode(make_private_folder(folder)) == 0o700
    assert make_private_folder(folder) == folder, "its own is used again"
    os.chown(folder, OTHER_USER, OTHER_USER)
    with pytest.raises(UsageProblem, match=f"{folder} belongs to another user"):
        make_private_folder(folder)


def engine_plan(*flags: str) -> EnginePlan:
    return EnginePlan(1, 1, "model", Path("python"), (0,), 0, flags)


def command_of(plan: EnginePlan) -> tuple[str, ...]:
    spec = EngineSpec("e", 1, True, "model", Path("python"), extra_args=plan.flags)
    return engine_command(EngineSpec(**{**vars(spec), "config": plan.config}), {}).argv


def test_no_key_of_engines_begins_as_a_flag_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang reads its file as words of a command line."""
    monkeypatch.delenv("TREADLE_ENGINE_KEY", raising=False)
    assert all(with_key(engine_plan(), tmp_path).key[0] != "-" for _ in range(500))
    monkeypatch.setenv("TREADLE_ENGINE_KEY", f"-{KEY}")
    with pytest.raises(UsageProblem, match="TREADLE_ENGINE_KEY: must not begin with -"):
        with_key(engine_plan(), tmp_path)


def test_the_key_of_engines_is_in_a_file_and_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made here, given by a flag of SGLang's, or by the variable. The file is private, and holds
    what a file of the user's own says too."""
    monkeypatch.delenv("TREADLE_ENGINE_KEY", raising=False)
    made = with_key(engine_plan("--tp-size", "2"), tmp_path)
    assert len(made.key) >= 32 and made.flags == ("--tp-size", "2")
    assert made.key != with_key(engine_plan(), tmp_path).key
    own = tmp_path / "own.yaml"
    own.write_text("tp-size: 2")
    flags = ("--config", str(own), f"--api-key={KEY}", "--port", "1")
    given = with_key(engine_plan(*flags), tmp_path)
    assert given.key == KEY and given.config is not None
    assert given.config.read_text().split("\n") == ["tp-size: 2", f'api-key: "{KEY}"', ""]
    assert mode(given.config) == 0o600
    shown = command_of(given)
    assert KEY not in " ".join(shown) and shown[shown.index("--config") + 1] == str(given.config)
    assert shown.count("--config") == 1 and "--api-key" not in " ".join(shown)
    monkeypatch.setenv("TREADLE_ENGINE_KEY", KEY)
    assert with_key(engine_plan(), tmp_path).key == KEY
    several = with_key(engine_plan("--tokenizer-worker-num", "2"), tmp_path)
    assert several.config is not None and "api-key" not in several.config.read_text()
    with pytest.raises(UsageProblem, match=r"--config nowhere\.yaml: No such file"):
        with_key(engine_plan("--config", "nowhere.yaml"), tmp_path)
