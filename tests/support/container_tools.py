"""A module of tools whose code needs nothing but Python: what a container of any image with Python can run."""

from treadle_tools.tool import Kind, Limits, Tool

TOOLS = [
    Tool(
        name="counter",
        kind=Kind.ENVIRONMENT,
        description="Counts; runs code beside itself.",
        entry="support.container_counter:Counter",
        open_schema={"type": "object", "properties": {"start": {"type": "integer"}}},
        arguments_schema={
            "type": "object",
            "properties": {"add": {"type": "integer"}, "code": {"type": "string"}, "pause_s": {"type": "number"}},
        },
        limits=Limits(wall_s=20.0),
    )
]
