"""Tasks that run beside a block of code, in a TaskGroup, for as long as the block runs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def beside(tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> AsyncIterator[None]:
    """Run `tasks` during the block and cancel them at its end.

    A task that fails cancels the block and comes out as an ExceptionGroup. What the block itself raises comes out as it
    is, not wrapped in a group.
    """
    raised: Exception | None = None
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(task()) for task in tasks]
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised again below, outside of the group
            raised = error
        finally:
            for task in running:
                task.cancel()
    if raised is not None:
        raise raised
