"""Change the engines of a mesh to a resource plan: how many engines of which class run (Heddle §6).

An engine of a class that the plan still wants is kept, because its start takes minutes and its KV
is warm. Engines of one class are alike; where some must go, those that are listed last go.

A change has this order: the plan is checked and compared with what runs, which is all of a dry run;
it waits for open trajectories; engines that the plan does not want stop, and leave the scheduler;
engines that are missing start, since they need the accelerators of the others; each must register
with a measured decode curve, because placement is planned in its seconds. Where one is late, all
that were started stop, and engines of the classes that had been stopped start again. `Engines`
starts and stops them: the process tree of `treadle up`, or Kubernetes.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import grpc
import grpc.aio
from tenacity import retry, retry_if_exception, wait_fixed
from treadle.resources.v1 import resources_pb2 as pb
from treadle.scheduler.v1 import scheduler_pb2
from treadle_core.model import DecodeCurve
from treadle_runtime.errors import FailedPrecondition, InvalidArgument
from treadle_runtime.fields import require

if TYPE_CHECKING:
    from treadle.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

MOST_ENGINES = 4_096  # most engines of a plan; more are a mistake
MOST_DEGREE = 1_024
CALL_TIMEOUT_S = 10.0
AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
LOOK_S = 0.5  # between two requests to the scheduler
START_TIMEOUT_S = 1800.0  # 30 to 60 s for a small model on a CPU; a large one loads for minutes
GONE_TIMEOUT_S = 180.0  # an engine that stops drains its steps first: 120 s in k8s/base
# The scheduler's answer for an engine that reported no curve.
UNMEASURED = DecodeCurve()


@dataclass(frozen=True, slots=True)
class EngineClass:
    """Properties of engines that make them alike. Fields as in treadle.resources.v1.EngineClass."""

    accelerator: str
    degree: int
    slots: int
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return words as in "2 H200, 100 slots, --enable-ep-moe"."""
        return ", ".join((f"{self.degree} {self.accelerator}", f"{self.slots} slots", *self.flags))


# the number of engines of each class, at least 1, in the order of the plan
ResourcePlan = Mapping[EngineClass, int]


@dataclass(frozen=True, slots=True)
class Change:
    """Change from the engines that run to those of a plan: ids to keep and to stop, classes of
    those to start."""

    keep: tuple[str, ...]
    stop: tuple[str, ...]
    start: tuple[EngineClass, ...]


def change_to(plan: ResourcePlan, running: Mapping[str, EngineClass]) -> Change:
    """Return the change with the fewest engines to stop and to start. running: by engine id."""
    missing = Counter(plan)
    keep, stop = [], []
    for engine_id, kind in running.items():
        if missing[kind] > 0:
            missing[kind] -= 1
            keep.append(engine_id)
        else:
            stop.append(engine_id)
    return Change(tuple(keep), tuple(stop), tuple(missing.elements()))


def plan_of(message: pb.ResourcePlan, accelerator: str) -> ResourcePlan:
    """Return the plan in a message. accelerator: of classes that name none; empty: each must.
    Raises InvalidArgument."""
    plan: dict[EngineClass, int] = {}
    for index, each in enumerate(message.engines):
        field = f"plan.engines[{index}]"
        for name, most in (
            ("degree", MOST_DEGREE),
            ("slots", MOST_ENGINES),
            ("count", MOST_ENGINES),
        ):
            value = getattr(each, name)
            require(
                1 <= value <= most, f"{field}.{name}", f"must be between 1 and {most}, is {value}"
            )
        require(
            each.accelerator or accelerator,
            f"{field}.accelerator",
            "must be named, e.g. H200 or cpu",
        )
        kind = EngineClass(
            each.accelerator or accelerator, each.degree, each.slots, tuple(each.flags)
        )
        require(
            kind not in plan,
            field,
            f"is a class that the plan has already ({kind}): add to its count",
        )
        plan[kind] = each.count
    return plan


def plan_message(kinds: Iterable[EngineClass]) -> pb.ResourcePlan:
    """Return the plan that has these engines."""
    counts = Counter(kinds)
    return pb.ResourcePlan(
        engines=[
            pb.EngineClass(
                accelerator=each.accelerator,
                degree=each.degree,
                slots=each.slots,
                flags=each.flags,
                count=n,
            )
            for each, n in counts.items()
        ]
    )


def require_room(plan: ResourcePlan, accelerator: str, available: int) -> None:
    """Raise InvalidArgument for a plan that needs more than `available` accelerators of this name,
    or others."""
    taken = 0
    for index, (kind, count) in enumerate(plan.items()):
        field = f"plan.engines[{index}]"
        if kind.accelerator != accelerator:
            raise InvalidArgument(
                f"{field}.accelerator", f"must be {accelerator}, is {kind.accelerator}"
            )
        taken += kind.degree * count
        what = "cores" if accelerator == "cpu" else "accelerators"
        limit = (
            f"with it the plan takes {taken} {what}, and there are {available}: lower a "
            "degree or a count"
        )
        require(taken <= available, f"{field}.count", limit)


class EngineFailed(Exception):  # noqa: N818 - named as what happened
    """Raised where an engine does not start. The message gives the reason, with the end of its log
    where there is one."""

    def __init__(self, engine_id: str, problem: str) -> None:
        super().__init__(problem)
        self.engine_id = engine_id


class Engines(Protocol):
    """The engines of one mesh. Engines of a class are alike; its ids are in the order in which they
    were started."""

    accelerator: str  # default for classes that name none; empty: each must name one
    accelerators: int  # how many engines may take, cores on a CPU; 0: not known

    async def running(self) -> dict[str, EngineClass]:
        """Return the engines by id, also those that still start."""

    async def check(self, plan: ResourcePlan) -> None:
        """Raise InvalidArgument for a plan that cannot run here."""

    async def stop(self, engine_ids: Sequence[str]) -> None:
        """Stop these engines, the last of their classes, and their sidecars. Those that have ended
        already are no error."""

    async def start(self, kind: EngineClass) -> str:
        """Start an engine, and return its id. Raises EngineFailed."""

    async def until_up(self, engine_id: str) -> None:
        """Return once the engine answers. Raises EngineFailed."""

    async def look_for_failure(self, engine_id: str) -> None:
        """Raise EngineFailed where the engine cannot be expected to register any more."""

    async def describe(self, engine_id: str) -> str:
        """Return the end of the engine's log, or what else is known of it; may be empty."""


@dataclass(frozen=True, slots=True)
class Applied:
    """Result of a plan. started: ids, by the plan or by going back. problem: why it was rolled
    back, else empty."""

    change: Change
    dry_run: bool = False
    started: tuple[str, ...] = ()
    failed_engine_id: str = ""
    problem: str = ""


async def apply_plan(
    engines: Engines,
    scheduler: "SchedulerServiceAsyncStub",
    plan: ResourcePlan,
    *,
    dry_run: bool,
    drain_s: float,
    start_timeout_s: float,
    note: Callable[[str], None],
) -> Applied:
    """Change the engines to the plan, or find what would change.

    drain_s: seconds to wait for open trajectories to close. start_timeout_s: for each engine, until
    it is measured. note: called with each step of the change. Raises InvalidArgument,
    FailedPrecondition TRAJECTORIES_OPEN, AioRpcError.
    """
    await engines.check(plan)
    before = await engines.running()
    change = change_to(plan, before)
    if dry_run or not (change.stop or change.start):
        return Applied(change, dry_run)
    await _until_idle(scheduler, drain_s)
    await _stop(engines, scheduler, change.stop, note)
    started, failure = await _start(engines, scheduler, change.start, start_timeout_s, note)
    if failure is None:
        return Applied(change, started=started)
    note(f"{failure.engine_id} did not come up, going back: {failure}")
    await _stop(engines, scheduler, started, note)
    former = [before[engine_id] for engine_id in change.stop]
    again, second = await _start(engines, scheduler, former, start_timeout_s, note)
    problem = (
        str(failure)
        if second is None
        else f"{failure}\nNor did {second.engine_id}, to go back: {second}"
    )
    return Applied(change, False, again, failure.engine_id, problem)


async def _until_idle(scheduler: "SchedulerServiceAsyncStub", drain_s: float) -> None:
    """Return once no trajectory is open. Raises FailedPrecondition after `drain_s`."""
    give_up_at = time.monotonic() + drain_s
    request = scheduler_pb2.ListTrajectoriesRequest(open_only=True, page_size=1)
    while (await scheduler.ListTrajectories(request, timeout=CALL_TIMEOUT_S)).trajectories:
        if time.monotonic() >= give_up_at:
            waited = f" after {drain_s:g} s" if drain_s else ""
            advice = "apply it between training steps, or give `drain` time for them to close"
            raise FailedPrecondition(
                "TRAJECTORIES_OPEN", f"trajectories are open{waited}: {advice}"
            )
        await asyncio.sleep(LOOK_S)


async def _stop(
    engines: Engines,
    scheduler: "SchedulerServiceAsyncStub",
    engine_ids: Sequence[str],
    note: Callable[[str], None],
) -> None:
    """Stop engines, and return once the scheduler has none of them. One that is stuck there is no
    reason to go back: its lease ends."""
    if not engine_ids:
        return
    note(f"stopping {', '.join(engine_ids)}")
    await engines.stop(engine_ids)
    give_up_at = time.monotonic() + GONE_TIMEOUT_S
    while True:
        if {*engine_ids}.isdisjoint(await _registered(scheduler)) or time.monotonic() > give_up_at:
            return
        await asyncio.sleep(LOOK_S)


async def _start(
    engines: Engines,
    scheduler: "SchedulerServiceAsyncStub",
    kinds: Iterable[EngineClass],
    timeout_s: float,
    note: Callable[[str], None],
) -> tuple[tuple[str, ...], EngineFailed | None]:
    """Start engines; return the ids of all that were started, and the first failure."""
    started: list[str] = []
    failed: list[EngineFailed] = []
    try:
        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                engine_id = await engines.start(kind)
                started.append(engine_id)
                note(f"starting {engine_id} ({kind})")
                group.create_task(_until_measured(engines, scheduler, engine_id, timeout_s))
    except* EngineFailed as failures:
        failed = [each for each in _leaves(failures) if isinstance(each, EngineFailed)]
    return tuple(started), failed[0] if failed else None


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [
        leaf
        for each in group.exceptions
        for leaf in (_leaves(each) if isinstance(each, BaseExceptionGroup) else [each])
    ]


async def _until_measured(
    engines: Engines, scheduler: "SchedulerServiceAsyncStub", engine_id: str, timeout_s: float
) -> None:
    """Return once the scheduler has the engine with a curve of its own. Raises EngineFailed."""
    seen = "is not registered with the scheduler"
    try:
        async with asyncio.timeout(timeout_s):
            await engines.until_up(engine_id)
            while True:
                await engines.look_for_failure(engine_id)
                curve = (await _registered(scheduler)).get(engine_id)
                if curve is not None and curve != UNMEASURED:
                    return
                if curve is not None:
                    seen = "has no measured decode curve"
                await asyncio.sleep(LOOK_S)
    except TimeoutError:
        known = await engines.describe(engine_id)
        raise EngineFailed(
            engine_id, "\n".join((f"{engine_id} {seen} after {timeout_s:g} s", known)).rstrip()
        ) from None


def is_away(error: BaseException) -> bool:
    """Return whether a call failed because the scheduler does not answer, e.g. restarts."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() in AWAY


@retry(retry=retry_if_exception(is_away), wait=wait_fixed(LOOK_S))
async def _registered(scheduler: "SchedulerServiceAsyncStub") -> dict[str, DecodeCurve]:
    """Return the curve of each engine that the scheduler has. Repeats the request while it does not
    answer."""
    answer = await scheduler.ListEngines(scheduler_pb2.ListEnginesRequest(), timeout=CALL_TIMEOUT_S)
    return {each.info.engine_id: _curve(each) for each in answer.engines}


def _curve(engine: scheduler_pb2.RegisteredEngine) -> DecodeCurve:
    reported = engine.info.decode_curve
    return DecodeCurve(
        *(
            reported.base_s,
            reported.per_sequence_s,
            reported.per_kv_token_s,
            reported.prefill_tokens_per_s,
            reported.prefill_pair_s,
        )
    )
