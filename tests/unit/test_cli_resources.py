"""Resource plans: what must change, what is refused, and how the resource service takes its
calls."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.conditions import until
from support.rpc import error_of
from support.scheduler import scheduler
from treadle.resources.v1 import resources_pb2 as pb
from treadle.resources.v1 import resources_pb2_grpc
from treadle_cli.apply import read_plan
from treadle_cli.exits import UsageProblem
from treadle_cli.mesh.processes import HOST, Ports
from treadle_cli.resources.plan import (
    EngineClass,
    ResourcePlan,
    change_to,
    plan_message,
    plan_of,
    require_room,
)
from treadle_cli.resources.servicer import serve_resources
from treadle_runtime.errors import InvalidArgument

CALL_S = 60.0
classes = st.builds(EngineClass, st.just("H200"), st.sampled_from([1, 2, 4]), st.just(100))


@given(st.lists(classes, max_size=8), st.lists(classes, max_size=8))
def test_a_change_leads_to_the_plan_and_no_class_both_stops_and_starts(
    before: list[EngineClass], after: list[EngineClass]
) -> None:
    running = {f"engine-{index}": kind for index, kind in enumerate(before)}
    change = change_to(Counter(after), running)
    assert {*change.keep, *change.stop} == {*running}
    assert Counter([running[engine_id] for engine_id in change.keep] + [*change.start]) == Counter(
        after
    )
    assert {running[engine_id] for engine_id in change.stop}.isdisjoint(change.start)


def test_of_a_class_with_too_many_engines_the_first_ones_are_kept() -> None:
    kind = EngineClass("cpu", 1, 4)
    change = change_to({kind: 1}, {"engine-0": kind, "engine-1": kind, "engine-2": kind})
    assert (change.keep, change.stop, change.start) == (("engine-0",), ("engine-1", "engine-2"), ())


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"degree": 0}, r"plan\.engines\[1\]\.degree: must be between 1 and"),
        ({"slots": -1}, r"plan\.engines\[1\]\.slots"),
        ({"count": 0}, r"plan\.engines\[1\]\.count"),
        ({"accelerator": ""}, r"plan\.engines\[1\]\.accelerator: must be named"),
        (
            {"degree": 1},
            r"plan\.engines\[1\]: is a class that the plan has already \(1 H200, 8 slots\)",
        ),
    ],
)
def test_a_bad_plan_names_the_field(changed: dict[str, int | str], field: str) -> None:
    given: dict[str, int | str] = {"accelerator": "H200", "degree": 1, "slots": 8, "count": 1}
    second: dict[str, int | str] = {**given, "degree": 2, **changed}
    message = pb.ResourcePlan(engines=[pb.EngineClass(**given), pb.EngineClass(**second)])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=field):
        plan_of(message, "")


def test_a_plan_for_more_cores_than_there_are_is_refused_and_one_for_all_is_not() -> None:
    require_room({EngineClass("cpu", 1, 4): 2, EngineClass("cpu", 2, 4): 1}, "cpu", 4)
    with pytest.raises(
        InvalidArgument,
        match=r"plan\.engines\[1\]\.count: with it the plan takes 4 cores, .* are 3",
    ):
        require_room({EngineClass("cpu", 1, 4): 2, EngineClass("cpu", 2, 4): 1}, "cpu", 3)
    with pytest.raises(
        InvalidArgument, match=r"plan\.engines\[0\]\.accelerator: must be cpu, is H200"
    ):
        require_room({EngineClass("H200", 1, 4): 1}, "cpu", 3)


def test_a_file_with_an_unknown_field_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text('{"engines": [{"degrees": 2}]}')
    with pytest.raises(UsageProblem, match=r'plan\.json: .*no field named "degrees"'):
        read_plan(file)


class SlowEngines:
    """Fake, so that a plan lasts until the test lets it go on: there are none, and the check of a
    plan waits."""

    accelerator, accelerators = "cpu", 2

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.checks = 0

    async def running(self) -> dict[str, EngineClass]:
        return {}

    async def check(self, plan: ResourcePlan) -> None:
        self.checks += 1
        await self.go_on.wait()

    async def stop(self, engine_ids: Sequence[str]) -> None:
        raise NotImplementedError

    async def start(self, kind: EngineClass) -> str:
        raise NotImplementedError

    async def until_up(self, engine_id: str) -> None:
        raise NotImplementedError

    async def look_for_failure(self, engine_id: str) -> None:
        raise NotImplementedError

    async def describe(self, engine_id: str) -> str:
        raise NotImplementedError


async def test_one_plan_is_applied_at_a_time_and_a_repeat_waits_for_the_first(
    nats_url: str,
) -> None:
    """Result: another request is refused; a call that is cut does not end the plan, and its repeat
    gets the answer."""
    engines = SlowEngines()
    address = f"{HOST}:{Ports().choose(1)[0]}"
    plan = plan_message([EngineClass("cpu", 1, 4)])
    async with (
        scheduler(nats_url) as client,
        serve_resources(address, engines, client.address, print),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = resources_pb2_grpc.ResourceServiceStub(channel)
        first = pb.ApplyPlanRequest(request_id="a", plan=plan, dry_run=True)
        cut = stub.ApplyPlan(first, timeout=CALL_S)
        await until(lambda: engines.checks)
        cut.cancel()
        assert await cut.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ApplyPlan(pb.ApplyPlanRequest(request_id="b", plan=plan), timeout=CALL_S)
        assert error_of(refused.value).reason == "PLAN_IN_PROGRESS"
        engines.go_on.set()
        answer = await stub.ApplyPlan(first, timeout=CALL_S)
        assert (answer.outcome, list(answer.start)) == (
            pb.APPLY_OUTCOME_DRY_RUN,
            list(plan.engines),
        )
        assert engines.checks == 1
        with pytest.raises(grpc.aio.AioRpcError) as bad:
            await stub.ApplyPlan(pb.ApplyPlanRequest(request_id="c"), timeout=CALL_S)
        assert error_of(bad.value).fields == ("plan",)
