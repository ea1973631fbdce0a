"""The first plan or grant of a mesh does not wait for a compiler: a scheduler stood still for 18
s."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
from support.kernels import (
    Signatures,
    compiled_after_placement,
    compiled_after_scheduler,
    compiled_after_tools,
)
from support.placements import WITHOUT_AHEAD


@pytest.mark.parametrize(
    "compiled_after", [compiled_after_scheduler, compiled_after_placement, compiled_after_tools]
)
def test_no_kernel_is_compiled_after_the_warm_up(compiled_after: Callable[[], Signatures]) -> None:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, spawn, exec, (WITHOUT_AHEAD,)
    ) as pool:  # where nothing is compiled or loaded yet
        assert pool.submit(compiled_after).result() == set()
