"""Table of the engines that hold a lease, and choice of the engine that runs the next step of a
trajectory.

`EngineTable` owns every EngineRecord. An engine is here while its lease runs; it has one lease,
which only the lease's own id renews. `revision` grows with every change, `membership` when an
engine comes, goes, changes its spec or whether it is usable: callers keep what they derive from the
table until these change. Whoever owns the table removes what `expired` names.

The table remembers which engines have lost streams, also after they have left. One that loses
streams again, of other trajectories, rests for longer each time: it gets no new steps, and its
trajectories go on elsewhere. After the rest it gets one step at a time until one has ended. An
engine rests only while another one is usable.

`Siting` chooses an engine by the placement rule of the trajectory's policy. A pinned engine always
wins, and every rule avoids an engine that is gone or unhealthy. An engine that is drained is left,
by trajectories that would stay with it too, unless no other can run them: nothing is refused for
it.
- PINNED (verl): engines in turn at the opening, then always the same.
- STICKY (prime-rl, SkyRL): the least loaded engine at the first step, then always the same.
- LEAST_LOAD (slime): at each step the engine with the fewest live tickets for each slot, wherever
  the prefix is.
- CACHE_AWARE (the SGLang router, as Heddle's Verl* uses it): the engine that holds the prefix, its
  own or, before the first step, a sibling's of the same prompt; while the loads are skewed, the
  least loaded one. Skewed is what the router calls imbalanced: the most loaded engine has over
  `skew_steps` steps more than the least loaded AND over `skew_ratio` times as many. (Heddle prints
  the 32 as a ratio, which would hardly ever be met: a weaker baseline.)
- PLANNED: opens where least predicted work is, goes where the plan places it until its first step,
  as moving is free until then, and stays afterwards: later moves are migrations (`steps.moves`).
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from treadle_core.events import EngineRegistered, LeaseRenewed
from treadle_core.model import (
    INCOMPLETE,
    EngineRecord,
    EngineSpec,
    PlacementRule,
    TicketRecord,
    TrajectoryRecord,
    WeightsRecord,
)
from treadle_core.ranking.priorities import remaining_tokens, token_s
from treadle_core.refusals import (
    ContextTooLong,
    LeaseNotFound,
    NoEngine,
    NoEngineWithTags,
    RequestIdReused,
)
from treadle_core.tables.trajectories import TrajectoryTable
from treadle_core.tuning import Tuning

# Prompts whose engine is remembered; an older one has most likely left the engine's cache as well.
MOST_PROMPTS = 16_384


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of streams at one engine. times: in a row, where streams that began before the last
    loss are of the same time. trajectory_id: of the last one. rests_until_s: no new step before."""

    times: int
    last_s: float
    trajectory_id: str
    rests_until_s: float
    on_trial: bool = True


class EngineTable:
    """Engines by id, in the order of their ids."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning, self._lease_ttl_s = tuning, tuning.lease_ttl_s
        self._engines: dict[str, EngineRecord] = {}
        self._losses: dict[str, Losses] = {}
        self._sorted: tuple[EngineRecord, ...] | None = ()
        self.desired: WeightsRecord | None = None  # None: each engine serves what it has
        self._drained: set[str] = set()  # ids; an engine that registers again is drained still
        self.revision = 0
        self.membership = 0

    def __len__(self) -> int:
        return len(self._engines)

    def __iter__(self) -> Iterator[EngineRecord]:
        if self._sorted is None:
            self._sorted = tuple(self._engines[engine_id] for engine_id in sorted(self._engines))
        return iter(self._sorted)

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._engines

    def get(self, engine_id: str) -> EngineRecord | None:
        return self._engines.get(engine_id)

    def spec(self, engine_id: str) -> EngineSpec | None:
        record = self._engines.get(engine_id)
        return record.spec if record is not None else None

    def restore(self, records: Iterable[EngineRecord], now: float) -> None:
        """Take over stored engines, each with a whole lease, as none could renew while the
        scheduler was away."""
        for record in records:
            self._put(replace(record, lease_expires_s=now + self._lease_ttl_s))

    def find_repeat(self, event: EngineRegistered) -> EngineRecord | None:
        """Return the record that the same request has made before. Raises RequestIdReused where its
        other values differ now."""
        record = self._engines.get(event.spec.engine_id)
        if record is None or record.register_request_id != event.request_id:
            return None
        now = record.spec  # weights and curve may have changed since
        if (
            replace(event.spec, weight_version=now.weight_version, decode_curve=now.decode_curve)
            != now
        ):
            raise RequestIdReused(
                "request_id",
                f"{event.request_id} has registered {event.spec.engine_id} with another "
                "description",
            )
        return record

    def register(self, event: EngineRegistered, now: float) -> EngineRecord:
        """Add an engine, in place of an older one of that id."""
        record = EngineRecord(
            spec=event.spec,
            lease_id=event.lease_id,
            lease_expires_s=now + self._lease_ttl_s,
            register_request_id=event.request_id,
        )
        if self._must_rest(event.spec.engine_id, now):
            losses = self._losses[event.spec.engine_id].times
            record = replace(record, suspect_s=now, losses=losses)
        self._put(record)
        return record

    def renew(self, event: LeaseRenewed, now: float) -> EngineRecord:
        """Extend a lease and store load and curve; an engine that has rested is not suspect any
        more. Raises LeaseNotFound."""
        record = self.require_lease(event.lease_id, event.engine_id)
        spec, load = record.spec, record.load
        if event.load is not None:
            load = event.load
            if load.weight_version and load.weight_version != spec.weight_version:
                spec = replace(spec, weight_version=load.weight_version)
        if event.decode_curve is not None and event.decode_curve != spec.decode_curve:
            spec = replace(spec, decode_curve=event.decode_curve)
        renewed = replace(record, spec=spec, load=load, lease_expires_s=now + self._lease_ttl_s)
        if not self._must_rest(event.engine_id, now):
            renewed = replace(renewed, suspect_s=None, losses=0)
        self._put(renewed)
        return renewed

    def extend_leases(self, seconds: float) -> None:
        """Let all leases end later."""
        for record in self:
            self._put(replace(record, lease_expires_s=record.lease_expires_s + seconds))

    def note_loss(self, ticket: TicketRecord, now: float) -> None:
        """Send no new steps to an engine until it has rested and renews its lease, as the stream of
        a ticket was lost there."""
        tuning, before = self._tuning, self._losses.get(ticket.engine_id)
        times = 1
        if before is not None and now - before.last_s <= tuning.loss_memory_s:
            again = ticket.issued_s > before.last_s
            # A trajectory may itself be what its engines do not survive.
            times = before.times + (again and ticket.trajectory_id != before.trajectory_id)
        rest_s = min(tuning.loss_rest_s * 2 ** min(times - 2, 32), tuning.longest_rest_s)
        rest_s = rest_s if times > 1 else 0.0
        self._losses[ticket.engine_id] = Losses(times, now, ticket.trajectory_id, now + rest_s)
        self._suspect(ticket.engine_id, times, now)

    def note_ticket(self, ticket: TicketRecord, now: float) -> None:
        """Send no further step to an engine that has lost streams repeatedly, until this one has
        ended."""
        losses = self._losses.get(ticket.engine_id)
        if losses is not None and losses.on_trial and losses.times > 1:
            until_s = max(losses.rests_until_s, now + self._tuning.loss_rest_s)
            self._losses[ticket.engine_id] = replace(losses, rests_until_s=until_s)
            self._suspect(ticket.engine_id, losses.times, now)

    def note_end(self, ticket: TicketRecord, now: float) -> None:
        """Note that a step has ended in order: its engine rests no longer, if the step began after
        the last loss there."""
        losses = self._losses.get(ticket.engine_id)
        if losses is not None and losses.on_trial and ticket.issued_s > losses.last_s:
            rested = replace(losses, rests_until_s=now, on_trial=False)
            self._losses[ticket.engine_id] = rested
            self._suspect(ticket.engine_id, 0, None)

    def end_rests(self, now: float) -> None:
        """Suspect engines no more that have rested, and forget losses of long ago. An engine has to
        show that it is there: by a registration or a renewal after the loss."""
        for engine_id, losses in list(self._losses.items()):
            record = self._engines.get(engine_id)
            seen_s = record.lease_expires_s - self._lease_ttl_s if record is not None else -math.inf
            if losses.last_s < seen_s and not self._must_rest(engine_id, now):
                self._suspect(engine_id, 0, None)
            if now - losses.last_s > self._tuning.loss_memory_s:
                del self._losses[engine_id]

    def _suspect(self, engine_id: str, losses: int, since_s: float | None) -> None:
        record = self._engines.get(engine_id)
        if record is not None and (record.suspect_s, record.losses) != (since_s, losses):
            self._put(replace(record, suspect_s=since_s, losses=losses))

    def _must_rest(self, engine_id: str, now: float) -> bool:
        losses = self._losses.get(engine_id)
        return (
            losses is not None
            and now < losses.rests_until_s
            and any(other.usable for other in self if other.spec.engine_id != engine_id)
        )

    def set_weight_version(self, engine_id: str, weight_version: str) -> EngineRecord | None:
        """Store a weight version and return the engine; None where it is not here or has the
        version already."""
        record = self._engines.get(engine_id)
        if record is None or record.spec.weight_version == weight_version:
            return None
        updated = replace(record, spec=replace(record.spec, weight_version=weight_version))
        self._put(updated)
        return updated

    def desire(self, weights: WeightsRecord | None) -> None:
        """Set the weights that all engines are to serve."""
        self.desired = weights
        for record in list(self._engines.values()):
            self._put(replace(record, load_error=""))

    def note_load_error(self, engine_id: str, message: str) -> None:
        """Store why an engine could not load the desired weights."""
        self._put(replace(self._engines[engine_id], load_error=message))

    @property
    def drained(self) -> tuple[str, ...]:
        """Return the ids of the engines that are to be empty, gone ones too."""
        return tuple(sorted(self._drained))

    def drain(self, engine_ids: Iterable[str]) -> None:
        """Set which engines are to be empty."""
        self._drained = set(engine_ids)
        for record in list(self._engines.values()):
            self._put(record)

    def remove(self, engine_id: str) -> None:
        if self._engines.pop(engine_id, None) is not None:
            self.membership += 1
            self._changed()

    def expired(self, now: float) -> list[str]:
        """Return the ids of engines whose lease has run out."""
        return [record.spec.engine_id for record in self if record.lease_expires_s <= now]

    def require_lease(self, lease_id: str, engine_id: str) -> EngineRecord:
        """Return the engine that holds this lease. Raises LeaseNotFound."""
        record = self._engines.get(engine_id)
        if record is None or record.lease_id != lease_id:
            raise LeaseNotFound(
                f"no lease {lease_id} on engine {engine_id}: it ran out or was replaced; register "
                "again",
                lease_id=lease_id,
                engine_id=engine_id,
            )
        return record

    def _put(self, record: EngineRecord) -> None:
        version = record.spec.weight_version
        differs = self.desired is not None and version != self.desired.weight_version
        behind = differs or version.startswith(INCOMPLETE)
        drained = record.spec.engine_id in self._drained
        record = replace(
            record, behind=behind, load_error=record.load_error if behind else "", draining=drained
        )
        old = self._engines.get(record.spec.engine_id)
        if old is None or old.spec is not record.spec or old.usable is not record.usable:
            self.membership += 1
        self._engines[record.spec.engine_id] = record
        self._changed()

    def _changed(self) -> None:
        self._sorted = None
        self.revision += 1


@dataclass(frozen=True, slots=True)
class Able:
    """Engines, by id, that may run trajectories with certain tags. usable: engines for new steps;
    where none is usable, those that are not drained, or all. fits_all: context tokens that each of
    them takes."""

    engines: list[EngineRecord]
    usable: list[EngineRecord]
    fits_all: float

    @classmethod
    def of(cls, engines: list[EngineRecord]) -> "Able":
        limits = [
            engine.spec.max_context_tokens for engine in engines if engine.spec.max_context_tokens
        ]
        usable = [engine for engine in engines if engine.usable]
        usable = usable or [engine for engine in engines if not engine.draining] or engines
        return cls(engines, usable, min(limits) - 1 if limits else math.inf)

    def fitting(self, context_tokens: int) -> "Able":
        """Return the engines that take a context this long and one token more. Raises
        ContextTooLong where there are engines and none does."""
        if context_tokens <= self.fits_all:
            return self
        return Able.of(_require_fitting(self.engines, context_tokens))

    def without(self, engine_id: str) -> "Able":
        """Return all engines but `engine_id`, unless it is the only one."""
        return Able.of(
            [engine for engine in self.engines if engine.spec.engine_id != engine_id]
            or self.engines
        )


class Siting:
    """Chooser of engines. Keeps the position of the round-robin, and which engine received each
    prompt last."""

    def __init__(self, engines: EngineTable, table: TrajectoryTable, tuning: Tuning) -> None:
        self._engines = engines
        self._table = table
        self._tuning = tuning
        self._pinned = 0
        self._prompts: OrderedDict[str, str] = OrderedDict()
        self._able: dict[tuple[str, ...], Able] = {}  # by the tags that they must carry
        self._able_revision = -1
        # the last choice was made: a pattern and its values
        self.why: tuple[str, tuple[object, ...]] = ("", ())
        # required tags that no engine carries
        self._missing_since_s: dict[tuple[str, ...], float] = {}

    def restore(self) -> None:
        """Continue from the stored trajectories of an earlier run."""
        for record in self._table:
            if record.engine_id and record.policy.placement is PlacementRule.PINNED:
                self._pinned += 1
            elif record.ticket is not None:
                self.note_step(record)

    def note_engine(self, spec: EngineSpec) -> None:
        """Note that an engine has registered: its tags are missing no more."""
        found = [tags for tags in self._missing_since_s if set(tags) <= set(spec.hardware_tags)]
        for tags in found:
            del self._missing_since_s[tags]

    def note_step(self, record: TrajectoryRecord) -> None:
        """Note that a step of the trajectory goes to its engine, which will cache the prompt."""
        if record.policy.placement is PlacementRule.CACHE_AWARE:
            self._prompts[record.prompt_id] = record.engine_id
            self._prompts.move_to_end(record.prompt_id)
            if len(self._prompts) > MOST_PROMPTS:
                self._prompts.popitem(last=False)

    def choose(
        self,
        record: TrajectoryRecord,
        *,
        target: str = "",
        avoid: str = "",
        context_tokens: int = 0,
    ) -> EngineRecord | None:
        """Return the engine for the trajectory's next step, or None where none may take it now.

        target: the engine that the plan wants; avoid: one that has just lost a stream of this
        trajectory, taken only where there is no other. Raises ContextTooLong where engines exist
        and none takes `context_tokens`.
        """
        if record.pinned_engine_id:
            pinned = self._engines.get(record.pinned_engine_id)
            if pinned is None or not pinned.able:
                return None
            self.why = ("pinned_engine_id names it", ())
            return _require_fitting([pinned], context_tokens)[0]
        own, first = self._engines.get(record.engine_id), record.ticket is None
        loads = own is not None and own.behind and not own.load_error and not own.draining
        if loads and not first and record.engine_id != avoid:
            return None  # it loads weights, and so do the others; then it goes on there
        rule = record.policy.placement
        if rule in (PlacementRule.PLANNED, PlacementRule.PINNED) or (
            rule is PlacementRule.STICKY and not first
        ):
            free = rule is PlacementRule.PLANNED and first
            for engine_id in (target if free else "", record.engine_id):
                engine = self._engines.get(engine_id) if engine_id and engine_id != avoid else None
                if (
                    engine is not None
                    and (engine.usable or (engine_id == record.engine_id and engine.keeps))
                    and carries_tags(engine, record)
                    and fits_context(engine, context_tokens)
                ):
                    self.why = (
                        "it was there before"
                        if engine_id == record.engine_id
                        else "the plan names it",
                        (),
                    )
                    return engine
        able = self._able_for(record).fitting(context_tokens)
        if avoid:
            able = able.without(avoid)
        if not able.engines:
            return None
        if rule in (PlacementRule.LEAST_LOAD, PlacementRule.STICKY):
            return self._least_loaded(able)
        if rule is PlacementRule.CACHE_AWARE:
            return self._cache_aware(record, able)
        for engine in able.usable:
            if (
                engine.spec.engine_id == record.engine_id
            ):  # to be avoided, or drained, and the only one
                self.why = ("no other engine is there", ())
                return engine
        if rule is PlacementRule.PINNED:
            self._pinned += 1
            self.why = ("engines in turn, of {}", (len(able.usable),))
            return able.usable[(self._pinned - 1) % len(able.usable)]
        return self._least_work(able, record)

    def require_fitting(self, record: TrajectoryRecord, context_tokens: int) -> None:
        """Raise ContextTooLong where engines exist and none takes a context this long, as `choose`
        would."""
        self._able_for(record).fitting(context_tokens)

    def explain_lack(self, record: TrajectoryRecord, now: float) -> NoEngine:
        """Return why `choose` has found no engine, without the trajectory's name, so that a client
        can report it once for all."""
        engines, tags = list(self._engines), ", ".join(record.hardware_tags)
        lack, kind = "no engine is registered", NoEngine
        if record.pinned_engine_id:
            lack = (
                f"engine {record.pinned_engine_id}, to which the trajectory is pinned, is gone "
                "or not healthy"
            )
        elif any(carries_tags(engine, record) for engine in engines):
            lack = (
                f"no engine with the hardware tags {tags} is healthy"
                if tags
                else "no engine is healthy"
            )
            if any(engine.behind for engine in engines):
                lack = (
                    f"{lack} and serves the desired weights; engines that do not are loading "
                    "them, or cannot"
                )
        elif engines:
            missing_s = now - self._missing_since_s.setdefault(record.hardware_tags, now)
            known = ", ".join(
                sorted({tag for engine in engines for tag in engine.spec.hardware_tags})
            )
            lack = (
                f"none of the {len(engines)} engines carries the hardware tags {tags}; "
                f"engines have {f'the tags {known}' if known else 'no tags'}"
            )
            longest_s = self._tuning.missing_tags_s
            if missing_s < longest_s:
                lack = f"{lack}; steps are refused once that is so for {longest_s:g} s"
            else:
                lack, kind = f"{lack}, for over {longest_s:g} s", NoEngineWithTags
        return kind(lack, trajectory_id=record.trajectory_id)

    def _able_for(self, record: TrajectoryRecord) -> Able:
        """Return the healthy engines with the trajectory's tags; kept until the engines change."""
        if self._able_revision != self._engines.revision:
            self._able.clear()
            self._able_revision = self._engines.revision
        able = self._able.get(record.hardware_tags)
        if able is None:
            able = Able.of(
                [engine for engine in self._engines if engine.able and carries_tags(engine, record)]
            )
            self._able[record.hardware_tags] = able
        return able

    def _cache_aware(self, record: TrajectoryRecord, able: Able) -> EngineRecord:
        tally = self._table.tally
        steps = [tally(engine.spec.engine_id).live_tickets for engine in able.usable]
        most, least = max(steps), min(steps)
        if most - least <= self._tuning.skew_steps or most <= self._tuning.skew_ratio * least:
            holder = (
                record.engine_id
                if record.ticket is not None
                else self._prompts.get(record.prompt_id, "")
            )
            for engine in able.usable:
                if engine.spec.engine_id == holder:
                    self.why = ("it holds the prefix, with {} to {} steps an engine", (least, most))
                    return engine
        return self._least_loaded(able)

    def _least_loaded(self, able: Able) -> EngineRecord:
        """Return the engine with the fewest live tickets for each slot, then the fewest waiting
        steps, then the smaller id. The count of tickets is newer than any measured load."""
        tally = self._table.tally
        best, least = able.usable[0], (math.inf, math.inf)
        for engine in able.usable:
            spec, load = engine.spec, engine.load
            steps = tally(spec.engine_id).live_tickets / (spec.slot_limit or 1)
            if steps <= least[0]:
                standing = (steps, float(load.waiting_steps) if load is not None else 0.0)
                if standing < least:
                    best, least = engine, standing
        self.why = ("fewest steps a slot, {:.2f}, of {} engines", (least[0], len(able.usable)))
        return best

    def _least_work(self, able: Able, record: TrajectoryRecord) -> EngineRecord:
        """Return the engine with the least seconds of predicted work, this trajectory added and all
        slots decoding; then the fewest trajectories, then the smaller id."""
        tally = self._table.tally
        added = remaining_tokens(record, self._tuning)
        best, least_s, fewest, next_s = able.usable[0], math.inf, 0, math.inf
        for engine in able.usable:
            spec = engine.spec
            there = tally(spec.engine_id)
            work_s = (there.tokens + added) * token_s(spec) / (spec.slot_limit or 1)
            if work_s < least_s or (work_s == least_s and there.trajectories < fewest):
                best, least_s, fewest, next_s = engine, work_s, there.trajectories, least_s
            elif work_s < next_s:
                next_s = work_s
        self.why = ("least predicted work: {:.1f} s, the next {:.1f} s", (least_s, next_s))
        if len(able.usable) == 1:
            self.why = ("the only engine", ())
        return best


def carries_tags(engine: EngineRecord, record: TrajectoryRecord) -> bool:
    """Return whether the engine has all the hardware tags that the trajectory requires."""
    return not record.hardware_tags or set(record.hardware_tags) <= set(engine.spec.hardware_tags)


def fits_context(engine: EngineRecord, context_tokens: int) -> bool:
    """Return whether the engine takes a context this long and one token more."""
    return not engine.spec.max_context_tokens or context_tokens < engine.spec.max_context_tokens


def _require_fitting(able: list[EngineRecord], context_tokens: int) -> list[EngineRecord]:
    fitting = [engine for engine in able if fits_context(engine, context_tokens)]
    if able and not fitting:
        longest = max(engine.spec.max_context_tokens for engine in able)
        raise ContextTooLong(
            "context_tokens",
            f"{context_tokens} tokens leave no room to generate: the longest context of an engine "
            f"is {longest}",
        )
    return fitting
