"""Compile kernels, or take them compiled; where neither can be, the same Python runs, slower, with the same floats.

The images of the services have kernels that were compiled ahead of time (`scripts/compile_kernels.py`), in a module
that is imported here. Elsewhere numba compiles them, where it is installed, and caches them on disk, so that only the
first process on a machine compiles; where no folder can be written, each process does.
"""

import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

AHEAD_MODULE = "treadle_kernels"

ahead: Any = None
numba: Any = None
try:
    ahead = importlib.import_module(AHEAD_MODULE)
except ModuleNotFoundError:
    try:
        import numba
    except ImportError:  # the `placement` extra is not installed
        numba = None

# The arrays of kernels.
Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Names = npt.NDArray[np.object_]  # ids

Params = ParamSpec("Params")
Result = TypeVar("Result")

HAVE_KERNELS = ahead is not None or numba is not None
BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # the last is ARM's
VNNI_FLAG = "avx512_vnni"


def compiled(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Compile a kernel to machine code that runs without the interpreter's lock."""
    return _compile(function)


def lean(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Compile a kernel that makes no array, without counting references to its arguments.

    For a kernel of some nanoseconds the counting would take ten times as long as its work.
    """
    return _compile(function, _nrt=False)


def inlined(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Compile like `lean`, into each kernel that calls it: for the inner loops."""
    return _compile(function, _nrt=False, forceinline=True)


def name_ahead(function: Callable[..., object]) -> str:
    """What a kernel is called among those that are compiled ahead of time."""
    return f"{function.__module__}.{function.__name__}".replace(".", "_")


def _compile(function: Callable[Params, Result], **options: bool) -> Callable[Params, Result]:
    if ahead is not None:  # without those that are parts of others
        return cast("Callable[Params, Result]", getattr(ahead, name_ahead(function), function))
    if numba is None:
        return function
    try:
        return cast("Callable[Params, Result]", numba.njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # numba found no folder to cache in
        return cast("Callable[Params, Result]", numba.njit(nogil=True, **options)(function))


def has_bf16(cpu_info: str) -> bool:
    """Whether the text of Linux's /proc/cpuinfo names instructions for bf16; False for no text.

    Without them a processor emulates bf16 and takes five times as long as with float32, so engines and learned models
    on a CPU choose their number format by this.
    """
    return bool(_flags(cpu_info) & BF16_FLAGS)


def has_vnni(cpu_info: str) -> bool:
    """Whether the text of Linux's /proc/cpuinfo names instructions for exact dot products of bytes; False for no text.

    Without them products of 8-bit numbers are added in 16 bits, where they overflow.
    """
    return VNNI_FLAG in _flags(cpu_info)


def _flags(cpu_info: str) -> set[str]:
    lines = cpu_info.lower().splitlines()
    return {flag for line in lines if line.startswith(("flags", "features")) for flag in line.split()}
