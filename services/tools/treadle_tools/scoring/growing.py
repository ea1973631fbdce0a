"""A plugin of pytest: a run of pytest-xdist spreads over the cores that it is lent while it goes on.

Where the process may use more cores than the run has workers, and tests wait, one more worker joins, by the way that
xdist takes to replace one that crashed; `--dist worksteal` hands it tests of the others. None leaves: where cores are
taken back, the workers share what is left.

Invariants: all of it happens in the thread of xdist's loop. A worker joins once it has collected, and only where it
collected what the others did. The run ends without waiting for one that has not joined.
"""

import os
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import execnet
import pytest

from treadle_tools.scoring.python_tests import MOST_CORES_VARIABLE

PERIOD_S = 0.15  # between two looks at the cores: short beside the start of a worker
STAYING = 2  # tests of a worker's queue that nobody can steal: the one that runs and the next

# All that is used of xdist and execnet without being theirs to promise; of another version that lacks one: no growth.
OF_RUN = ("_active_nodes", "nodemanager.setup_node", "queue.get", "queue.put", "sched", "shuttingdown")
OF_SCHEDULER = ("collection", "node2pending")
OF_WORKER = ("gateway._io.kill",)


def usable_cores() -> int:
    """At this moment."""
    return min(int(os.environ.get(MOST_CORES_VARIABLE, "1")), len(os.sched_getaffinity(0)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Before xdist's own loop, once its first workers start. Nothing in a worker, and in a run without any."""
    run = session.config.pluginmanager.getplugin("dsession")
    if run is not None and session.config.getoption("dist") == "worksteal" and _has(run, OF_RUN):
        session.config.pluginmanager.register(Growing(run))


class Growing:
    """run: xdist's DSession, whose loop waits for its queue: that is when this looks."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._next: Callable[..., Any] = run.queue.get
        self._look_at = 0.0  # of time.monotonic()
        self._starting: set[Any] = set()  # workers that have not joined
        run.queue.get = self._get

    def _get(self, block: bool = True, timeout: float | None = None) -> Any:
        if (now := time.monotonic()) >= self._look_at:
            if self._is_short():
                self._start()
            self._look_at = now + PERIOD_S
        return self._next(block, timeout if timeout is None else min(timeout, PERIOD_S))

    def _is_short(self) -> bool:
        """Of workers, with tests for one more."""
        run = self._run
        if run.shuttingdown or not _has(run.sched, OF_SCHEDULER) or not run.sched.collection:
            return False
        if not all(_has(worker, OF_WORKER) for worker in run._active_nodes):
            return False
        if len(run._active_nodes) + len(self._starting) >= usable_cores():
            return False
        return any(len(queue) > STAYING for queue in run.sched.node2pending.values())

    def _start(self) -> None:
        joining = Joining(self._run.queue.put, self._run.sched.collection)
        try:
            self._starting.add(self._run.nodemanager.setup_node(execnet.XSpec("popen"), joining.put))
        except (OSError, EOFError):  # no more processes here: the others go on
            self._look_at = float("inf")

    def pytest_testnodeready(self, node: Any) -> None:
        """It joins: from now on the run ends when it has ended, too."""
        if node in self._starting:
            self._starting.remove(node)
            self._run._active_nodes.add(node)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Asked to end, one that has not joined would end seconds later."""
        for node in self._starting:
            node.gateway._io.kill()


class Joining:
    """What a new worker tells the run, held back until it has collected; for ever where that is not `collection`, since
    tests go by their place in it. What it met while it collected the first workers have told.
    """

    def __init__(self, put: Callable[[Any], None], collection: list[str]) -> None:
        self._put, self._collection = put, collection
        self._ready: Any = None
        self._joined = False

    def put(self, event: tuple[str, dict[str, Any]]) -> None:
        """Called in the thread that listens to the worker."""
        name, details = event
        if name == "workerready":
            self._ready = event
        elif name == "collectionfinish" and details["ids"] == self._collection:
            self._put(self._ready)
            self._joined = True
        if self._joined:
            self._put(event)


def _has(this: Any, names: tuple[str, ...]) -> bool:
    try:
        attrgetter(*names)(this)
    except AttributeError:
        return False
    return True
