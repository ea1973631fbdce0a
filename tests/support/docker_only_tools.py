"""A tool that names its backend and its image."""

from treadle_tools.tool import Kind, Tool

TOOLS = [
    Tool(
        name="docker_only",
        kind=Kind.STATELESS,
        description="Runs in a container whatever the others do.",
        entry="treadle_tools.sandbox.inside.snippet:run_tool",
        arguments_schema={"type": "object"},
        backend="docker",
        image="python:3.11-slim-bookworm",
    ),
]
