"""Compilation of the solvers' inner loops: numba where it is installed, the same plain Python where it is not.

Purpose: a kernel is written once, in the part of Python that numba compiles; both give the same floats (no fastmath).
Invariant: compiled code is cached on disk, so that only the first process on a machine pays for the compilation.
Where no folder can be written (a read-only container without NUMBA_CACHE_DIR) each process compiles for itself
instead of failing.

What a processor says of itself.

Without instructions for bf16, which have to be emulated then, it takes five times as long and more with bf16 as with
float32: engines and learned models on a CPU ask here which to compute in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

numba: Any
try:
    import numba
except ImportError:  # the `placement` extra is not installed: slower, equal
    numba = None

Params = ParamSpec("Params")
Result = TypeVar("Result")

HAVE_NUMBA = numba is not None


def compiled(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Compiles a kernel to machine code that runs without the interpreter's lock; unchanged without numba."""
    if numba is None:
        return function
    try:
        return cast("Callable[Params, Result]", numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # numba found no folder to cache in
        return cast("Callable[Params, Result]", numba.njit(nogil=True)(function))


def lean(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """`compiled`, for a kernel that makes no array: it does not count references to those it is handed.

    Counting costs more than ten times what a kernel of some nanoseconds does with them.
    """
    return _lean(function, forceinline=False)


def inlined(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """`lean`, and a part of each kernel that calls it: for what is called in an inner loop with a table in hand."""
    return _lean(function, forceinline=True)


def _lean(function: Callable[Params, Result], **options: bool) -> Callable[Params, Result]:
    if numba is None:
        return function
    try:
        return cast("Callable[Params, Result]", numba.njit(cache=True, nogil=True, _nrt=False, **options)(function))
    except RuntimeError:  # numba found no folder to cache in
        return cast("Callable[Params, Result]", numba.njit(nogil=True, _nrt=False, **options)(function))


BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # the last is ARM's


def has_bf16(cpu_info: str) -> bool:
    """Whether the text of Linux's /proc/cpuinfo names instructions for bf16; False for no text."""
    lines = cpu_info.lower().splitlines()
    flags = {flag for line in lines if line.startswith(("flags", "features")) for flag in line.split()}
    return bool(flags & BF16_FLAGS)
