"""A fleet of containers by itself, without the service around it."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from support.container_tools import TOOLS
from treadle_tools.builtin import PYTHON
from treadle_tools.sandbox.containers.fleet import Fleet, Ware
from treadle_tools.sandbox.containers.hosts import Hosts
from treadle_tools.sandbox.containers.ledger import Ledger
from treadle_tools.sandbox.containers.recipe import Host, recipe_of
from treadle_tools.tool import Limits, Tool

(COUNTER,) = TOOLS
SILENCE_S = 60.0


@dataclass(frozen=True)
class OnCores(Limits):
    """Limits, and which cores were granted."""

    cores: tuple[int, ...] = ()


@asynccontextmanager
async def fleet_on(
    hosts: Sequence[Host],
    folder: Path,
    *,
    tools: Sequence[Tool] = (PYTHON, COUNTER),
    image: str = "any",
    spares: int = 1,
    keep_on_exit: bool = False,
) -> AsyncIterator[Fleet]:
    """A fleet that runs; one life of it."""
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - a moment at the start of a test
    wares = [
        Ware(recipe_of(tool, image=image, code_in_image=False, silence_s=SILENCE_S), tool.limits) for tool in tools
    ]
    fleet = Fleet(
        Hosts(hosts), Ledger(folder), wares,
        owner="test", spares=spares, failures={}, keep_on_exit=keep_on_exit, release=lambda: None,
    )  # fmt: skip
    await fleet.connect()
    run = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        run.cancel()
        await asyncio.wait((run,))
        await fleet.close()
