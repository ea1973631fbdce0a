"""Settings of the rollout service: a bad value is one clear line and exit code 2."""

import pytest
from treadle_rollout.config import RolloutSettings
from treadle_runtime.config import read_settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TREADLE_ROLLOUT_BATCH_REPLAY_S", "0"),
        ("TREADLE_ROLLOUT_RETENTION_S", "-5"),
        ("TREADLE_ROLLOUT_RETENTION_S", "a week"),
        ("TREADLE_ROLLOUT_RETENTION", "5"),
    ],
)
def test_a_bad_setting_ends_the_process_with_its_name(
    name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(RolloutSettings, {name: value})
    line = capsys.readouterr().err
    assert ended.value.code == 2 and name in line and line.count("\n") == 1
