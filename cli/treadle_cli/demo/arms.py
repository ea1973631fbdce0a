"""The two arms of the demo, as policies of the scheduler."""

from dataclasses import dataclass

from treadle.scheduler.v1 import scheduler_pb2 as pb


@dataclass(frozen=True)
class Arm:
    """One way to run the same work. policy_text: the same in words, for the report."""

    name: str
    title: str
    policy_text: str
    ordering: pb.Ordering.ValueType
    placement: pb.PlacementRule.ValueType
    migrate: bool
    preempt: bool
    reserve: bool

    def policy(self) -> pb.Policy:
        """As the scheduler takes it."""
        return pb.Policy(
            ordering=self.ordering,
            objective=pb.OBJECTIVE_MAKESPAN,
            placement=self.placement,
            migrate=self.migrate,
            preempt=self.preempt,
            reserve=self.reserve,
        )


PINNED_FCFS = Arm(
    "pinned-fcfs",
    "Pinned FCFS",
    "placed round-robin when opened, never moved, steps in the order they arrive (an engine's own queue)",
    # By step, not by trajectory: ORDERING_FCFS would keep a trajectory's place from its opening, which no plain engine
    # does.
    pb.ORDERING_ROUND_ROBIN,
    pb.PLACEMENT_RULE_PINNED,
    migrate=False,
    preempt=False,
    reserve=False,
)
TREADLE = Arm(
    "treadle",
    "Treadle",
    "longest predicted work first with preemption, planned placement, migration, room held for those that have begun",
    pb.ORDERING_PROGRESSIVE,
    pb.PLACEMENT_RULE_PLANNED,
    migrate=True,
    preempt=True,
    reserve=True,
)
ARMS = (PINNED_FCFS, TREADLE)
