"""Kernels that are compiled ahead of time, as in the images, do what numba's do.

They are those of `make setup`; where there are none of these sources, they are built once for this
file.
"""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.kernels import compiled_after_placement, compiled_after_scheduler, compiled_after_tools
from support.placements import check_without_numba
from treadle_core.compiled import AHEAD_MODULE, Kernel, cache_folder, kernel_of, name_ahead

ROOT = Path(__file__).resolve().parents[2]
HEADER = Path(sysconfig.get_paths()["include"], "Python.h")

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("c++") and HEADER.is_file()),
        reason="needs a C++ compiler, Python's headers",
    ),
    pytest.mark.timeout(900),  # where `make setup` has not compiled the kernels
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the extension module is."""
    if any(cache_folder().glob(f"{AHEAD_MODULE}.*")):
        return cache_folder()
    made = tmp_path_factory.mktemp("ahead")
    command = [sys.executable, "scripts/compile_kernels.py", str(made)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def ahead(folder: Path) -> ModuleType:
    """The extension module, of which `treadle_core` in this process knows nothing."""
    [path] = folder.glob(f"{AHEAD_MODULE}.*")
    spec = importlib.util.spec_from_file_location(AHEAD_MODULE, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def copy(argument: Any) -> Any:
    """A copy of an array with its strides, of a named tuple with copies of what is in it, of
    anything else itself."""
    if isinstance(argument, tuple):
        return type(argument)(*map(copy, argument))
    if not isinstance(argument, np.ndarray) or argument.flags.c_contiguous:
        return np.array(argument) if isinstance(argument, np.ndarray) else argument
    rows = np.zeros((len(argument), argument.strides[0] // argument.itemsize), argument.dtype)
    rows[:, 0] = argument
    return rows[:, 0]


def bits(value: Any) -> Any:
    if isinstance(value, tuple):
        return [bits(each) for each in value]
    return (
        (value.dtype, value.shape, value.tobytes())
        if isinstance(value, np.ndarray)
        else (type(value), repr(value))
    )


@pytest.mark.parametrize(
    "scenario", [compiled_after_scheduler, compiled_after_placement, compiled_after_tools]
)
def test_they_return_and_write_the_same_bits_as_those_of_numba(
    ahead: ModuleType, scenario: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call of a rollout, of a question to the placement service, of decisions on tools.
    Result: equal calls."""
    calls: Counter[str] = Counter()

    def call_both(kernel: Kernel[..., Any]) -> Callable[..., Any]:
        name = name_ahead(kernel.function)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            others = [copy(each) for each in arguments]
            result = kernel.run(*arguments)
            assert bits(getattr(ahead, name)(*others)) == bits(result), name
            assert bits(tuple(others)) == bits(arguments), name
            return result

        return call

    found = [
        (module, name, kernel)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("treadle_core.")
        for name, value in list(vars(module).items())
        if (kernel := kernel_of(value)) is not None and hasattr(ahead, name_ahead(kernel.function))
    ]
    for _, _, kernel in found:
        assert kernel.run  # made for numba before the kernels that it calls are replaced
    for module, name, kernel in found:
        monkeypatch.setattr(module, name, call_both(kernel))
    scenario()
    assert len(calls) > 5
    assert calls.total() > 50


def test_arguments_that_they_were_not_compiled_for_are_refused(ahead: ModuleType) -> None:
    """Read as something else they would give any result, or end the process."""
    gather = ahead.treadle_core_planning_gather
    cells, rows = np.arange(12.0).reshape(6, 2), np.arange(0, 6, 2)
    assert gather(cells, rows).tolist() == cells[rows].T.tolist()
    read_only = cells.copy()
    read_only.flags.writeable = False
    assert gather(read_only, rows).tolist() == cells[rows].T.tolist()
    wrong: list[tuple[Any, Any]] = [
        (cells.astype(np.float32), rows),
        (cells.view(np.int64), rows),
        (cells[::2], rows),
        (cells.ravel(), rows),
        (cells, rows.astype(np.int32)),
        (cells, [0, 2]),
    ]
    for arguments in wrong:
        with pytest.raises(TypeError, match="compiled ahead"):
            gather(*arguments)


def test_a_plan_with_them_needs_no_numba_and_is_the_same(folder: Path) -> None:
    script = """
from treadle_core import compiled
from treadle_core.model import CostModel, DecodeCurve
from treadle_core.placing.placement import plan
from treadle_core.placing.question import PlanEngine
import numpy as np
rng = np.random.default_rng(5)
engines = [PlanEngine(f"e{n}", 2 + n, 1 << 16, 1, DecodeCurve()) for n in range(3)]
for model in CostModel:
    lengths, sigma = rng.lognormal(5.0, 1.0, 60), np.full(60, 0.5)
    found = plan(lengths, lengths, rng.integers(-1, 3, 60), engines, model, bound=True, log_sigma=sigma)
    finish = [each.hex() for each in found.finish_s.tolist()]
    print(compiled.import_numba() is not None, found.engine_of.tolist(), finish)
"""
    check_without_numba(script, 3, also=f"sys.path.insert(0, {str(folder)!r})")


def test_the_key_of_kernels_follows_the_sources_that_they_are_made_of(tmp_path: Path) -> None:
    """Edit a kernel that others call, a module that kernels import, and policy. Result: the first
    two change the key, so that nothing compiled before is used; policy leaves the kernels as they
    are."""
    shutil.copytree(ROOT / "core" / "treadle_core", tmp_path / "treadle_core")
    keys = [key_of_copy(tmp_path)]
    for name in ("placing/solver.py", "model.py", "steps/admission.py"):
        path = tmp_path / "treadle_core" / name
        path.write_text(path.read_text() + "# edited\n")
        keys.append(key_of_copy(tmp_path))
    assert keys[0] == cache_folder().name
    assert len(set(keys[:3])) == 3
    assert keys[3] == keys[2]


def key_of_copy(folder: Path) -> str:
    """The key that a process finds whose core stands in the folder."""
    script = f"import sys; sys.path.insert(0, {str(folder)!r})\n"
    script += (
        "from treadle_core import compiled; print(compiled.__file__, compiled.key_of_kernels())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    file, key = done.stdout.split()
    assert Path(file).is_relative_to(folder)
    return key
