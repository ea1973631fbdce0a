"""Plans: when to ask for one, and whether to follow it.

Owns the plan in force: the engine that each trajectory should be on, and what each of the moves still to be made is
worth. The plan is re-solved on REMAINING work (reference: 15-20% better than scaling ranks), never trusted on its own
word: it is followed only where the core's own cost model says that it beats both the present placement and a plain
rebalance of it by a margin. With few engines and few slots that is seldom so, and then nothing moves.
"""

from collections.abc import Mapping

from treadle_core import balance
from treadle_core.actions import AskPlan, PlanEngine, PlanTrajectory
from treadle_core.balance import Work
from treadle_core.engines import EngineRegistry
from treadle_core.events import PlanArrived
from treadle_core.model import EngineSpec, PlacementRule, TrajectoryRecord
from treadle_core.remaining import remaining_s, remaining_tokens
from treadle_core.siting import carries_tags
from treadle_core.trajectories import TrajectoryTable
from treadle_core.tuning import Tuning


class Planner:
    """Asks for plans, judges them, and knows where each trajectory should be."""

    def __init__(self, engines: EngineRegistry, table: TrajectoryTable, tuning: Tuning) -> None:
        self._engines = engines
        self._table = table
        self._tuning = tuning
        self._changes = 0
        self._plan_id = 0
        self._asked_s: float | None = None
        self._last_asked_s = float("-inf")
        self._targets: dict[str, str] = {}
        self._share_s = 0.0

    def target(self, trajectory_id: str) -> str:
        """Where the plan in force wants a trajectory; empty where it says nothing."""
        return self._targets.get(trajectory_id, "")

    def settle(self, trajectory_id: str) -> None:
        """The trajectory has moved, or closed: the plan has no wish for it any more."""
        self._targets.pop(trajectory_id, None)

    def note(self, changes: int = 1) -> None:
        """The remaining work has changed."""
        self._changes += changes

    def note_engines(self) -> None:
        """The engines have changed: the plan in force is void and a new one due."""
        self._targets.clear()
        self._changes += max(self._tuning.plan_every_events, self._table.open_count())

    def ask(self, now: float) -> AskPlan | None:
        """The question, where one is due: enough has changed, none is under way, and there is a choice to make."""
        tuning = self._tuning
        # Of few trajectories each event changes much, and at the tail engines fall idle; of many it changes little.
        count = self._table.open_count()
        enough = max(min(tuning.plan_every_events, count // 2), count // tuning.plan_trajectories_per_event, 1)
        if self._changes < enough or now - self._last_asked_s < tuning.plan_interval_s:
            return None
        if self._asked_s is not None and now - self._asked_s < tuning.plan_timeout_s:
            return None
        specs = self._specs()
        movable = [record for record in self._table.open_records() if self._movable(record)] if len(specs) > 1 else []
        self._changes = 0
        if not movable:
            return None
        self._plan_id += 1
        self._asked_s = self._last_asked_s = now
        return AskPlan(
            self._plan_id,
            tuple(
                PlanTrajectory(
                    record.trajectory_id,
                    remaining_tokens(record, tuning),
                    record.context_tokens or record.prompt_tokens,
                    record.engine_id,
                )
                for record in movable
            ),
            tuple(
                PlanEngine(
                    spec.engine_id, spec.slot_limit, spec.kv_tokens_capacity, spec.tensor_parallel, spec.decode_curve
                )
                for spec in specs.values()
            ),
        )

    def arrived(self, event: PlanArrived) -> list[str]:
        """Takes the best of the present placement, a rebalance of it and the plan; names the trajectories that should
        move.

        A plan that is not the last one asked for is ignored: its engines or lengths may be gone.
        """
        if event.plan_id != self._plan_id or self._asked_s is None:
            return []
        self._asked_s = None
        specs = self._specs()
        records = [record for record in self._table.open_records() if record.engine_id in specs]
        works = {record.trajectory_id: self._work(record, specs) for record in records}
        present = {record.trajectory_id: record.engine_id for record in records}
        movable = frozenset(record.trajectory_id for record in records if self._movable(record))
        chosen = self._best(event, present, works, specs, movable)
        self._targets = {
            trajectory_id: engine_id
            for trajectory_id, engine_id in chosen.items()
            if engine_id != present[trajectory_id]
        }
        saved_s = _last(balance.finish_times(present, works, specs)) - _last(balance.finish_times(chosen, works, specs))
        self._share_s = max(0.0, saved_s) / len(self._targets) if self._targets else 0.0
        return list(self._targets)

    def saving_s(self, record: TrajectoryRecord, target: EngineSpec) -> float:
        """Seconds that one move of the plan is worth: its share of what the plan saves, or what it saves the two
        engines by itself."""
        source = self._engines.spec(record.engine_id)
        if source is None:
            return 0.0
        pair = {source.engine_id: source, target.engine_id: target}
        records = [other for engine_id in pair for other in self._table.on(engine_id)]
        works = {other.trajectory_id: self._work(other, pair) for other in records}
        placement = {other.trajectory_id: other.engine_id for other in records}
        before_s = _last(balance.finish_times(placement, works, pair))
        placement[record.trajectory_id] = target.engine_id
        after_s = _last(balance.finish_times(placement, works, pair))
        return max(self._share_s, before_s - after_s)

    def _best(
        self,
        event: PlanArrived,
        present: Mapping[str, str],
        works: Mapping[str, Work],
        specs: Mapping[str, EngineSpec],
        movable: frozenset[str],
    ) -> Mapping[str, str]:
        margin = self._tuning.plan_margin
        best: Mapping[str, str] = present
        times = balance.finish_times(present, works, specs)
        planned = dict(present)
        for engine_id, trajectory_ids in event.groups:
            if engine_id in specs:
                planned.update(
                    (trajectory_id, engine_id) for trajectory_id in trajectory_ids if trajectory_id in movable
                )
        moved = {trajectory_id: planned[trajectory_id] for trajectory_id in movable}
        relabelled = {**present, **balance.relabelled(moved, present, works, specs)}
        for candidate in (balance.rebalanced(present, works, specs, margin, movable), planned, relabelled):
            candidate_times = balance.finish_times(candidate, works, specs)
            if balance.better(candidate_times, times, margin):
                best, times = candidate, candidate_times
        if best is planned and not balance.better(times, balance.finish_times(relabelled, works, specs), 0.0):
            return relabelled  # as good, and less to move
        return best

    def _work(self, record: TrajectoryRecord, specs: Mapping[str, EngineSpec]) -> Work:
        spec = specs[record.engine_id]
        context_tokens = record.context_tokens or record.prompt_tokens
        alone_s = remaining_s(record, spec.decode_curve.base_s, self._tuning)
        return Work(record.trajectory_id, remaining_tokens(record, self._tuning), context_tokens, alone_s)

    def _specs(self) -> dict[str, EngineSpec]:
        return {engine.spec.engine_id: engine.spec for engine in self._engines if engine.usable}

    def _movable(self, record: TrajectoryRecord) -> bool:
        return (
            record.policy.placement is PlacementRule.PLANNED
            and not record.pinned_engine_id
            and (record.policy.migrate or record.ticket is None)
            and record.engine_id in self._engines
            and (not record.hardware_tags or all(carries_tags(engine, record) for engine in self._engines))
        )


def _last(times: Mapping[str, float]) -> float:
    return max(times.values(), default=0.0)
