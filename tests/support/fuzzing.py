"""How many hostile examples are tried, and whether they are the same ones each time."""

import os
from collections.abc import Callable
from typing import Any

import hypothesis

BATCH = 10  # requests that are sent at once
DEFAULT_EXAMPLES = 100
# Of each service; where it is given, the examples are others each time.
_GIVEN = os.environ.get("TREADLE_TEST_FUZZ_EXAMPLES", "")
EXAMPLES = int(_GIVEN or DEFAULT_EXAMPLES)


def fuzz(examples: int) -> Callable[[Any], Any]:
    """The settings of a test that tries so many."""
    return hypothesis.settings(
        max_examples=max(1, examples),
        derandomize=not _GIVEN,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
