"""Run `treadle top`: read what a mesh does at one moment, and draw it in a terminal.

Engines are requested each time. All trajectories are many messages: they are requested again only
after SPARE times as long as the last answer took, so that `treadle top` takes a small share of the
scheduler's core, however large the mesh.

In 80 columns or more, engines, moves and rollouts are drawn whole, and as many of the longest
trajectories as fit. Whatever comes from the mesh is printed as plain text: no name of a prompt can
change the terminal.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import grpc.aio
import typer
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text
from treadle.certificates import Certificates, open_channel
from treadle.migrator.v1 import migrator_pb2, migrator_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle.types import words_of

from treadle_cli import exits
from treadle_cli.exits import Terminal, UsageProblem, cell, printable
from treadle_cli.mesh.scheduler import own_certificates, reach_scheduler
from treadle_cli.options import DEFAULT_SCHEDULER, AsJson, Scheduler, print_json
from treadle_cli.report.style import COLOURS

if TYPE_CHECKING:
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

REFRESH_S = 1.0
CALL_S = 5.0
PAGE = 1_000
SPARE = 20.0  # 5% of the scheduler's core at most
TAIL = 0.1  # share of a rollout's samples that the straggler tax counts
SHOWN_MOVES = 8
RATE_S = 10.0  # how far back rates look, or to the answer before where that is longer ago
MOVE_STATES, STATES = words_of(migrator_pb2.MigrationState), words_of(pb.TrajectoryState)
BAR = 6  # characters
VERSION = 8  # last characters of a weight version
MOST = 24  # last characters of a name in a row of several
SHOWN_ENGINES, SHOWN_ROLLOUTS, DRAWN_MOVES = 12, 3, 4
HEALTH_STYLES = {"ok": "green", "lost": "bold red"}  # else yellow
UNKNOWN = "–"
OLD_S = 3.0  # age from which trajectories are marked as such
NO_ROLLOUT = "(no rollout)"


def top(
    scheduler: Scheduler = DEFAULT_SCHEDULER,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a mesh while it runs, once a second until Ctrl-C: engines, rollouts and their straggler
    tax, moves, and the trajectories with the longest way to go."""
    exits.run(lambda _: run_top(scheduler, once, as_json, Terminal()))


async def run_top(scheduler: str, once: bool, as_json: bool, out: Console) -> int:
    """Show the mesh at `scheduler`, and return the exit code. Raises UsageProblem, TreadleError."""
    if as_json and not once:
        raise UsageProblem("--json prints one snapshot: give --once with it")
    if not once and not out.is_terminal:
        raise UsageProblem(
            "treadle top needs a terminal: give --once, or --once --json, where there is none"
        )
    async with reach_scheduler(scheduler) as stub:
        watcher = Watcher(scheduler, stub, own_certificates())
        snapshot = await watcher.look()
        if once:
            print_json(snapshot.as_json()) if as_json else out.print(Screen(snapshot))
            return 0
        answered_s = time.monotonic()
        with Live(Screen(snapshot), console=out, screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(REFRESH_S)
                try:
                    snapshot = await watcher.look()
                    answered_s = time.monotonic()
                    live.update(Screen(snapshot), refresh=True)
                except grpc.aio.AioRpcError:
                    # the scheduler restarts, or another one leads: the last state stays
                    live.update(Screen(snapshot, time.monotonic() - answered_s), refresh=True)


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
    _listed_s: float = -math.inf  # monotonic, when the last answer had come
    _list_again_s: float = -math.inf
    # monotonic, trajectories that had ended by then
    _ended: list[tuple[float, int]] = field(default_factory=list)
    _moves_refused: bool = False

    async def look(self) -> Snapshot:
        """Return the mesh at this moment. Raises grpc.aio.AioRpcError."""
        now = time.monotonic()
        if now >= self._list_again_s:
            self._known = await self._trajectories()
            self._listed_s = time.monotonic()
            self._list_again_s = self._listed_s + SPARE * (self._listed_s - now)
            ended = sum(each.HasField("closed_at") for each in self._known)
            recent = [(at, n) for at, n in self._ended if self._listed_s - at <= RATE_S]
            self._ended = [*(recent or self._ended[-1:]), (self._listed_s, ended)]
        engines = await self.stub.ListEngines(pb.ListEnginesRequest(), timeout=CALL_S)
        policy = (await self.stub.GetPolicy(pb.GetPolicyRequest(), timeout=CALL_S)).policy
        return Snapshot(
            scheduler=self.scheduler,
            policy=describe_policy(policy),
            engines=tuple(sorted(map(_engine, engines.engines), key=lambda row: row.engine_id)),
            trajectories=sort_longest_remaining(self._known),
            rollouts=rollouts_of(self._known, time.time()),
            moves=await self._moves(),
            trajectories_per_minute=self._rate(),
            age_s=time.monotonic() - self._listed_s,
        )

    async def _trajectories(self) -> list[pb.Trajectory]:
        request, found = pb.ListTrajectoriesRequest(page_size=PAGE), list[pb.Trajectory]()
        while True:
            page = await self.stub.ListTrajectories(request, timeout=CALL_S)
            found += page.trajectories
            request.page_token = page.next_page_token
            if not request.page_token:
                return found

    async def _moves(self) -> tuple[MoveRow, ...] | None:
        if self._moves_refused:
            return None
        address = (
            await self.stub.GetDirectory(pb.GetDirectoryRequest(), timeout=CALL_S)
        ).migrator_address
        if not address:
            return ()
        async with open_channel(address, "migrator", self.certificates) as channel:
            stub = migrator_pb2_grpc.MigratorServiceStub(channel)
            try:
                listed = await stub.ListMigrations(
                    migrator_pb2.ListMigrationsRequest(page_size=PAGE), timeout=CALL_S
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
        # the scheduler's clock may be ahead of this machine's
        until_s = max(now_s, began_s, *ends_s) if is_open else ends_s[-1]
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
            max(
                0.0,
                (_unix_s(each.ended_at) if each.HasField("ended_at") else now_s)
                - _unix_s(each.created_at),
            ),
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


class Screen:
    """A snapshot as something that rich prints, as high as the terminal."""

    def __init__(self, snapshot: Snapshot, silent_s: float = 0.0) -> None:
        """Draw a snapshot. silent_s: for how long the scheduler has not answered; 0: it has."""
        self._snapshot, self._silent_s = snapshot, silent_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        yield Group(*self._parts(height))

    def _parts(self, height: int) -> list[Text | Table]:
        shot = self._snapshot
        parts: list[Text | Table] = [self._headline(), Text("")]
        parts.append(_engines(shot.engines[:SHOWN_ENGINES]))
        parts += _more(len(shot.engines) - SHOWN_ENGINES, "engines")
        if shot.rollouts:
            parts += [Text(""), _rollouts(shot.rollouts[:SHOWN_ROLLOUTS])]
        if shot.moves:
            parts += [Text(""), _moves(shot.moves[:DRAWN_MOVES])]
        used = sum(
            part.row_count + 1 if isinstance(part, Table) else part.plain.count("\n") + 1
            for part in parts
        )
        # a blank line, the heading, how many more there are, and the cursor's line
        room = max(1, height - used - 4)
        parts += [Text(""), _trajectories(shot.trajectories[:room])]
        parts += _more(len(shot.trajectories) - room, "trajectories")
        return parts

    def _headline(self) -> Text:
        shot = self._snapshot
        age = f" {shot.age_s:.0f} s ago" if shot.age_s >= OLD_S else ""
        healthy = sum(engine.health == "ok" for engine in shot.engines)
        text = Text.assemble(
            ("treadle top ", "bold"),
            f"{printable(shot.scheduler)}  {healthy}/{len(shot.engines)} engines ok, ",
            f"{len(shot.trajectories)} trajectories open{age}\n",
            f"{shot.tokens_per_s:,.0f} tok/s, {shot.trajectories_per_minute:,.0f} "
            f"trajectories/min; {shot.policy}",
        )
        if self._silent_s:
            text.append(
                f"\nno answer for {self._silent_s:.0f} s: this is what was known before", "bold red"
            )
        return text


def _more(count: int, what: str) -> list[Text]:
    return [Text(f"  and {count} more {what}", "dim")] if count > 0 else []


def _table(*columns: str, left: Sequence[int] = (0,)) -> Table:
    """Return a table whose first column gets shorter where there is no room for all."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for index, name in enumerate(columns):
        heading = Text(name, no_wrap=True, overflow="ellipsis")
        justify: Literal["left", "right"] = "left" if index in left else "right"
        table.add_column(heading, justify=justify, no_wrap=index > 0, overflow="ellipsis")
    return table


def _name(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _engines(engines: Sequence[EngineRow]) -> Table:
    table = _table(
        "engine",
        "batch",
        "",
        "queue",
        "KV",
        "",
        "tok/s",
        "traj",
        "weights",
        "health",
        left=(0, 2, 5, 8, 9),
    )
    for each in engines:
        table.add_row(
            _name(each.engine_id),
            f"{each.running}/{each.slots}",
            _bar(each.running / each.slots if each.slots else math.nan, COLOURS["decode"]),
            Text(str(each.waiting), COLOURS["queue"] if each.waiting else ""),
            UNKNOWN if math.isnan(each.kv_share) else f"{each.kv_share:.0%}",
            _bar(each.kv_share, COLOURS["prefill"]),
            f"{each.tokens_per_s:,.0f}",
            str(each.trajectories),
            Text(printable(each.weight_version)[-VERSION:]),
            Text(each.health, HEALTH_STYLES.get(each.health, "yellow")),
        )
    return table


def _rollouts(rollouts: Sequence[RolloutRow]) -> Table:
    table = _table("rollout", "ended", "", "running", "straggler tax", left=(0, 2))
    for each in rollouts:
        tax = (
            "not yet: a tenth is to end"
            if math.isnan(each.straggler_tax)
            else f"{each.straggler_tax:.0%}"
        )
        table.add_row(
            _name(each.rollout_id or NO_ROLLOUT),
            f"{each.done}/{each.total}",
            _bar(each.done / each.total, COLOURS["tool"]),
            f"{each.running_s:,.0f} s",
            tax,
        )
    return table


def _moves(moves: Sequence[MoveRow]) -> Table:
    table = _table("move", "from", "to", "state", "s", left=(0, 1, 2, 3))
    for each in moves:
        ends = (each.source[-MOST:], each.target[-MOST:], each.state)
        table.add_row(_name(each.trajectory_id), *map(cell, ends), f"{each.seconds:.1f}")
    return table


def _trajectories(rows: Sequence[TrajectoryRow]) -> Table:
    table = _table(
        "longest remaining", "engine", "turn", "tokens", "left", "state", "moves", left=(0, 1, 5)
    )
    for each in rows:
        table.add_row(
            _name(f"{printable(each.prompt_id)[-MOST:]} #{each.sample}"),
            cell(each.engine_id[-MOST:] or UNKNOWN),
            str(each.turn),
            f"{each.gen_tokens:,}",
            UNKNOWN if math.isnan(each.left_tokens) else f"{each.left_tokens:,.0f}",
            cell(each.state),
            str(each.migrations),
        )
    return table


def _bar(share: float, colour: str) -> Text:
    if math.isnan(share):
        return Text("")
    full = min(BAR, max(0, round(share * BAR)))
    return Text.assemble(("━" * full, colour), ("─" * (BAR - full), COLOURS["other"]))
