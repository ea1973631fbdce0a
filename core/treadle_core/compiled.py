"""Compile kernels, or load compiled ones; without either the same Python runs, slower, with the
same floats.

Kernels come from the first of these that there is:

1. The extension module `treadle_kernels`, compiled ahead of time (`scripts/compile_kernels.py`):
   the images have it.
2. The same module in the cache of this Python's environment, where `make setup` puts it.
3. numba, which is imported when a kernel that is not compiled is called first, and which caches
   what it compiles.

The cache has a folder for each key, a hash of the sources that kernels are made of. So an edited
kernel never runs the machine code of the old one, also where only a kernel changed that it calls in
another file.
"""

import hashlib
import importlib
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, ParamSpec, TypeVar, cast

import numpy as np
import numpy.typing as npt

AHEAD_MODULE = "treadle_kernels"
CACHE = Path(sys.prefix, "var", "cache", AHEAD_MODULE)
# x86-64-v2 is of 2009, and numpy's wheels need it too. v3 (AVX2) made kernels faster by less than a
# tenth.
TARGET_CPU = {"x86_64": "x86-64-v2"}.get(platform.machine(), "generic")

# The arrays of kernels.
Floats = npt.NDArray[np.float64]
Indexes = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Names = npt.NDArray[np.object_]  # ids

Params = ParamSpec("Params")
Result = TypeVar("Result")

BF16_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # the last is ARM's
VNNI_FLAG = "avx512_vnni"


class Kernel(Generic[Params, Result]):
    """Kernel that numba compiles at its first call, or loads; where numba is not installed, the
    Python runs."""

    def __init__(self, function: Callable[Params, Result], options: dict[str, bool]) -> None:
        self.function = cast("FunctionType", function)
        self.options = options

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Run the kernel."""
        return cast("Result", self.run(*args, **kwargs))

    @cached_property
    def run(self) -> Any:
        """Return the compiled kernel (a numba `Dispatcher`), or the Python function without
        numba."""
        numba = import_numba()
        if numba is None:
            return self.function
        # Kernels are compiled into those that call them, and numba knows only its own.
        scope = dict(self.function.__globals__)
        for name in self.function.__code__.co_names:
            called = kernel_of(scope.get(name))
            if called is not None:
                scope[name] = called.run
        function = FunctionType(self.function.__code__, scope, self.function.__name__)
        function.__defaults__ = self.function.__defaults__
        function.__doc__ = self.function.__doc__
        return numba.njit(cache=can_cache(), nogil=True, **self.options)(function)


_kernels: dict[Any, Kernel[..., Any]] = {}  # by what stands in their place in the modules


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


def kernel_of(value: Any) -> Kernel[..., Any] | None:
    """Return the kernel that a decorator of this module made `value` of; None for anything else."""
    return _kernels.get(value) if callable(value) else None


def name_ahead(function: Callable[..., object]) -> str:
    """Return the name of a kernel among those that are compiled ahead of time."""
    return f"{function.__module__}.{function.__name__}".replace(".", "_")


def key_of_kernels() -> str:
    """Return a hash of the sources of all modules of the core that have kernels and of those that
    they import."""
    root = Path(__file__).parent
    texts = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path.read_text()
        for path in root.rglob("*.py")
    }
    found = {
        name
        for name, text in texts.items()
        if re.search(r"^@(compiled|lean|inlined)$", text, re.MULTILINE)
    }
    unread = list(found)
    while unread:
        imported = {name for name in _imported_names(texts[unread.pop()]) if name in texts} - found
        found |= imported
        unread += imported
    all_of_it = [
        sys.version,
        np.__version__,
        TARGET_CPU,
        *(name + texts[name] for name in sorted(found)),
    ]
    return hashlib.sha256("\0".join(all_of_it).encode()).hexdigest()[:16]


def _imported_names(text: str) -> Iterator[str]:
    """Yield the modules of the core that the text of a module may import, and other names."""
    for module, names in re.findall(
        r"^\s*from (treadle_core\S*) import (\([^)]*\)|.*)$", text, re.MULTILINE
    ):
        yield module
        for name in re.findall(r"\w+", names):
            yield f"{module}.{name}"


@cache
def cache_folder() -> Path:
    """Return the folder for kernels compiled from the present sources. It may not exist."""
    return CACHE / key_of_kernels()


def _load_ahead() -> Any:
    """Return the module of kernels that were compiled ahead of time; None where there is none for
    these sources."""
    try:
        return importlib.import_module(AHEAD_MODULE)
    except ModuleNotFoundError:
        if AHEAD_MODULE in sys.modules:  # None, by somebody who wants kernels of numba
            return None
    spec = PathFinder.find_spec(AHEAD_MODULE, [str(cache_folder())])
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[AHEAD_MODULE] = module
    return module


@cache
def import_numba() -> Any:
    """Return numba, set to cache by the sources' key; None where it is not installed."""
    try:
        numba = importlib.import_module("numba")
    except ImportError:  # the `placement` extra is not installed
        return None
    # For the processor of the ahead-of-time compiler, so that a cache serves every process.
    if numba.config.CPU_NAME is None:
        numba.config.CPU_NAME = TARGET_CPU
        numba.config.CPU_FEATURES = ""
    own = numba.config.CACHE_DIR  # NUMBA_CACHE_DIR
    numba.config.CACHE_DIR = str(Path(own, cache_folder().name) if own else cache_folder())
    return numba


@cache
def can_cache() -> bool:
    """Return whether numba may write to its cache. Otherwise it would use folders beside the
    sources, which have no key."""
    folder = Path(import_numba().config.CACHE_DIR)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


ahead: Any = _load_ahead()
HAVE_KERNELS = ahead is not None or importlib.util.find_spec("numba") is not None


def _compile(function: Callable[Params, Result], **options: bool) -> Callable[Params, Result]:
    kernel = Kernel(function, options)
    # Ahead of time are compiled those of the core that Python calls, without those that are only
    # parts of others.
    made: Callable[Params, Result] = getattr(ahead, name_ahead(function), kernel)
    _kernels[made] = kernel
    return made


def has_bf16(cpu_info: str) -> bool:
    """Return whether the text of Linux's /proc/cpuinfo names instructions for bf16; False for no
    text.

    Without them a processor emulates bf16 and takes five times as long as with float32, so engines
    and learned models on a CPU choose their number format by this.
    """
    return bool(_flags(cpu_info) & BF16_FLAGS)


def has_vnni(cpu_info: str) -> bool:
    """Return whether the text of Linux's /proc/cpuinfo names instructions for exact dot products of
    bytes; False for no text.

    Without them products of 8-bit numbers are added in 16 bits, where they overflow.
    """
    return VNNI_FLAG in _flags(cpu_info)


def _flags(cpu_info: str) -> set[str]:
    lines = cpu_info.lower().splitlines()
    return {
        flag for line in lines if line.startswith(("flags", "features")) for flag in line.split()
    }
