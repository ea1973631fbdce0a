"""GPUs in chunks with services in their memory: one action a GPU, least recently used out first, no
more than fits."""

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from treadle_core.tools.action import GPUS, Action, Demand, Fixed, InvalidActionError, UnitSet
from treadle_core.tools.arrangement import Chunk
from treadle_core.tools.decision import ActionQueue, Start, decide
from treadle_core.tools.gpu import GpuManager, gpus_of
from treadle_core.tools.grants import (
    SERVED,
    End,
    Ended,
    GpuGrant,
    InvalidHoldingError,
    Resident,
    Service,
)
from treadle_core.tools.pools import InvalidPoolError

GPU_BYTES = 80
SERVICES = [
    Service(name, degree, amount // degree)
    for name, amount in (("big", 80), ("mid", 40), ("low", 24))
    for degree in (1, 2, 4, 8)
]


def asks(action_id: str, service: str | None, degree: int) -> Start:
    return Start(
        Action(action_id, action_id, 0, {GPUS: Fixed(degree)}, service=service), degree, None, None
    )


def take(
    manager: GpuManager, action_id: str, service: str | None, degree: int, now_s: float
) -> GpuGrant:
    return manager.take(asks(action_id, service, degree), {GPUS: degree}, now_s, 1.0)


def use(manager: GpuManager, service: str | None, degree: int, now_s: float) -> GpuGrant:
    """Takes and gives back at once."""
    grant = take(manager, "used", service, degree, now_s)
    manager.give_back("used", SERVED, now_s)
    return grant


class GpuLife(RuleBasedStateMachine):
    """Any order of takes and ends, against what the grants alone say."""

    running = Bundle("running")

    @initialize()
    def begin(self) -> None:
        self.manager = GpuManager(["a", "b"], GPU_BYTES, SERVICES)
        self.grants: dict[str, GpuGrant] = {}
        self.there: set[Resident] = set()
        self.now_s = 0.0

    @rule(
        target=running,
        service=st.sampled_from(["big", "mid", "low", None]),
        degree=st.sampled_from([1, 2, 4, 8]),
    )
    def takes(self, service: str | None, degree: int) -> str:
        self.now_s += 1.0
        action_id = f"x{self.now_s}"
        (pool,) = self.manager.pools(self.now_s)
        waiting = ActionQueue(pool.capacities())
        waiting.add(asks(action_id, service, degree).action)
        starts = decide(waiting, [pool], self.manager.executing(self.now_s), 1.0)
        if not starts:
            with pytest.raises(InvalidHoldingError):
                take(self.manager, action_id, service, degree, self.now_s)
            return ""
        grant = self.manager.take(starts[0], {GPUS: degree}, self.now_s, 1.0)
        assert grant.chunk.size == degree
        self.there -= set(grant.evicted)
        if service is not None:
            resident = Resident(Service(service, degree, grant.service.bytes_per_gpu), grant.chunk)  # type: ignore[union-attr]
            assert grant.restore == (resident not in self.there)
            self.there.add(resident)
        self.grants[action_id] = grant
        return action_id

    @rule(action_id=consumes(running), failed=st.booleans())
    def ends(self, action_id: str, failed: bool) -> None:
        self.now_s += 1.0
        if not action_id:
            return
        grant = self.grants.pop(action_id)
        self.manager.give_back(action_id, Ended(End.FAILED) if failed else SERVED, self.now_s)
        if failed and grant.service is not None:
            self.there.discard(Resident(grant.service, grant.chunk))

    @invariant()
    def one_action_a_gpu_and_no_memory_twice(self) -> None:
        held = [gpu for grant in self.grants.values() for gpu in gpus_of(grant.chunk)]
        assert len(set(held)) == len(held)
        (pool,) = self.manager.pools(self.now_s)
        free = {(node, number) for node, numbers in pool.free.items() for number in numbers}
        assert free | set(held) == {(node, number) for node in ("a", "b") for number in range(8)}
        assert not free & set(held)
        for grant in self.grants.values():
            assert grant.service is None or Resident(grant.service, grant.chunk) in self.there
        for node in ("a", "b"):
            for number in range(8):
                used = [
                    r.service.bytes_per_gpu
                    for r in self.there
                    if (node, number) in gpus_of(r.chunk, r.service)
                ]
                assert sum(used) <= GPU_BYTES
        (figures,) = self.manager.usage(self.now_s)
        assert (figures.held, figures.free, figures.capacity) == (len(held), len(free), 16)


TestGpuLife = GpuLife.TestCase


def test_the_chunk_that_holds_the_service_is_preferred() -> None:
    """
    GIVEN   a service in the memory of a chunk, and the free chunks of its size
    WHEN    it is asked for again after others
    Result: it executes there and is not restored"""
    manager = GpuManager(["a", "b"], GPU_BYTES, SERVICES)
    take(manager, "first", "mid", 4, 0.0)
    second = take(manager, "second", "big", 4, 0.0)
    assert second.chunk == Chunk("a", 4, 4)
    assert second.restore_bytes == 80
    manager.give_back("first", SERVED, 1.0)
    manager.give_back("second", SERVED, 1.0)
    again = use(manager, "big", 4, 2.0)
    assert (again.chunk, again.restore, again.evicted) == (second.chunk, False, ())


def test_services_share_the_memory_of_a_gpu_while_they_fit_and_the_least_recently_used_goes() -> (
    None
):
    """
    GIVEN   one GPU's worth of free chunks (the other seven are busy)
    WHEN    services come that do not all fit
    Result: what was used least recently goes, and only as much as must"""
    manager = GpuManager(["a"], GPU_BYTES, SERVICES)
    for degree in (4, 2, 1):
        take(manager, f"busy{degree}", None, degree, 0.0)
    chunk = Chunk("a", 7, 1)
    assert use(manager, "mid", 1, 1.0) == GpuGrant(chunk, SERVICES[4], 40, ())
    assert use(manager, "low", 1, 2.0) == GpuGrant(chunk, SERVICES[8], 24, ())
    assert not use(manager, "mid", 1, 3.0).restore
    big = use(manager, "big", 1, 4.0)
    assert big.evicted == (Resident(SERVICES[8], chunk), Resident(SERVICES[4], chunk))
    assert use(manager, "low", 1, 5.0).evicted == (Resident(SERVICES[0], chunk),)
    assert use(manager, "mid", 1, 6.0).evicted == ()
    # 16 bytes are free, of 80; low is older than mid.
    assert use(manager, "big", 1, 7.0).evicted == (
        Resident(SERVICES[8], chunk),
        Resident(SERVICES[4], chunk),
    )


def test_of_equal_chunks_the_one_that_was_used_least_recently_gives_way() -> None:
    manager = GpuManager(
        ["a", "b"], GPU_BYTES, [Service("p", 8, 80), Service("q", 8, 80), Service("r", 8, 80)]
    )
    take(manager, "p", "p", 8, 0.0)
    take(manager, "q", "q", 8, 0.0)
    manager.give_back("q", SERVED, 1.0)
    manager.give_back("p", SERVED, 2.0)
    third = use(manager, "r", 8, 3.0)
    assert (third.chunk.node_id, [gone.service.name for gone in third.evicted]) == ("b", ["q"])


def test_a_smaller_chunk_is_split_before_a_larger_one_that_holds_the_service() -> None:
    """The smallest chunk that is free comes first, as in §5.3, so that large ones stay whole."""
    manager = GpuManager(["a"], GPU_BYTES, SERVICES)
    take(manager, "left", None, 4, 0.0)
    there = take(manager, "right", "mid", 2, 0.0)
    assert there.chunk == Chunk("a", 4, 2)
    take(manager, "end", None, 1, 0.0)
    manager.give_back("right", SERVED, 1.0)
    assert take(manager, "one", "mid", 1, 2.0).chunk == Chunk("a", 7, 1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"node_ids": ["a", "a"]}, "node_ids"),
        ({"node_ids": {"a": (7, 8)}}, "node_ids['a']"),
        ({"services": [SERVICES[0], SERVICES[0]]}, "services[1]"),
        ({"services": [Service("x", 9, 1)]}, "services[0].degree"),
        ({"services": [Service("x", 1, GPU_BYTES + 1)]}, "services[0].bytes_per_gpu"),
    ],
)
def test_a_set_up_that_cannot_be_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPoolError) as refused:
        GpuManager(**{"node_ids": ["a"], "gpu_bytes": GPU_BYTES, **fields})
    assert refused.value.field == field


def test_a_service_that_is_not_there_is_refused_before_it_waits() -> None:
    manager = GpuManager(["a"], GPU_BYTES, [Service("judge", 2, 10), Service("judge", 4, 10)])
    manager.check(Action("x", "t", 0, {GPUS: UnitSet((2, 4))}, service="judge"))
    asked: dict[str, dict[str, Demand]] = {
        "cost[gpus]": {GPUS: UnitSet((1, 2))},
        "service": {"cpu_cores": Fixed(1)},
    }
    for field, cost in asked.items():
        with pytest.raises(InvalidActionError) as refused:
            manager.check(Action("x", "t", 0, cost, service="judge"))
        assert refused.value.field == field


def test_a_node_that_lends_some_of_its_gpus_gives_no_others() -> None:
    manager = GpuManager({"a": (2, 3)}, GPU_BYTES, [Service("one", 1, 80), Service("two", 2, 80)])
    [usage] = manager.usage(0.0)
    assert (usage.capacity, usage.free) == (2, 2)
    [pool] = manager.pools(0.0)
    assert pool.free == {"a": frozenset({2, 3})}
