"""A small MCP server as a process of its own: `python -m support.mcp_server`, on stdin and stdout,
or over streamable HTTP on the port that is given."""

import asyncio
import os
import sys
from collections import Counter
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("stock")
taken: Counter[str] = Counter()


@server.tool()
def take(item: str, count: int = 1) -> int:
    """Take things out of the stock, and say how many have been taken by now."""
    taken[item] += count
    return taken[item]


@server.tool()
def refuse(item: str) -> str:
    """Never gives anything."""
    raise ToolError(f"no {item} for you")


@server.tool()
def die() -> str:
    """The process ends in the middle of the call."""
    os._exit(1)


@server.tool()
async def sleep(seconds: float) -> str:
    """Take long."""
    await asyncio.sleep(seconds)
    return "awake"


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdecimal():
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        if len(sys.argv) > 1:
            with Path(sys.argv[1]).open("a") as pids:
                pids.write(f"{os.getpid()}\n")
        server.run()
