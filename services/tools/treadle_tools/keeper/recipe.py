"""What the keeper must know of a tool to start its worker: a command line, and who runs it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Of one tool. command: bubblewrap with the zygote in it. user: None for the keeper's own."""

    tool: str
    command: tuple[str, ...]
    user: int | None

    def message(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Recipe":
        """From a message."""
        user = message["user"]
        return cls(str(message["tool"]), tuple(map(str, message["command"])), None if user is None else int(user))
