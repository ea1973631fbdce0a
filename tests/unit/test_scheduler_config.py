"""The scheduler's settings: each bad value ends the process with one line that names it."""

import pytest
from treadle_runtime.config import read_settings
from treadle_scheduler.config import SchedulerSettings


def test_the_defaults_hold_and_every_part_is_off() -> None:
    settings = read_settings(SchedulerSettings, {})
    assert settings.listen == "127.0.0.1:7401"
    assert (settings.predictor, settings.placement, settings.migrator, settings.tools, settings.rollout) == ("",) * 5


def test_values_come_from_the_environment() -> None:
    settings = read_settings(
        SchedulerSettings, {"TREADLE_SCHEDULER_PREDICTOR": "p:7402", "TREADLE_SCHEDULER_LEASE_TTL_S": "3.5"}
    )
    assert (settings.predictor, settings.lease_ttl_s) == ("p:7402", 3.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PREDICTOR", "nowhere"),
        ("PLACEMENT", "host:0"),
        ("PUBLIC_TOOLS", ":7405"),
        ("LEASE_TTL_S", "0"),
        ("LEASE_TTL_S", "soon"),
        ("TICKET_TTL_S", "-1"),
        ("KEEP_CLOSED_S", "-1"),
        ("ABANDON_AFTER_S", "nan"),
        ("AGING_DOUBLING_S", "0"),
        ("PLAN_EVERY_EVENTS", "0"),
        ("PLAN_EVERY_EVENTS", "1.5"),
        ("PLAN_MARGIN", "1"),
        ("PREDICTER", "p:7402"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(SchedulerSettings, {f"TREADLE_SCHEDULER_{name}": value})
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"TREADLE_SCHEDULER_{name}" in line
