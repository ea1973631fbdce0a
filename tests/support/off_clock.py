"""`python -m support.off_clock`: a service on a machine whose clock is wrong. TREADLE_TEST_MODULE is
the service's module, TREADLE_TEST_CLOCK_AHEAD_S the seconds by which the clock is ahead.

Only Treadle's own modules see that clock: gRPC compares deadlines with the system's.
"""

import importlib
import os
import runpy
import sys
import time
from types import ModuleType
from typing import Any


class OffTime(ModuleType):
    """The module `time`, with another time of day."""

    def __init__(self, ahead_s: float) -> None:
        super().__init__("time")
        self._ahead_s = ahead_s

    def time(self) -> float:
        return time.time() + self._ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


if __name__ == "__main__":
    module = os.environ.pop("TREADLE_TEST_MODULE")
    off = OffTime(float(os.environ.pop("TREADLE_TEST_CLOCK_AHEAD_S")))
    importlib.import_module(f"{module}.wire")
    for name, loaded in list(sys.modules.items()):
        if name.startswith("treadle") and getattr(loaded, "time", None) is time:
            vars(loaded)["time"] = off
    runpy.run_module(module, run_name="__main__", alter_sys=True)
