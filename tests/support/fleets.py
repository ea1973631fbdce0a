"""A fleet of containers by itself, without the service around it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from support.container_tools import TOOLS
from treadle_tools.builtin import PYTHON
from treadle_tools.sandbox.containers.fleet import Fleet
from treadle_tools.sandbox.containers.hosts import Host, Hosts, Recipe
from treadle_tools.sandbox.state_folder import StateFolder
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
    recipes = [make_recipe(tool, image) for tool in tools]
    state = StateFolder.take(folder)
    fleet = Fleet(
        Hosts(hosts), state, recipes, {}, owner="test", warm=warm, keep_on_exit=keep_on_exit
    )
    await fleet.connect()
    run = asyncio.create_task(fleet.run())
    try:
        yield fleet
    finally:
        run.cancel()
        await asyncio.wait((run,))
        await fleet.close()
