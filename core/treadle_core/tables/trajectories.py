"""The table of trajectories, with the sums over each engine that placement asks for all the time.

Owns every TrajectoryRecord, the tallies and the worksheet, and names to who watches them the records that are new.
Invariant: tallies and worksheet equal what a walk over the open records would give; only `put` and `forget` write.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from treadle_core.model import PlacementRule, Replanning, TicketStatus, TrajectoryRecord
from treadle_core.placing.worksheet import NOT_PLANNED, Worksheet
from treadle_core.ranking.remaining import log_sigma, remaining_tokens, remaining_tool_s, room_tokens
from treadle_core.refusals import TrajectoryNotFound
from treadle_core.tuning import Tuning

# Numbers of the replanning rules in the worksheet.
RESOLVED, SCALED = 1.0, 2.0
RULE_NUMBERS = {Replanning.RESOLVE: RESOLVED, Replanning.RANK_SCALING: SCALED}


@dataclass(slots=True)
class Tally:
    """Of one engine: open trajectories, live tickets, predicted tokens left, those of them that have begun, and the KV
    tokens that these may grow to."""

    trajectories: int = 0
    begun: int = 0
    kv_reserve_tokens: int = 0
    live_tickets: int = 0
    tokens: float = 0.0


NOTHING = Tally()  # of an engine that has none; nobody writes it


@dataclass(slots=True)
class _Counted:
    """What an open trajectory stands for in the sums: on which engine, which tokens, whether its ticket is live,
    whether it has begun, the KV tokens that it may grow to."""

    engine_id: str
    tally: Tally
    tokens: float
    live: bool
    begun: bool
    reserve: int


class TrajectoryTable:
    """Trajectories by id, in the order of opening."""

    def __init__(self, tuning: Tuning) -> None:
        self.worksheet = Worksheet()
        self._tuning = tuning
        self._records: dict[str, TrajectoryRecord] = {}
        self._counted: dict[str, _Counted] = {}  # of each open trajectory, in the order of opening
        self._on: dict[str, dict[str, None]] = {}
        self._tallies: dict[str, Tally] = {}
        self._moving: dict[str, None] = {}
        self._watched: set[str] = set()
        self._news: set[str] = set()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        return iter(list(self._records.values()))

    def get(self, trajectory_id: str) -> TrajectoryRecord | None:
        """The trajectory, or None."""
        return self._records.get(trajectory_id)

    def require(self, trajectory_id: str) -> TrajectoryRecord:
        """The trajectory. Raises TrajectoryNotFound."""
        record = self._records.get(trajectory_id)
        if record is None:
            raise TrajectoryNotFound(
                f"no trajectory {trajectory_id}: never opened here, or closed long ago", trajectory_id=trajectory_id
            )
        return record

    def open_records(self) -> list[TrajectoryRecord]:
        """Those that are open, in the order of opening."""
        return [self._records[trajectory_id] for trajectory_id in self._counted]

    def on(self, engine_id: str) -> list[TrajectoryRecord]:
        """The open ones whose engine this is."""
        return [self._records[trajectory_id] for trajectory_id in self._on.get(engine_id, ())]

    def ids_on(self, engine_id: str) -> Iterable[str]:
        """The ids of the open ones whose engine this is."""
        return self._on.get(engine_id, ())

    def moving(self) -> list[TrajectoryRecord]:
        """Those with a move under way."""
        return [self._records[trajectory_id] for trajectory_id in self._moving]

    def open_count(self) -> int:
        """How many are open."""
        return len(self._counted)

    def tally(self, engine_id: str) -> Tally:
        """The sums of an engine, to be read only; zeros where it has none."""
        return self._tallies.get(engine_id, NOTHING)

    def watch(self, trajectory_id: str) -> None:
        """From now on `news` names it once its record is another."""
        self._watched.add(trajectory_id)

    def unwatch(self, trajectory_id: str) -> None:
        """No more."""
        self._watched.discard(trajectory_id)
        self._news.discard(trajectory_id)

    def news(self) -> set[str]:
        """Those watched that have another record, or none, since this was last asked."""
        news, self._news = self._news, set()
        return news

    def put(self, record: TrajectoryRecord) -> None:
        """Makes this the record of its trajectory."""
        trajectory_id = record.trajectory_id
        self._records[trajectory_id] = record
        if trajectory_id in self._watched:
            self._news.add(trajectory_id)
        if record.move is not None:
            self._moving[trajectory_id] = None
        elif trajectory_id in self._moving:
            del self._moving[trajectory_id]
        if record.is_open:
            self._count(record)
        else:
            self._discount(trajectory_id)

    def forget(self, trajectory_id: str) -> None:
        """Removes a trajectory."""
        if self._records.pop(trajectory_id, None) is not None:
            if trajectory_id in self._watched:
                self._news.add(trajectory_id)
            self._moving.pop(trajectory_id, None)
            self._discount(trajectory_id)

    def _count(self, record: TrajectoryRecord) -> None:
        trajectory_id, engine_id = record.trajectory_id, record.engine_id
        tokens = remaining_tokens(record, self._tuning)
        ticket = record.ticket
        begun = ticket is not None
        live = ticket is not None and ticket.status is TicketStatus.LIVE
        reserve = ticket.kv_reserve_tokens if ticket is not None else 0
        counted = self._counted.get(trajectory_id)
        if counted is not None and counted.engine_id == engine_id:
            tally = counted.tally
            tally.tokens += tokens - counted.tokens
            tally.live_tickets += live - counted.live
            tally.begun += begun - counted.begun
            tally.kv_reserve_tokens += reserve - counted.reserve
            counted.tokens, counted.live, counted.begun, counted.reserve = tokens, live, begun, reserve
        else:
            if counted is not None:
                self._leave(trajectory_id, counted)
            tally = self._tallies.get(engine_id) or self._tallies.setdefault(engine_id, Tally())
            tally.trajectories += 1
            tally.tokens += tokens
            tally.live_tickets += live
            tally.begun += begun
            tally.kv_reserve_tokens += reserve
            self._counted[trajectory_id] = _Counted(engine_id, tally, tokens, live, begun, reserve)
            self._on.setdefault(engine_id, {})[trajectory_id] = None
        worksheet = self.worksheet
        worksheet.put(
            trajectory_id,
            (
                tokens,
                record.context_tokens or record.prompt_tokens,
                remaining_tool_s(record),
                worksheet.engines.of(engine_id),
                _rule(record),
                worksheet.tags.of(record.hardware_tags),
                float(begun),
                log_sigma(record),
                room_tokens(record),
            ),
        )

    def _discount(self, trajectory_id: str) -> None:
        counted = self._counted.pop(trajectory_id, None)
        if counted is not None:
            self._leave(trajectory_id, counted)
            self.worksheet.drop(trajectory_id)

    def _leave(self, trajectory_id: str, counted: _Counted) -> None:
        tally = counted.tally
        del self._on[counted.engine_id][trajectory_id]
        tally.trajectories -= 1
        tally.tokens -= counted.tokens
        tally.live_tickets -= counted.live
        tally.begun -= counted.begun
        tally.kv_reserve_tokens -= counted.reserve
        if tally.trajectories == 0:
            del self._tallies[counted.engine_id]  # and with it the rounding of its sums
            del self._on[counted.engine_id]


def _rule(record: TrajectoryRecord) -> float:
    """The number of the rule that may move a trajectory, as far as its record says."""
    policy = record.policy
    if (
        policy.placement is PlacementRule.PLANNED
        and not record.pinned_engine_id
        and (policy.migrate or record.ticket is None)
    ):
        return RESOLVED if policy.replanning is Replanning.RESOLVE else SCALED
    return NOT_PLANNED
