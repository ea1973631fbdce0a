"""Hearing facts in a test."""

from typing import Any

from treadle.telemetry.v1.facts_pb2 import Fact
from treadle_runtime.bus import Bus
from treadle_runtime.facts import kind_of


async def hear(bus: Bus, *kinds: str, replay: bool = False) -> list[Any]:
    """A list to which the facts of these kinds (all, without any) are added as they come, each as
    its own message."""
    heard: list[Any] = []

    async def keep(fact: Fact) -> None:
        heard.append(getattr(fact, kind_of(fact)))

    await bus.subscribe(kinds, keep, replay=replay)
    return heard
