"""Errors of a question for a plan."""

import pickle

import pytest
from treadle_core.placing.question import InvalidTrajectoryError, NothingFitsError


@pytest.mark.parametrize("kind", [InvalidTrajectoryError, NothingFitsError])
def test_an_error_comes_from_another_process_as_it_was(kind: type[InvalidTrajectoryError]) -> None:
    error = pickle.loads(pickle.dumps(kind("trajectories[3].context_tokens", "is too large")))
    assert type(error) is kind and error.field == "trajectories[3].context_tokens"
    assert str(error) == "trajectories[3].context_tokens: is too large"
