"""Compile the core's kernels ahead of time, into the extension module `treadle_kernels`: for images
and developers.

An image then needs neither numba nor llvmlite, which are larger than all that a service has
besides, and no start compiles or loads anything. `treadle_core.compiled` takes kernels from the
module where there is one. It is for this version of Python, numpy and the core, and for every
processor of the architecture that numpy's own wheels run on.

    # needs numba, setuptools and a C++ compiler:
    python scripts/compile_kernels.py FOLDER
    # into the cache that `treadle_core.compiled` reads, as `make setup` does:
    python scripts/compile_kernels.py

Without a C++ compiler the second form has numba fill its own cache, from which a process loads
kernels in a second.

The kernels are those that Python calls where the services run `compile_kernels`, before they serve.
numba's ahead-of-time compiler (`numba.pycc`) does the work, with three changes: kernels run without
the interpreter's lock, as `treadle_core.compiled` has it; arguments that a kernel was not compiled
for are refused, where numba would read them as something else; and results are made without a
pickle, which took longer than many a kernel.
"""

import importlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from pathlib import Path
from typing import Any

from llvmlite import ir

WARM_UPS = ("treadle_scheduler.wire", "treadle_placement.wire", "treadle_tools.resources")
READ_ARRAY = r"""
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <Python.h>
#include <numpy/arrayobject.h>

/* numba's: looks at nothing before it copies pointers */
int NRT_adapt_ndarray_from_python(PyObject *, void *);

int treadle_read_array(PyObject *object, void *array, int type, int dimensions, int contiguous)
{
    if (!PyArray_API && PyArray_ImportNumPyAPI() < 0) return -1;
    PyArrayObject *found = (PyArrayObject *)object;
    if (!PyArray_Check(object) || PyArray_TYPE(found) != type || PyArray_NDIM(found) != dimensions
        || !PyArray_ISBEHAVED_RO(found) || (contiguous && !PyArray_IS_C_CONTIGUOUS(found))) {
        PyErr_SetString(PyExc_TypeError,
                        "an argument is no array of the type, dimensions and layout "
                        "for which this kernel was compiled ahead of time");
        return -1;
    }
    return NRT_adapt_ndarray_from_python(object, array);
}
"""


def import_untyped(name: str) -> Any:
    """Import a module of numba's inner parts, which do not declare their types."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numba has warned for years that pycc will be replaced
        return importlib.import_module(f"numba.{name}")


# With the compiled module, there would be no kernels of numba to compile.
sys.modules["treadle_kernels"] = None  # type: ignore[assignment]

compiled = importlib.import_module("treadle_core.compiled")
compiled.import_numba()
boxing, cgutils, compiler, pythonapi, types, typing = (
    import_untyped(f"core.{name}")
    for name in ("boxing", "cgutils", "compiler", "pythonapi", "types", "typing")
)
numpy_support, pycc, pycc_compiler = map(
    import_untyped, ("np.numpy_support", "pycc", "pycc.compiler")
)


def main(folder: Path) -> None:
    """Compile the kernels into the folder."""
    signatures = find_signatures()
    change_wrappers()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = Path(scratch, "read_array.c")
        source.write_text(READ_ARRAY)
        module = pycc.CC(compiled.AHEAD_MODULE, source_module=__name__)
        module.output_dir = scratch
        module.target_cpu = compiled.TARGET_CPU
        for kernel, signature in signatures.items():
            module.export(compiled.name_ahead(kernel.py_func), signature)(kernel.py_func)
        module._mixin_sources = [*module._mixin_sources, str(source)]
        module.compile()
        Path(scratch, module.output_file).replace(folder / module.output_file)
    print(f"{len(signatures)} kernels for {compiled.TARGET_CPU}")


def fill_cache() -> None:
    """Compile the kernels for developers unless that is done, and remove what was compiled of other
    sources."""
    folder = compiled.cache_folder()
    if any(folder.glob(f"{compiled.AHEAD_MODULE}.*")):
        return
    for other in compiled.CACHE.glob("*"):
        shutil.rmtree(other)
    print("kernels: compiling, a minute", flush=True)
    # The simulator's own kernels are in no image. Once `main` has changed numba's wrappers, this
    # process cannot compile them.
    simulator = "from treadle_sim.allocation.plan import compile_kernels; compile_kernels()"
    subprocess.run([sys.executable, "-c", simulator], check=True)
    if shutil.which("c++") and Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        main(folder)
    else:
        for warm_up in find_warm_ups():
            warm_up()


def find_warm_ups() -> list[Any]:
    """Return the functions that run every kernel of a service once."""
    return [importlib.import_module(name).compile_kernels for name in WARM_UPS]


def find_signatures() -> dict[Any, Any]:
    """Map every kernel that Python calls to the signature for which it is compiled; exit where
    there are several."""
    warm_ups = find_warm_ups()
    for warm_up in warm_ups:
        warm_up()
    # Run them again, now that all is compiled: a kernel must not see the function that takes the
    # place of another kernel.
    called: dict[Any, None] = {}
    replaced = [
        (module, name, value)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("treadle_core.")
        for name, value in list(vars(module).items())
        if isinstance(value, compiled.Kernel)
    ]
    for module, name, kernel in replaced:
        setattr(module, name, note_calls(kernel, called))
    for warm_up in warm_ups:
        warm_up()
    for module, name, kernel in replaced:
        setattr(module, name, kernel)
    found = {}
    for kernel in (each.run for each in called):
        signatures = {
            typing.signature(each.signature.return_type, *map(general_type, arguments))
            for arguments, each in kernel.overloads.items()
        }
        if len(signatures) != 1:
            sys.exit(
                f"{compiled.name_ahead(kernel.py_func)} has several types: "
                f"{sorted(map(str, signatures))}"
            )
        found[kernel] = signatures.pop()
    return found


def note_calls(kernel: Any, called: dict[Any, None]) -> Any:
    """Return a function that calls the kernel and notes that Python did."""

    def call(*arguments: Any) -> Any:
        called[kernel] = None
        return kernel(*arguments)

    return call


def general_type(argument: Any) -> Any:
    """Return the type that also takes other values than one constant, and arrays that may be
    written to or not."""
    return (
        argument.copy(readonly=False)
        if isinstance(argument, types.Array)
        else types.unliteral(argument)
    )


def change_wrappers() -> None:
    """Make the three changes of the module's docstring. Nothing can be compiled in memory
    afterwards."""
    pycc_compiler.Flags = make_flags
    pythonapi._unboxers.functions[types.Array] = read_array
    pythonapi._boxers.functions[types.Array] = make_array


def make_flags() -> Any:
    flags = compiler.Flags()
    flags.release_gil = True
    return flags


def read_array(kind: Any, pointer: Any, wrapper: Any) -> Any:
    """Unbox an array argument with `treadle_read_array`."""
    array = wrapper.context.make_array(kind)(wrapper.context, wrapper.builder)
    address = array._getpointer()
    number = ir.IntType(32)
    shape = ir.FunctionType(
        number, [wrapper.pyapi.pyobj, wrapper.pyapi.voidptr, number, number, number]
    )
    function = cgutils.get_or_insert_function(wrapper.builder.module, shape, "treadle_read_array")
    wanted = (numpy_support.as_dtype(kind.dtype).num, kind.ndim, int(kind.layout == "C"))
    arguments = [
        pointer,
        wrapper.builder.bitcast(address, wrapper.pyapi.voidptr),
        *map(number, wanted),
    ]
    failed = cgutils.is_not_null(wrapper.builder, wrapper.builder.call(function, arguments))
    return pythonapi.NativeValue(wrapper.builder.load(address), is_error=failed)


def make_array(kind: Any, value: Any, wrapper: Any) -> Any:
    """Box an array result, with its class as a constant of the module and not as a pickle."""
    constants = wrapper.env_manager
    array_class = constants.read_const(constants.add_const(kind.box_type))
    wrapper.pyapi.unserialize = lambda _pickle: array_class
    made = boxing.box_array(kind, value, wrapper)
    del wrapper.pyapi.unserialize
    return made


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    elif len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        fill_cache()
