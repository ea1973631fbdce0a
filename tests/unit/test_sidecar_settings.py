"""Settings of the sidecar: what is refused, and with which line."""

import pytest
from treadle_runtime.config import BAD_SETTING_EXIT_CODE, read_settings
from treadle_sidecar.config import SidecarSettings


def test_the_defaults_need_an_engine_id_only() -> None:
    settings = read_settings(
        SidecarSettings, {"TREADLE_SIDECAR_ENGINE_ID": "e0", "TREADLE_NATS_URL": "nats://n:1"}
    )
    assert (settings.listen, settings.engine_url) == ("127.0.0.1:7410", "http://127.0.0.1:30000")
    assert (settings.slots, settings.preempt, settings.nats_url) == (0, True, "nats://n:1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ENGINE_ID", "a b"),
        ("ENGINE_URL", "127.0.0.1:30000"),
        ("ADVERTISE", "nohost"),
        ("SCHEDULER", "scheduler"),
        ("SLOTS", "-1"),
        ("QUEUE_LIMIT", "0"),
        ("HYSTERESIS", "-0.5"),
        ("MIN_RUN_TOKENS", "many"),
        ("TELL_TOKENS", "-1"),
        ("KV_STORAGE_DIR", "relative/folder"),
        ("ENGINE_STALL_S", "0"),
        ("PROBE_S", "-1"),
        ("HARDWARE_TAGS", "h200"),
    ],
)
def test_a_bad_value_is_refused_by_name(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        read_settings(
            SidecarSettings, {"TREADLE_SIDECAR_ENGINE_ID": "e0", f"TREADLE_SIDECAR_{name}": value}
        )
    assert exit_.value.code == BAD_SETTING_EXIT_CODE
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert f"TREADLE_SIDECAR_{name}={value!r} is refused" in line


def test_an_address_that_nobody_can_reach_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "ENGINE_ID": "e0",
        "LISTEN": "0.0.0.0:7410",
        "SCHEDULER": "scheduler:7401",
        "INSECURE_PLAINTEXT": "true",
    }
    with pytest.raises(SystemExit):
        read_settings(
            SidecarSettings, {f"TREADLE_SIDECAR_{name}": value for name, value in given.items()}
        )
    assert "TREADLE_SIDECAR_ADVERTISE" in capsys.readouterr().err
