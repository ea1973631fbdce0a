"""Settings of the migrator and of the rollout service: a bad value is one clear line and exit code 2."""

import pytest
from treadle_migrator.config import MigratorSettings
from treadle_rollout.config import RolloutSettings
from treadle_runtime.config import Settings, read_settings


@pytest.mark.parametrize(
    ("settings", "name", "value"),
    [
        (MigratorSettings, "SCHEDULER", "nowhere"),
        (MigratorSettings, "GIVE_UP_S", "0"),
        (MigratorSettings, "RETENTION_S", "60"),
        (MigratorSettings, "SHEDULER", "127.0.0.1:1"),
        (RolloutSettings, "BATCH_REPLAY_S", "0"),
        (RolloutSettings, "RETENTION_S", "-5"),
        (RolloutSettings, "RETENTION_S", "a week"),
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
