"""What a plan is made from, at one moment: the open trajectories as arrays, and the engines that may run them.

Owns nothing but what it derives: `Roster` is kept until the engines change, `Picture` is made for each question. An
engine's index is its place among the usable engines by id, -1 for one that is not usable.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from treadle_core.model import EngineSpec
from treadle_core.placing import balance
from treadle_core.placing.balance import EngineTable
from treadle_core.placing.question import PlanEngine
from treadle_core.placing.scenarios import Samples, sampled
from treadle_core.placing.worksheet import Flags, Floats, Indexes, Live, Worksheet
from treadle_core.tables.engines import EngineRegistry


@dataclass(frozen=True)
class Roster:
    """The usable engines by id, and what the numbers of the worksheet mean for them.

    index_of_number: engine number -> index; here: engine number -> whether it holds a lease; carried: number of a set
    of tags -> whether every engine carries all of them.
    """

    specs: tuple[EngineSpec, ...]
    plan_engines: tuple[PlanEngine, ...]
    table: EngineTable
    index_of: dict[str, int]
    index_of_number: Indexes
    here: Flags
    carried: Flags


@dataclass(frozen=True)
class Picture:
    """Trajectories and engines. placement: index of each trajectory's engine."""

    live: Live
    roster: Roster

    @cached_property
    def placement(self) -> Indexes:
        """Where each trajectory is."""
        return self.roster.index_of_number[self.live.engine_number]

    @cached_property
    def work(self) -> Floats:
        """What is left of each, as `balance` reads it."""
        return balance.works(self.lengths, self.live.context_tokens, self.live.tool_s)

    @cached_property
    def lengths(self) -> Floats:
        """What is left of each in tokens, its tool calls as the tokens that an engine samples meanwhile: who is in a
        tool takes no engine's time, but as long to end."""
        base_s = float(self.roster.table.rows[:, balance.BASE_S].mean()) if len(self.roster.specs) else 0.0
        return self.live.tokens + self.live.tool_s / base_s if base_s > 0.0 else self.live.tokens

    @cached_property
    def room_tokens(self) -> Floats:
        """What each cap leaves, counted as `lengths` is."""
        return self.live.room_tokens + (self.lengths - self.live.tokens)

    @cached_property
    def samples(self) -> Samples:
        """What could come of the predictions, tool calls apart."""
        live = self.live
        return sampled(live.rows, live.tokens, live.context_tokens, live.tool_s, live.log_sigma, live.room_tokens)

    def movable(self, rule: float) -> Flags:
        """Those that a rule may place elsewhere: any engine may run them, and they have one."""
        live, roster = self.live, self.roster
        movable: Flags = (live.rule == rule) & roster.here[live.engine_number] & roster.carried[live.tags_number]
        return movable


class Pictures:
    """Makes pictures; keeps the roster while it holds."""

    def __init__(self, engines: EngineRegistry, worksheet: Worksheet) -> None:
        self._engines = engines
        self._worksheet = worksheet
        self._roster: Roster | None = None
        self._made_for = (-1, -1, -1)

    def now(self) -> Picture:
        """How things are."""
        return Picture(self._worksheet.live(), self.roster())

    def roster(self) -> Roster:
        """The engines."""
        numbers, tags = self._worksheet.engines, self._worksheet.tags
        made_for = (self._engines.membership, len(numbers), len(tags))
        if self._roster is None or made_for != self._made_for:
            self._roster, self._made_for = self._made(), made_for
        return self._roster

    def _made(self) -> Roster:
        all_tags = [set(engine.spec.hardware_tags) for engine in self._engines]
        everywhere = set.intersection(*all_tags) if all_tags else set()
        specs = tuple(engine.spec for engine in self._engines if engine.usable)
        index_of = {spec.engine_id: index for index, spec in enumerate(specs)}
        names = cast("list[str]", self._worksheet.engines.values())
        tags = cast("list[tuple[str, ...]]", self._worksheet.tags.values())
        return Roster(
            specs=specs,
            plan_engines=tuple(
                PlanEngine(
                    spec.engine_id, spec.slot_limit, spec.kv_tokens_capacity, spec.tensor_parallel, spec.decode_curve
                )
                for spec in specs
            ),
            table=balance.engine_table(specs),
            index_of=index_of,
            index_of_number=np.array([index_of.get(name, -1) for name in names], np.int64),
            here=np.array([name in self._engines for name in names], np.bool_),
            carried=np.array([everywhere.issuperset(each) for each in tags], np.bool_),
        )
