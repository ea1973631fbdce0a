"""Which sandbox a trajectory's next call gets, and that every other one is closed."""

import asyncio

from support.conditions import until
from treadle_tools.builtin import PYTHON
from treadle_tools.sandbox.bubblewrap.sandbox import BubblewrapSandbox
from treadle_tools.sandbox.sandboxes import ReusedSandboxes


class FakeSandbox(BubblewrapSandbox):
    """Lives until it is told not to; nobody asks it anything."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lives = True

    @property
    def alive(self) -> bool:
        return self.lives

    def close(self) -> None:
        self.lives = False


def reused(most: int = 2, kept_s: float = 60.0) -> ReusedSandboxes:
    return ReusedSandboxes(most=most, kept_s=kept_s)


def test_a_sandbox_is_its_trajectorys_and_its_tools() -> None:
    sandboxes, sandbox = reused(), FakeSandbox("a")
    sandboxes.add("t", PYTHON, sandbox)
    assert sandboxes.take("u", PYTHON) is None
    assert sandboxes.take("t", PYTHON) is sandbox
    assert sandboxes.take("t", PYTHON) is None, "one call has it alone"


def test_a_sandbox_that_has_died_meanwhile_is_closed_and_not_taken() -> None:
    sandboxes, sandbox = reused(), FakeSandbox("a")
    sandboxes.add("t", PYTHON, sandbox)
    sandbox.lives = False
    assert sandboxes.take("t", PYTHON) is None


def test_of_two_calls_at_once_one_sandbox_is_reused() -> None:
    sandboxes, first, second = reused(), FakeSandbox("a"), FakeSandbox("b")
    sandboxes.add("t", PYTHON, first)
    sandboxes.add("t", PYTHON, second)
    assert not first.alive
    assert sandboxes.take("t", PYTHON) is second


def test_the_one_that_has_waited_longest_makes_room() -> None:
    sandboxes, all_of_them = reused(most=2), [FakeSandbox(name) for name in "abc"]
    for name, sandbox in zip("abc", all_of_them, strict=True):
        sandboxes.add(name, PYTHON, sandbox)
    assert [sandbox.alive for sandbox in all_of_them] == [False, True, True]
    assert sandboxes.take("a", PYTHON) is None


async def test_a_sandbox_that_nobody_comes_for_is_closed() -> None:
    sandboxes, sandbox = reused(kept_s=0.02), FakeSandbox("a")
    sandboxes.add("t", PYTHON, sandbox)
    reaping = asyncio.create_task(sandboxes.expire())
    await until(lambda: not sandbox.alive)
    reaping.cancel()
    assert sandboxes.take("t", PYTHON) is None


def test_where_none_may_wait_none_is_wanted() -> None:
    assert reused().wants(FakeSandbox("a"), "t")
    assert not reused().wants(FakeSandbox("a"), "")
    assert not reused(most=0).wants(FakeSandbox("a"), "t")
