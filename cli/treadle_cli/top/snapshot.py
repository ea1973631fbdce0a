"""Read what a mesh does at one moment, from the scheduler's answers.

Engines are requested each time. All trajectories are many messages: they are requested again only
after SPARE times as long as the last answer took, so that `treadle top` takes a small share of the
scheduler's core, however large the mesh.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import grpc.aio
from treadle.certificates import Certificates, open_channel
from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.types import words_of

if TYPE_CHECKING:
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

ASK_S = 5.0
PAGE = 1_000
SPARE = 20.0  # 5% of the scheduler's core at most
TAIL = 0.1  # share of a rollout's samples that the straggler tax counts
SHOWN_MOVES = 8
RATE_S = 10.0  # how far back rates look, or to the answer before where that is longer ago
MOVE_STATES, STATES = words_of(migrator_pb2.MigrationState), words_of(pb.TrajectoryState)


@dataclass(frozen=True)
class EngineRow:
    """One engine. kv_share: of its KV that is in use; NaN where it does not report how much it
    has."""

    engine_id: str
    running: int
    slots: int
    waiting: int
    kv_share: float
    tokens_per_s: float
    trajectories: int
    weight_version: str
    health: str


@dataclass(frozen=True)
class TrajectoryRow:
    """An open trajectory. left_tokens: the median that is predicted; NaN where nobody predicts
    it."""

    trajectory_id: str
    prompt_id: str
    sample: int
    engine_id: str
    turn: int
    gen_tokens: int
    left_tokens: float
    state: str
    migrations: int
    priority: float


@dataclass(frozen=True)
class RolloutRow:
    """A rollout, or the trajectories without one. straggler_tax: the share of the time since its
    start that has gone by since nine tenths of its trajectories ended; NaN before."""

    rollout_id: str
    done: int
    total: int
    running_s: float
    straggler_tax: float


@dataclass(frozen=True)
class MoveRow:
    """A move of a trajectory's KV. seconds: since it was requested, or how long it took."""

    trajectory_id: str
    source: str
    target: str
    state: str
    seconds: float


@dataclass(frozen=True)
class Snapshot:
    """A mesh at one moment. trajectories: longest remaining first. age_s: of the trajectories, when
    this was made. moves: None where this process may not request them."""

    scheduler: str
    policy: str
    engines: tuple[EngineRow, ...]
    trajectories: tuple[TrajectoryRow, ...]
    rollouts: tuple[RolloutRow, ...]
    moves: tuple[MoveRow, ...] | None
    trajectories_per_minute: float
    age_s: float

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second of all engines together."""
        return sum(engine.tokens_per_s for engine in self.engines)

    def as_json(self) -> dict[str, Any]:
        """Return what --once --json prints; null for what is not known."""
        found = {**asdict(self), "tokens_per_s": self.tokens_per_s}
        return {key: _without_nan(value) for key, value in found.items()}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


@dataclass
class Watcher:
    """Watches a mesh by requests to its scheduler. certificates: of this process, for the
    migrator."""

    scheduler: str
    stub: SchedulerServiceAsyncStub
    certificates: Certificates | None
    _known: list[pb.Trajectory] = field(default_factory=list)
    _asked_s: float = -math.inf  # monotonic, when the last answer had come
    _ask_again_s: float = -math.inf
    # monotonic, trajectories that had ended by then
    _ended: list[tuple[float, int]] = field(default_factory=list)
    _moves_refused: bool = False

    async def look(self) -> Snapshot:
        """Return the mesh at this moment. Raises grpc.aio.AioRpcError."""
        now = time.monotonic()
        if now >= self._ask_again_s:
            self._known = await self._trajectories()
            self._asked_s = time.monotonic()
            self._ask_again_s = self._asked_s + SPARE * (self._asked_s - now)
            ended = sum(each.HasField("closed_at") for each in self._known)
            recent = [(at, n) for at, n in self._ended if self._asked_s - at <= RATE_S]
            self._ended = [*(recent or self._ended[-1:]), (self._asked_s, ended)]
        engines = await self.stub.ListEngines(pb.ListEnginesRequest(), timeout=ASK_S)
        policy = (await self.stub.GetPolicy(pb.GetPolicyRequest(), timeout=ASK_S)).policy
        return Snapshot(
            scheduler=self.scheduler,
            policy=describe_policy(policy),
            engines=tuple(sorted(map(_engine, engines.engines), key=lambda row: row.engine_id)),
            trajectories=sort_longest_remaining(self._known),
            rollouts=rollouts_of(self._known, time.time()),
            moves=await self._moves(),
            trajectories_per_minute=self._rate(),
            age_s=time.monotonic() - self._asked_s,
        )

    async def _trajectories(self) -> list[pb.Trajectory]:
        request, found = pb.ListTrajectoriesRequest(page_size=PAGE), list[pb.Trajectory]()
        while True:
            page = await self.stub.ListTrajectories(request, timeout=ASK_S)
            found += page.trajectories
            request.page_token = page.next_page_token
            if not request.page_token:
                return found

    async def _moves(self) -> tuple[MoveRow, ...] | None:
        if self._moves_refused:
            return None
        address = (
            await self.stub.GetDirectory(pb.GetDirectoryRequest(), timeout=ASK_S)
        ).migrator_address
        if not address:
            return ()
        async with open_channel(address, "migrator", self.certificates) as channel:
            stub = migrator_pb2_grpc.MigratorServiceStub(channel)
            try:
                listed = await stub.ListMigrations(
                    migrator_pb2.ListMigrationsRequest(page_size=PAGE), timeout=ASK_S
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    return ()  # it may be restarting
                self._moves_refused = True
                return None
        return latest_moves(listed.migrations, time.time())

    def _rate(self) -> float:
        """Return how many trajectories end in a minute, over the last RATE_S; the scheduler forgets
        old ones, so never below 0."""
        if len(self._ended) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._ended[0], self._ended[-1]
        return max(0.0, 60.0 * (last - first) / (last_s - first_s))


def _engine(registered: pb.RegisteredEngine) -> EngineRow:
    info, load = registered.info, registered.load
    capacity = load.kv_tokens_capacity or info.kv_tokens_capacity
    return EngineRow(
        engine_id=info.engine_id,
        running=load.running_steps,
        slots=load.slot_limit or info.slot_limit,
        waiting=load.waiting_steps,
        kv_share=load.kv_tokens_used / capacity if capacity else math.nan,
        tokens_per_s=load.decode_tokens_per_s,
        trajectories=registered.trajectories,
        weight_version=load.weight_version or info.weight_version,
        health=_health(registered),
    )


def _health(registered: pb.RegisteredEngine) -> str:
    load = registered.load
    if not load.HasField("measured_at"):
        return "starts"
    if not load.engine_healthy:
        return "lost"
    if load.asleep_tags:
        return "asleep"
    if load.paused:
        return "paused"
    if registered.draining:
        return "drains" if registered.trajectories else "drained"
    return "ok"


def sort_longest_remaining(trajectories: Sequence[pb.Trajectory]) -> tuple[TrajectoryRow, ...]:
    """Return the open trajectories, longest remaining first; those that nobody predicts come last,
    by what they have sampled."""
    rows = [
        TrajectoryRow(
            trajectory_id=each.trajectory_id,
            prompt_id=each.prompt_id,
            sample=each.sample,
            engine_id=each.engine_id,
            turn=each.next_turn,
            gen_tokens=each.gen_tokens,
            left_tokens=each.predicted_remaining_tokens.p50
            if each.HasField("predicted_remaining_tokens")
            else math.nan,
            state=STATES.get(each.state, ""),
            migrations=each.migrations,
            priority=each.priority,
        )
        for each in trajectories
        if not each.HasField("closed_at")
    ]

    def order(row: TrajectoryRow) -> tuple[float, int]:
        return (-1.0 if math.isnan(row.left_tokens) else row.left_tokens, row.gen_tokens)

    return tuple(sorted(rows, key=order, reverse=True))


def rollouts_of(trajectories: Sequence[pb.Trajectory], now_s: float) -> tuple[RolloutRow, ...]:
    """Return the rollouts that are open, then the one that ended last. now_s: unix time."""
    members: defaultdict[str, list[pb.Trajectory]] = defaultdict(list)
    for each in trajectories:
        members[each.rollout_id].append(each)
    rows: list[tuple[bool, float, RolloutRow]] = []
    for rollout_id, own in members.items():
        began_s = min(_unix_s(each.opened_at) for each in own)
        ends_s = sorted(_unix_s(each.closed_at) for each in own if each.HasField("closed_at"))
        is_open = len(ends_s) < len(own)
        until_s = now_s if is_open else ends_s[-1]
        most = math.ceil((1.0 - TAIL) * len(own))
        taxed = len(ends_s) >= most and until_s > began_s
        tax = (until_s - ends_s[most - 1]) / (until_s - began_s) if taxed else math.nan
        rows.append(
            (
                is_open,
                began_s,
                RolloutRow(rollout_id, len(ends_s), len(own), until_s - began_s, tax),
            )
        )
    rows.sort(key=lambda row: (row[0], row[1]), reverse=True)
    still = [row for is_open, _, row in rows if is_open]
    return (*still, *[row for is_open, _, row in rows if not is_open][:1])


def latest_moves(migrations: Sequence[migrator_pb2.Migration], now_s: float) -> tuple[MoveRow, ...]:
    """Return the moves under way, then those that ended last. now_s: unix time."""

    def order(each: migrator_pb2.Migration) -> tuple[bool, float]:
        return (not each.HasField("ended_at"), _unix_s(each.created_at))

    newest = sorted(migrations, key=order, reverse=True)[:SHOWN_MOVES]
    return tuple(
        MoveRow(
            each.trajectory_id,
            each.source_engine_id,
            each.target_engine_id,
            MOVE_STATES.get(each.state, ""),
            (_unix_s(each.ended_at) if each.HasField("ended_at") else now_s)
            - _unix_s(each.created_at),
        )
        for each in newest
    )


def describe_policy(policy: pb.Policy) -> str:
    """Return a policy in words: "progressive, planned, moves, preempts"."""
    ordering, placement = words_of(pb.Ordering), words_of(pb.PlacementRule)
    words = [ordering.get(policy.ordering, "?"), placement.get(policy.placement, "?")]
    words += ["moves"] * policy.migrate + ["preempts"] * policy.preempt
    return ", ".join(word.replace("_", " ") for word in words)


def _unix_s(stamp: Any) -> float:
    return float(stamp.ToNanoseconds() / 1e9)
