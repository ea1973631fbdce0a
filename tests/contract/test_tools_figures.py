"""What the tools service says of its actions: figures as an OTLP collector gets them, and facts on
the bus."""

import asyncio
from typing import Any

from support.collector import collecting
from support.conditions import until
from support.processes import StartService
from support.tools import tools
from treadle.telemetry.v1.facts_pb2 import Fact
from treadle.tools.v1 import tools_pb2 as pb
from treadle_runtime.bus import open_bus


async def test_figures_and_facts_of_actions_say_what_they_took(
    start_service: StartService, nats_url: str
) -> None:
    """GIVEN   one core
    WHEN    a snippet runs, two of 0.3 s at the same time, one that fails, a session stays open, the
    service is stopped
    Result: the collector has each action's times by tool and status, what cores were held and used,
    what is held;
            each is published as started and finished with its queue, overhead and execution times,
            and one waited"""
    trajectory_id, published = "t-1", list[Fact]()
    async with (
        collecting() as (collector, endpoint),
        tools(start_service, "python", "frozen_lake", OTLP_ENDPOINT=endpoint, CORES="1") as calls,
    ):
        await calls.python("1", trajectory_id=trajectory_id)
        code = "import time; sum(range(10**6)); time.sleep(0.3)"
        both = await asyncio.gather(
            *(calls.python(code, trajectory_id=trajectory_id) for _ in range(2))
        )
        await calls.python("1 / 0")
        await calls.open("frozen_lake")
        calls.process.terminate()
        assert await calls.process.wait() == 0, calls.process.stderr_text()
    assert {service for service, _, _ in collector.metrics} == {"treadle-tools"}

    def points(name: str) -> list[tuple[dict[str, str], Any]]:
        return collector.points(f"treadle.tools.{name}")

    for name in ("action.queue", "action.overhead", "action.execution"):
        counted = {
            (labels["tool"], labels["status"]): point.count for labels, point in points(name)
        }
        assert counted == {
            ("python", "ok"): 3,
            ("python", "tool_error"): 1,
            ("frozen_lake", "ok"): 1,
        }
    assert all(point.sum > 0 for _, point in points("action.execution"))
    held = {labels["tool"]: point.as_double for labels, point in points("cores.held")}
    assert min(held["python"], held["frozen_lake"]) > 0
    capacity = {labels["dimension"]: point.as_int for labels, point in points("capacity")}
    assert capacity["cpu_cores"] == 1
    assert {labels["dimension"] for labels, _ in points("waiting")} == {"cpu_cores", "memory_bytes"}

    async def receive(fact: Fact) -> None:
        published.append(fact)

    async with open_bus(nats_url, "test") as bus:
        await bus.subscribe(["tool_started", "tool_finished"], receive, replay=True)
        await until(lambda: len(published) >= 10)
    started = [fact.tool_started for fact in published if fact.HasField("tool_started")][:3]
    finished = [fact.tool_finished for fact in published if fact.HasField("tool_finished")][:3]
    assert [fact.trajectory_id for fact in started] == [trajectory_id] * 3
    assert [fact.status for fact in finished] == [pb.RESULT_STATUS_OK] * 3
    assert started[0].expected_time.ToNanoseconds() == 0
    assert started[1].expected_time.ToNanoseconds() > 0
    queued = sorted(result.timing.queue.ToTimedelta().total_seconds() for result in both)
    assert queued[0] < queued[1] >= 0.15
    assert all(result.timing.execution.ToTimedelta().total_seconds() >= 0.3 for result in both)
    assert finished[-1].timing in [result.timing for result in both]
