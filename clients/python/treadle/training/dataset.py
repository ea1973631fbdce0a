"""Read a rollout as a PyTorch dataset: each rank of a trainer iterates over the groups that it
takes.

Needs PyTorch: `pip install 'treadle-client[torch]'`. The rollout service gives a group away once,
so that ranks, and worker processes of a DataLoader, share a rollout without knowing of each other.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from treadle.client import Client
from treadle.types import Group


class RolloutDataset(IterableDataset[Group]):
    """Groups of a rollout, oldest first, until the rollout is over and all are taken, or `batches`
    batches were given.

    connect: makes a client of this dataset's own, e.g. functools.partial(treadle.Client,
    "localhost:7401"); picklable where a DataLoader has workers. rank: of this trainer process; two
    that iterate over one rollout at the same time must have different ones. groups_per_batch: taken
    at once. weight_version: the trainer's present one, or a function that returns it before each
    batch; in a DataLoader's worker it is called there. batches: most of them, so that all ranks
    make equally many steps; None for all. Use it with DataLoader(dataset, batch_size=None).

    A batch is confirmed when its last group has been given and the trainer requests another one, by
    which time it must have saved what it learned from the batch. With the state of before
    (`state_dict`, saved beside the weights), a process that was killed gets the same batch again,
    whole, if its weight_version is the same as then. Iterate outside of an event loop, e.g. in a
    thread. Errors: those of Client.get_batch.
    """

    def __init__(
        self,
        connect: Callable[[], Client],
        rollout_id: str,
        *,
        rank: int = 0,
        groups_per_batch: int = 1,
        weight_version: int | Callable[[], int] = 0,
        batches: int | None = None,
    ) -> None:
        if groups_per_batch < 1:
            raise ValueError(f"groups_per_batch must be at least 1, is {groups_per_batch}")
        self._connect, self._rollout_id, self._rank = connect, rollout_id, rank
        self._groups_per_batch, self._weight_version, self._batches = (
            groups_per_batch,
            weight_version,
            batches,
        )
        self._given = 0  # batches

    def state_dict(self) -> dict[str, Any]:
        """Return which batch comes next, or is being given; torchdata's StatefulDataLoader calls
        it."""
        return {"rollout_id": self._rollout_id, "rank": self._rank, "batches": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batches that the state has seen. Raises ValueError for the state of
        another rollout or rank."""
        for name, own in (("rollout_id", self._rollout_id), ("rank", self._rank)):
            if state[name] != own:
                raise ValueError(f"state: {name} is {state[name]!r} there and {own!r} here")
        self._given = int(state["batches"])

    def __iter__(self) -> Iterator[Group]:
        info = get_worker_info()
        name = f"{self._rollout_id}.{self._rank}.{info.id if info is not None else 0}"
        with asyncio.Runner() as runner:
            client = runner.run(self._connect().__aenter__())
            try:
                while self._batches is None or self._given < self._batches:
                    version = (
                        self._weight_version
                        if isinstance(self._weight_version, int)
                        else self._weight_version()
                    )
                    batch_id = f"{name}.{self._given}"
                    batch = runner.run(
                        client.get_batch(
                            self._rollout_id, self._groups_per_batch, version, batch_id=batch_id
                        )
                    )
                    yield from batch.groups
                    self._given += 1
                    runner.run(client.confirm_batch(self._rollout_id, batch_id))
                    if batch.exhausted:
                        return
            finally:
                runner.run(client.__aexit__(None, None, None))
