"""The noun of this service: a migration, what it was asked to do and how far it is.

Invariants: states go forward only (pending → preparing → switching → done | failed | cancelled); `revision` moves by
one at each change of state; a migration that is failed or cancelled has left the source the owner. Values only; the
book (book.py) keeps them.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class State(Enum):
    """Where a migration stands. The values are stored: do not rename them."""

    PENDING = "pending"
    PREPARING = "preparing"
    SWITCHING = "switching"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Path(Enum):
    """How the KV got to the target."""

    STORAGE = "storage"
    PREFILL = "prefill"


ENDED = frozenset({State.DONE, State.FAILED, State.CANCELLED})
ALLOWED = {
    State.PENDING: frozenset({State.PREPARING, State.FAILED, State.CANCELLED}),
    State.PREPARING: frozenset({State.SWITCHING, State.FAILED, State.CANCELLED}),
    State.SWITCHING: frozenset({State.DONE, State.FAILED}),
    State.DONE: frozenset[State](),
    State.FAILED: frozenset[State](),
    State.CANCELLED: frozenset[State](),
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An engine and its sidecar (host:port)."""

    engine_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Move:
    """What was asked."""

    trajectory_id: str
    source: Endpoint
    target: Endpoint
    expected_revision: int  # of the trajectory's owner
    remaining_tokens: float
    cache_salt: str
    allow_prefill: bool
    give_up_after_s: float  # counted from when it was asked, the wait for its engines included


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the target reported to hold."""

    path: Path
    tokens: int
    from_storage: int
    prefilled: int


@dataclass(frozen=True, slots=True)
class Migration:
    """One move and how far it is.

    Times are Unix seconds; `announced` says whether its end has been published as a fact.
    """

    migration_id: str
    move: Move
    created_at_s: float
    state: State = State.PENDING
    revision: int = 1
    prefix: Prefix | None = None
    started_at_s: float | None = None
    ended_at_s: float | None = None
    failure_reason: str = ""
    announced: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more."""
        return self.state in ENDED

    @property
    def give_up_at_s(self) -> float:
        """When the move is no longer worth it, Unix seconds."""
        return self.created_at_s + self.move.give_up_after_s

    def to(self, state: State, now_s: float, *, failure_reason: str = "", prefix: Prefix | None = None) -> "Migration":
        """The migration in its next state. Raises ValueError for a step that is none."""
        if state not in ALLOWED[self.state]:
            raise ValueError(f"migration {self.migration_id} cannot go from {self.state.value} to {state.value}")
        return replace(
            self,
            state=state,
            revision=self.revision + 1,
            prefix=prefix or self.prefix,
            started_at_s=now_s if state is State.PREPARING else self.started_at_s,
            ended_at_s=now_s if state in ENDED else None,
            failure_reason=failure_reason,
        )


def document_of(migration: Migration) -> dict[str, Any]:
    """As stored. Names are only added, never renamed."""
    move, prefix = migration.move, migration.prefix
    return {
        **{name: getattr(migration, name) for name in Migration.__slots__},
        "state": migration.state.value,
        "move": {
            **{name: getattr(move, name) for name in Move.__slots__},
            "source": [move.source.engine_id, move.source.address],
            "target": [move.target.engine_id, move.target.address],
        },
        "prefix": prefix and [prefix.path.value, prefix.tokens, prefix.from_storage, prefix.prefilled],
    }


def migration_from(document: dict[str, Any]) -> Migration:
    """The migration of its stored form. Raises KeyError, TypeError or ValueError where it is none of ours."""
    move, prefix = document["move"], document["prefix"]
    return Migration(
        **{
            **document,
            "state": State(document["state"]),
            "move": Move(**{**move, "source": Endpoint(*move["source"]), "target": Endpoint(*move["target"])}),
            "prefix": None if prefix is None else Prefix(Path(prefix[0]), *prefix[1:]),
        }
    )
