"""The condition of a ticket that cannot be had yet."""


class StepHeld(Exception):  # noqa: N818 - a condition, not a fault
    """The trajectory waits for room on an engine, or for its KV; ask again."""

    def __init__(self, trajectory_id: str) -> None:
        super().__init__(f"{trajectory_id} waits for room on an engine; ask again")
        self.trajectory_id = trajectory_id
