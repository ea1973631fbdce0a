"""Settings: where they are read, and how a bad one is refused."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import SecretStr
from treadle_runtime.config import Json, Settings, read_settings

KUBERNETES_LINKS = {
    "TREADLE_LOOM_SERVICE_HOST": "10.0.0.1",
    "TREADLE_LOOM_PORT_7401_TCP_ADDR": "10.0.0.1",
}


class LoomSettings(Settings):
    """A service of these tests."""

    service: ClassVar[str] = "loom"
    listen: str = "127.0.0.1:7499"
    heddles: int = 4
    ratio: float = 0.5
    names: Annotated[tuple[str, ...], Json] = ()
    token: SecretStr = SecretStr("")


def refusal(capsys: pytest.CaptureFixture[str], environ: Mapping[str, str]) -> str:
    """The one line with which `environ` is refused."""
    with pytest.raises(SystemExit) as exit_info:
        read_settings(LoomSettings, environ)
    assert exit_info.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.endswith("\n")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("environ", "read"),
    [
        ({"PATH": "/bin"}, {}),
        ({"TREADLE_NATS_URL": "nats://common:1"}, {"nats_url": "nats://common:1"}),
        (
            {"TREADLE_NATS_URL": "nats://common:1", "TREADLE_LOOM_NATS_URL": "nats://own:2"},
            {"nats_url": "nats://own:2"},
        ),
        ({"TREADLE_HEDDLES": "9"}, {}),  # no setting of all services
        ({"TREADLE_SHUTTLE_SPEED": "9", "TREADLE_WHATEVER": "9"}, {}),
        (
            {"TREADLE_LOOM_HEDDLES": "9", "TREADLE_LOOM_LOG_LEVEL": "DEBUG"},
            {"heddles": 9, "log_level": "debug"},
        ),
        ({"TREADLE_LOOM_NAMES": '["a", "b"]'}, {"names": ("a", "b")}),
        ({**KUBERNETES_LINKS, "KUBERNETES_SERVICE_HOST": "10.0.0.2"}, {}),
    ],
)
def test_settings_are_read_from_the_variables_of_the_service_and_the_common_ones(
    environ: dict[str, str], read: dict[str, Any]
) -> None:
    assert read_settings(LoomSettings, environ) == LoomSettings(**read)


def test_building_settings_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_LOOM_HEDDLES", "9")
    monkeypatch.setenv("HEDDLES", "9")
    assert LoomSettings().heddles == 4


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("TREADLE_LOOM_HEDDLES", "many", "valid integer"),
        ("TREADLE_LOOM_HEDDLES", "", "valid integer"),
        ("TREADLE_LOOM_RATIO", "nan", "finite number"),
        ("TREADLE_LOOM_NAMES", "a,b", "JSON"),
        ("TREADLE_LOOM_LISTEN", "7401", "host:port"),
        ("TREADLE_LOOM_LISTEN", "localhost:99999", "0..65535"),
        ("TREADLE_LOOM_NATS_URL", "localhost:4222", "nats://127.0.0.1:4222"),
        ("TREADLE_NATS_URL", "http://localhost", "nats://127.0.0.1:4222"),
        ("TREADLE_LOOM_OTLP_ENDPOINT", "collector:4317", "http://127.0.0.1:4317"),
        ("TREADLE_LOOM_LOG_LEVEL", "loud", "'debug', 'info', 'warning' or 'error'"),
        ("TREADLE_LOOM_DRAIN_GRACE_S", "-1", "greater than or equal to 0"),
        ("TREADLE_LOOM_STARTUP_TIMEOUT_S", "0", "greater than 0"),
        ("TREADLE_LOOM_MAX_MESSAGE_BYTES", "10", "greater than or equal to 1024"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_value_and_what_would_be_right(
    name: str, value: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, {name: value})
    assert line.startswith("treadle_loom: ")
    assert f"{name}={value!r}" in line
    assert right in line


def test_all_bad_values_are_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, {"TREADLE_LOOM_HEDDLES": "x\ny", "TREADLE_LOOM_RATIO": "z"})
    assert "TREADLE_LOOM_HEDDLES" in line
    assert "TREADLE_LOOM_RATIO" in line


def test_an_unknown_variable_is_refused_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = refusal(capsys, {"TREADLE_LOOM_HEDLES": "9"})
    assert (
        line == "treadle_loom: TREADLE_LOOM_HEDLES is no setting of loom: did you mean "
        "TREADLE_LOOM_HEDDLES?\n"
    )


def test_the_links_that_kubernetes_adds_are_settings_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "TREADLE_LOOM_PORT_7401_TCP_ADDR" in refusal(capsys, KUBERNETES_LINKS)


def test_a_secret_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Strict(LoomSettings):
        pin: SecretStr = SecretStr("0000")

        def model_post_init(self, _: object) -> None:
            """Nothing."""

    assert "hunter2" not in repr(read_settings(Strict, {"TREADLE_LOOM_PIN": "hunter2"}))
    assert "did you mean" in refusal(capsys, {"TREADLE_LOOM_TOKE": "hunter2"})
    line = refusal(capsys, {"TREADLE_NATS_URL": "http://treadle:hunter2@127.0.0.1:4222"})
    assert "TREADLE_NATS_URL='http://***@127.0.0.1:4222'" in line and "hunter2" not in line


@pytest.mark.parametrize("listen", ["0.0.0.0:7401", "[::]:7401", "10.0.0.7:7401", "scheduler:7401"])
def test_plaintext_is_for_this_machine_unless_it_is_said(
    listen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"TREADLE_LOOM_LISTEN": listen}
    with pytest.raises(SystemExit):
        read_settings(LoomSettings, variables)
    assert (
        f"TREADLE_LOOM_LISTEN={listen} would serve other machines in plaintext"
        in capsys.readouterr().err
    )
    for said in ({"TREADLE_INSECURE_PLAINTEXT": "true"}, {"TREADLE_TLS_FOLDER": "/tls"}):
        assert read_settings(LoomSettings, variables | said).listen == listen
    for here in ("127.0.0.1:0", "localhost:7401", "[::1]:7401", "127.8.0.1:7401"):
        assert read_settings(LoomSettings, {"TREADLE_LOOM_LISTEN": here}).listen == here


def test_a_log_for_people_shows_hostile_texts_as_letters() -> None:
    """In a process of its own, as logging is configured once. Result: no code reaches the terminal,
    and only our own events begin a line."""
    script = """
import logging, structlog
from treadle_runtime.config import Settings
from treadle_runtime.telemetry import configure_logging
configure_logging(Settings(log_format="console"))
hostile = "a\\x1b]52;c;eA==\\x07b\\x9bc\\u202ed\\nFORGED"
log = structlog.get_logger()
log.info(hostile, name=hostile, names=[hostile])
logging.getLogger("library").warning("said %s", hostile)
try:
    raise ValueError(hostile)
except ValueError:
    log.exception("failed")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    shown = done.stderr.decode()
    assert {char for char in shown if not char.isprintable()} == {"\n"}
    assert not [line for line in shown.splitlines() if line.startswith("FORGED")]
    assert shown.count("]52;c;eA==") == 5
