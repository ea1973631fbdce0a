"""A module of tools whose code needs nothing but Python: what a container of any image with Python
can run."""

import time
from collections.abc import Mapping
from typing import Any

from treadle_tools.tool import InvalidArguments, Kind, Limits, Outcome, Sandbox, Tool


class Counter:
    """Its state is one number."""

    def __init__(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> None:
        self._count = int(arguments.get("start", 0))
        self._sandbox = sandbox
        if self._count < 0:
            raise InvalidArguments("start", "must not be negative")

    def first(self) -> Outcome:
        """Where it starts."""
        return Outcome(output=str(self._count))

    def step(self, arguments: Mapping[str, Any]) -> Outcome:
        """Count on, or run code."""
        time.sleep(float(arguments.get("pause_s", 0.0)))
        if "code" in arguments:
            return self._sandbox.python(str(arguments["code"]))
        self._count += int(arguments["add"])
        return Outcome(output=str(self._count), reward=float(self._count), done=self._count > 100)


TOOLS = [
    Tool(
        name="counter",
        kind=Kind.ENVIRONMENT,
        description="Counts; runs code beside itself.",
        entry="support.container_tools:Counter",
        open_schema={"type": "object", "properties": {"start": {"type": "integer"}}},
        arguments_schema={
            "type": "object",
            "properties": {
                "add": {"type": "integer"},
                "code": {"type": "string"},
                "pause_s": {"type": "number"},
            },
        },
        limits=Limits(wall_s=20.0),
    )
]
