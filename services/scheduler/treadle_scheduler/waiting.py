"""Work that waits for a worker, by key: newer work of a key takes the place of older that still waits."""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Waiting(Generic[T]):
    """First come, first served; several workers may take. A key keeps its place when its work is replaced."""

    def __init__(self) -> None:
        self._items: dict[str, T] = {}
        self._filled = asyncio.Event()

    def put(self, key: str, item: T) -> None:
        """Adds or replaces; never blocks."""
        self._items[key] = item
        self._filled.set()

    async def take(self, most: int) -> list[T]:
        """The oldest items, at least one and at most `most`; waits while there is none."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        keys = list(self._items)[:most] if most > 1 else [next(iter(self._items))]
        return [self._items.pop(key) for key in keys]
