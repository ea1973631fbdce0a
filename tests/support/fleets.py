"""A fleet of containers by itself, without the service around it."""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from support.container_tools import TOOLS
from treadle_tools.builtin import PYTHON
from treadle_tools.sandbox.containers.fleet import Fleet, SessionFiles
from treadle_tools.sandbox.containers.hosts import Host, Hosts, Recipe
from treadle_tools.tool import Tool

(COUNTER,) = TOOLS
SILENCE_S = 60.0


def make_recipe(tool: Tool, image: str = "python", *, code_in_image: bool = False) -> Recipe:
    """How a container of `tool` is made."""
    return Recipe.for_tool(tool, image=image, code_in_image=code_in_image, silence_s=SILENCE_S)


@asynccontextmanager
async def fleet_on(
    hosts: Sequence[Host],
    folder: Path,
    *,
    tools: Sequence[Tool] = (PYTHON, COUNTER),
    image: str = "any",
    warm: int = 1,
    keep_on_exit: bool = False,
) -> AsyncIterator[Fleet]:
    """One run of a fleet."""
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - a moment at the start of a test
    recipes = [(make_recipe(tool, image), tool.limits) for tool in tools]
    fleet = Fleet(
        Hosts(hosts), SessionFiles(folder), recipes,
        owner="test", warm=warm, failures={}, keep_on_exit=keep_on_exit, release=lambda: None,
    )  # fmt: skip
    await fleet.connect()
    run = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        run.cancel()
        await asyncio.wait((run,))
        await fleet.close()
