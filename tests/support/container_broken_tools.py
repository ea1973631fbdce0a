"""A tool whose code cannot be imported in its container."""

from treadle_tools.tool import Kind, Tool

TOOLS = [
    Tool(
        name="broken",
        kind=Kind.STATELESS,
        description="Never starts.",
        entry="support.container_broken_tools:missing",
        arguments_schema={"type": "object"},
    )
]
