"""What the keeper must know of a tool: how its worker is started, and what its cells may hold."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """Of one tool. command: bubblewrap with the zygote in it. user: None for the keeper's own. memory_bytes: of a cell,
    beside its worker.
    """

    tool: str
    command: tuple[str, ...]
    user: int | None
    memory_bytes: int

    def message(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Recipe":
        """From a message."""
        user = message["user"]
        command = tuple(map(str, message["command"]))
        return cls(str(message["tool"]), command, None if user is None else int(user), int(message["memory_bytes"]))
