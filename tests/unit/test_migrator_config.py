"""Settings of the migrator: a bad value is one clear line and exit code 2."""

import pytest
from treadle_migrator.config import MigratorSettings
from treadle_runtime.config import read_settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TREADLE_MIGRATOR_SCHEDULER", "nowhere"),
        ("TREADLE_MIGRATOR_GIVE_UP_S", "0"),
        ("TREADLE_MIGRATOR_RETENTION_S", "60"),
        ("TREADLE_MIGRATOR_SHEDULER", "127.0.0.1:1"),
    ],
)
def test_a_bad_setting_ends_the_process_with_its_name(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(MigratorSettings, {name: value})
    line = capsys.readouterr().err
    assert ended.value.code == 2 and name in line and line.count("\n") == 1
