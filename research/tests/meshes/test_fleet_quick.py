"""`treadle bench fleet`, small: the whole mesh on emulated engines, with every kind of death."""

from __future__ import annotations

from treadle_bench.bench import BenchOptions
from treadle_bench.fleet.measure import measure


async def test_nothing_is_lost_or_doubled_while_an_engine_the_scheduler_nats_and_a_client_are_killed() -> (
    None
):
    found = await measure(BenchOptions(quick=True))
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert set(found["chaos"]) == {"engine", "scheduler", "nats", "client"}
