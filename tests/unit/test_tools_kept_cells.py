"""Which cell a trajectory's next call gets, and that every other one is ended."""

import asyncio

from support.conditions import until
from treadle_tools.builtin import TOOLS
from treadle_tools.sandbox.bubblewrap.cell import Cell
from treadle_tools.sandbox.pools import KeptCells

PYTHON = next(tool for tool in TOOLS if tool.name == "python")


class FakeCell(Cell):
    """Lives until it is told not to; nobody asks it anything."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lives = True

    @property
    def alive(self) -> bool:
        return self.lives

    def close(self) -> None:
        self.lives = False


def kept(most: int = 2, kept_s: float = 60.0) -> KeptCells:
    return KeptCells(lambda cell: cell.close(), most=most, kept_s=kept_s)


def test_a_cell_is_its_trajectorys_and_its_tools() -> None:
    cells, cell = kept(), FakeCell("a")
    cells.keep("t", PYTHON, cell)
    assert cells.take("u", PYTHON) is None
    assert cells.take("t", PYTHON) is cell
    assert cells.take("t", PYTHON) is None, "one call has it alone"


def test_a_cell_that_has_died_meanwhile_is_ended_and_not_taken() -> None:
    cells, cell = kept(), FakeCell("a")
    cells.keep("t", PYTHON, cell)
    cell.lives = False
    assert cells.take("t", PYTHON) is None


def test_of_two_calls_at_once_one_cell_is_kept() -> None:
    cells, first, second = kept(), FakeCell("a"), FakeCell("b")
    cells.keep("t", PYTHON, first)
    cells.keep("t", PYTHON, second)
    assert not first.alive
    assert cells.take("t", PYTHON) is second


def test_the_one_that_has_waited_longest_makes_room() -> None:
    cells, all_of_them = kept(most=2), [FakeCell(name) for name in "abc"]
    for name, cell in zip("abc", all_of_them, strict=True):
        cells.keep(name, PYTHON, cell)
    assert [cell.alive for cell in all_of_them] == [False, True, True]
    assert cells.take("a", PYTHON) is None


async def test_a_cell_that_nobody_comes_for_is_ended() -> None:
    cells, cell = kept(kept_s=0.02), FakeCell("a")
    cells.keep("t", PYTHON, cell)
    reaping = asyncio.create_task(cells.reap())
    await until(lambda: not cell.alive)
    reaping.cancel()
    assert cells.take("t", PYTHON) is None


def test_where_none_may_wait_none_is_wanted() -> None:
    assert kept().wanted(FakeCell("a"), "t")
    assert not kept().wanted(FakeCell("a"), "")
    assert not kept(most=0).wanted(FakeCell("a"), "t")
