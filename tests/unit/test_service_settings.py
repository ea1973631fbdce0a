"""Settings of the services: a bad value is one clear line and exit code 2."""

import pytest
from treadle_console.config import ConsoleSettings
from treadle_gateway.config import GatewaySettings
from treadle_migrator.config import MigratorSettings
from treadle_placement.config import PlacementSettings
from treadle_predictor.config import PredictorSettings
from treadle_rollout.config import RolloutSettings
from treadle_runtime.config import Settings, read_settings
from treadle_scheduler.config import SchedulerSettings
from treadle_sidecar.config import SidecarSettings


def test_by_default_every_part_of_the_scheduler_is_off() -> None:
    settings = read_settings(SchedulerSettings, {})
    assert settings.listen == "127.0.0.1:7401"
    assert (
        settings.predictor,
        settings.placement,
        settings.migrator,
        settings.tools,
        settings.rollout,
    ) == ("",) * 5


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        (MigratorSettings, "SCHEDULER", "nowhere"),
        (MigratorSettings, "SCHEDULER", "127.0.0.1:1,nowhere"),
        (MigratorSettings, "GIVE_UP_S", "0"),
        (MigratorSettings, "RETENTION_S", "60"),
        (MigratorSettings, "SHEDULER", "127.0.0.1:1"),
        (PlacementSettings, "COST_MODEL", "quadratic"),
        (PlacementSettings, "DEFAULT_BASE_S", "0"),
        (PlacementSettings, "DEFAULT_PER_SEQUENCE_S", "-1"),
        (PlacementSettings, "DEFAULT_PREFILL_TOKENS_PER_S", "nan"),
        (PlacementSettings, "DEFAULT_PREFILL_TOKENS_PER_S", "0.5"),
        (PredictorSettings, "PRIOR_SIGMA_TOKENS", "-1"),
        (PredictorSettings, "MODELS", "models"),
        (PredictorSettings, "REFIT_EVERY", "3"),
        (RolloutSettings, "BATCH_REPLAY_S", "0"),
        (RolloutSettings, "RETENTION_S", "-5"),
        (RolloutSettings, "RETENTION_S", "a week"),
        (SchedulerSettings, "PREDICTOR", "nowhere"),
        (SchedulerSettings, "PLACEMENT", "host:0"),
        (SchedulerSettings, "PUBLIC_TOOLS", ":7405"),
        (SchedulerSettings, "LEADER_TTL_S", "0.5"),
        (SchedulerSettings, "LEASE_TTL_S", "0"),
        (SchedulerSettings, "LEASE_TTL_S", "soon"),
        (SchedulerSettings, "TICKET_TTL_S", "-1"),
        (SchedulerSettings, "KEEP_CLOSED_S", "-1"),
        (SchedulerSettings, "ABANDON_AFTER_S", "nan"),
        (SchedulerSettings, "AGING_DOUBLING_S", "0"),
        (SchedulerSettings, "PLAN_EVERY_EVENTS", "0"),
        (SchedulerSettings, "PLAN_EVERY_EVENTS", "1.5"),
        (SchedulerSettings, "PLAN_MARGIN", "1"),
        (SchedulerSettings, "PREDICTER", "p:7402"),
        (GatewaySettings, "API_KEY", "fifteen-letters"),
        (GatewaySettings, "API_KEY", "a key with an end of a space "),
        (GatewaySettings, "ENGINE_KEY", "short"),
        (SidecarSettings, "ENGINE_KEY", "short"),
        (ConsoleSettings, "CONTROL_KEY", "short"),
        (ConsoleSettings, "LOGIN_TOKEN", "sechzehn-Zeichen\u00e9"),
    ],
)
def test_a_bad_setting_ends_the_process_with_its_name(
    settings: type[Settings], name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    variable = f"TREADLE_{settings.service.upper()}_{name}"
    with pytest.raises(SystemExit) as ended:
        read_settings(settings, {variable: value})
    line = capsys.readouterr().err
    assert ended.value.code == 2 and variable in line and line.count("\n") == 1


def test_a_key_has_sixteen_characters_and_is_not_printed_where_it_has_fewer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "TREADLE_GATEWAY_API_KEY"
    with pytest.raises(SystemExit):
        read_settings(GatewaySettings, {name: "fifteen-letters"})
    line = capsys.readouterr().err
    assert f"{name}=*** is refused: must have 16 printable ASCII characters" in line
    assert "fifteen-letters" not in line
    assert read_settings(GatewaySettings, {name: "sixteen--letters"}).api_key
    assert not read_settings(GatewaySettings, {name: ""}).api_key, "none: nobody needs one"
