"""Which sandboxes wait for a trajectory's next call; with real ones in
`scenario/test_tools_reused_sandboxes.py`."""

import asyncio

from support.conditions import until
from treadle_tools.builtin import PYTHON
from treadle_tools.sandbox.daemon_client import BubblewrapSandbox
from treadle_tools.sandbox.sandboxes import ReusedSandboxes


class FakeSandbox(BubblewrapSandbox):
    """Lives until it is told not to; nobody asks it anything."""

    def __init__(self) -> None:
        self.lives = True

    @property
    def alive(self) -> bool:
        return self.lives

    def close(self) -> None:
        self.lives = False


def test_a_sandbox_is_its_trajectorys_alone_and_only_while_it_lives() -> None:
    sandboxes, sandbox = ReusedSandboxes(most=2, kept_s=60.0), FakeSandbox()
    sandboxes.add("t", PYTHON, sandbox)
    assert sandboxes.take("u", PYTHON) is None
    assert sandboxes.take("t", PYTHON) is sandbox
    assert sandboxes.take("t", PYTHON) is None, "one call has it alone"
    sandboxes.add("t", PYTHON, sandbox)
    sandbox.lives = False
    assert sandboxes.take("t", PYTHON) is None


def test_a_sandbox_that_another_one_replaces_is_closed() -> None:
    """One of the same trajectory, or, where too many wait, of the trajectory that has waited
    longest."""
    sandboxes, (first, second, third, fourth) = (
        ReusedSandboxes(most=2, kept_s=60.0),
        [FakeSandbox() for _ in range(4)],
    )
    for trajectory_id, sandbox in (("t", first), ("t", second), ("u", third), ("v", fourth)):
        sandboxes.add(trajectory_id, PYTHON, sandbox)
    assert [sandbox.alive for sandbox in (first, second, third, fourth)] == [
        False,
        False,
        True,
        True,
    ]


async def test_a_sandbox_that_nobody_comes_for_is_closed() -> None:
    sandboxes, sandbox = ReusedSandboxes(most=2, kept_s=0.02), FakeSandbox()
    sandboxes.add("t", PYTHON, sandbox)
    expiring = asyncio.create_task(sandboxes.expire())
    await until(lambda: not sandbox.alive)
    expiring.cancel()
    assert sandboxes.take("t", PYTHON) is None


def test_where_none_may_wait_none_is_wanted() -> None:
    cases = ((2, "t", True), (2, "", False), (0, "t", False))
    for most, trajectory_id, wanted in cases:
        assert ReusedSandboxes(most=most, kept_s=60.0).wants(FakeSandbox(), trajectory_id) is wanted
