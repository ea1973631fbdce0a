"""Records of the console: trajectories' rows, spans, rollouts and tools, and the collection that
remembers when each changed."""

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

R = TypeVar("R")

# states of an open trajectory
IDLE, QUEUED, RUNNING, PREEMPTED, TOOL = ("idle", "queued", "running", "preempted", "tool")
KINDS = ("queue", "prefill", "decode", "preempted", "tool", "move")  # kinds of spans
NO_ENGINE = -1
LAST_TENTH = (
    0.9  # the straggler tax counts from here on: nine tenths of the trajectories have ended
)
MOST_ENDS = 20_000  # most ends that are kept of one rollout


class Cursor(NamedTuple):
    """Position of a page: the revision that it knows, and the numbers of the next span and event
    that it has not received."""

    revision: int = 0
    span: int = 0
    event: int = 0


@dataclass(slots=True)
class Row:
    """Trajectory as the page shows it. since_ms: when its state began. predicted: 10th, 50th and
    90th percentile of the tokens that were left when `turns` steps were over. priority: of its last
    step that waited, higher first."""

    n: int
    id: str
    prompt: str
    sample: int
    rollout: str
    state: str
    since_ms: int
    opened_ms: int
    closed_ms: int = 0
    engine: int = NO_ENGINE
    tokens: int = 0
    turns: int = 0
    predicted: tuple[float, float, float] | None = None
    priority: float | None = None
    preemptions: int = 0
    moves: int = 0
    tool: str = ""


@dataclass(slots=True)
class Step:
    """Step of a trajectory at an engine. ran_ms: since when it runs, 0 while it waits. attempts:
    how often it began."""

    ticket: str
    engine: int
    ran_ms: int = 0
    attempts: int = 0


@dataclass(slots=True)
class Rollout:
    """Sums over the trajectories of one rollout, as a training step is. ledger_s: seconds of its
    closed trajectories by part. tail_ms: from the end of nine tenths of its trajectories to the
    last end. shaping: what the rollout service reports of it; None where it knows no such
    rollout."""

    id: str
    began_ms: int
    last_ms: int
    version: str = ""
    trajectories: int = 0
    closed: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    turns: int = 0
    preemptions: int = 0
    moves: int = 0
    ledger_s: dict[str, float] = field(default_factory=dict)
    ends_ms: deque[int] = field(default_factory=lambda: deque(maxlen=MOST_ENDS))
    shaping: dict[str, Any] | None = None

    def view(self) -> dict[str, Any]:
        """Return the rollout for a page. Shares are None until there is something to divide."""
        view: dict[str, Any] = {
            name: getattr(self, name) for name in self.__slots__ if name != "ends_ms"
        }
        lasted_ms = self.last_ms - self.began_ms
        nine_tenths = math.ceil(LAST_TENTH * self.trajectories)
        tail_ms = None
        if lasted_ms > 0 and 0 < nine_tenths <= len(self.ends_ms):
            tail_ms = self.last_ms - sorted(self.ends_ms)[nine_tenths - 1]
        lasts_ms = [end - self.began_ms for end in self.ends_ms]
        mean_ms = sum(lasts_ms) / len(lasts_ms) if lasts_ms else None
        return view | {"lasted_ms": lasted_ms, "tail_ms": tail_ms, "mean_end_ms": mean_ms}


@dataclass(slots=True)
class Tool:
    """Calls of one tool, and where their seconds went."""

    name: str
    calls: int = 0
    running: int = 0
    failed: int = 0
    queue_s: float = 0.0
    overhead_s: float = 0.0
    execution_s: float = 0.0


class Changes(Generic[R]):
    """Things by key, each with the revision at which it last changed. Beyond `most`, those that
    changed first are removed."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._things: OrderedDict[Any, R] = OrderedDict()  # the one that changed last is the last
        self._revisions: dict[Any, int] = {}

    def get(self, key: Any) -> R | None:
        return self._things.get(key)

    def put(self, key: Any, thing: R, revision: int) -> R:
        """Add or replace a thing, and note that it has changed."""
        self._things[key] = thing
        self._things.move_to_end(key)
        self._revisions[key] = revision
        if self._most is not None and len(self._things) > self._most:
            self.pop(next(iter(self._things)))
        return thing

    def pop(self, key: Any) -> None:
        self._things.pop(key, None)
        self._revisions.pop(key, None)

    def since(self, revision: int) -> list[R]:
        """Return what has changed after this revision, the last change first."""
        found = []
        for key in reversed(self._things):
            if self._revisions[key] <= revision:
                break
            found.append(self._things[key])
        return found

    def __iter__(self) -> Iterator[R]:
        return iter(self._things.values())

    def __len__(self) -> int:
        return len(self._things)


class Spans:
    """Spans of the picture, in columns: what each trajectory did, from when to when, and on which
    engine.

    A span has a number, ascending in the order of adding, and never changes. Beyond `most`, the
    oldest quarter is removed: `base` is the number of the first that is left.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.base = 0
        self._empty()

    def _empty(self) -> None:
        self._rows, self._kinds, self._engines = array("q"), array("b"), array("i")
        self._starts_ms, self._lasts_ms = array("q"), array("q")

    @property
    def end(self) -> int:
        """Return the number of the next span."""
        return self.base + len(self._rows)

    def add(self, row: int, kind: str, engine: int, start_ms: int, end_ms: int) -> None:
        """Add a span of trajectory `row`, unless it takes no time."""
        if end_ms <= start_ms:
            return
        self._rows.append(row)
        self._kinds.append(KINDS.index(kind))
        self._engines.append(engine)
        self._starts_ms.append(start_ms)
        self._lasts_ms.append(end_ms - start_ms)
        if len(self._rows) > self._most:
            gone = self._most // 4
            for column in self._columns():
                del column[:gone]
            self.base += gone

    def since(self, number: int, most: int) -> tuple[dict[str, list[int]], int]:
        """Return the columns of at most `most` spans from this number on, and the number after the
        last of them."""
        at = max(number - self.base, 0)
        names = ("row", "kind", "engine", "start", "last")
        found = {
            name: column[at : at + most].tolist()
            for name, column in zip(names, self._columns(), strict=True)
        }
        return found, min(self.base + at + most, self.end)

    def _columns(self) -> tuple["array[int]", ...]:
        return self._rows, self._kinds, self._engines, self._starts_ms, self._lasts_ms
