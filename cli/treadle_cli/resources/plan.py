"""A resource plan: how many engines of which class run (Heddle §6), and what must change for it.

An engine of a class that the plan still wants is kept, because its start takes minutes and its KV
is warm. Engines of one class are alike; where some must go, those that are listed last go.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from treadle.resources.v1 import resources_pb2 as pb
from treadle_runtime.errors import InvalidArgument
from treadle_runtime.fields import require

MOST_ENGINES = 4_096  # most engines of a plan; more are a mistake
MOST_DEGREE = 1_024


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
