"""Who may import whom (docs/architecture.md). Reads the source; runs nothing."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = (
    "predictor",
    "scheduler",
    "placement",
    "migrator",
    "tools",
    "rollout",
    "gateway",
    "sidecar",
    "console",
)
PACKAGES = {
    "treadle": ROOT / "clients/python/treadle",
    "treadle_core": ROOT / "core/treadle_core",
    "treadle_learned": ROOT / "learned/treadle_learned",
    "treadle_runtime": ROOT / "runtime/treadle_runtime",
    "treadle_sim": ROOT / "sim/treadle_sim",
    "treadle_cli": ROOT / "cli/treadle_cli",
    "treadle_bench": ROOT / "research/treadle_bench",
    **{f"treadle_{name}": ROOT / f"services/{name}/treadle_{name}" for name in SERVICES},
}
# Of our own packages, what each may import beside itself. The CLI starts services as child
# processes; of the sidecar it takes the engine's launch command, which is where the knowledge of
# SGLang's flags lives, and of the tools where bubblewrap is.
ALLOWED_OURS = {
    "treadle": set(),
    "treadle_core": set(),
    "treadle_learned": {"treadle_core"},
    "treadle_runtime": {"treadle"},
    "treadle_sim": {"treadle_core"},
    "treadle_cli": {
        *("treadle", "treadle_runtime", "treadle_core", "treadle_learned", "treadle_sim"),
        *("treadle_sidecar", "treadle_tools"),
    },
    "treadle_bench": {
        *(
            "treadle",
            "treadle_runtime",
            "treadle_core",
            "treadle_learned",
            "treadle_sim",
            "treadle_cli",
        ),
        *("treadle_sidecar", "treadle_tools"),
    },
    **{f"treadle_{name}": {"treadle", "treadle_runtime", "treadle_core"} for name in SERVICES},
    "treadle_predictor": {"treadle", "treadle_runtime", "treadle_core", "treadle_learned"},
}
ALLOWED_THIRD_PARTIES = {
    "treadle": {"grpc", "google", "opentelemetry"},  # the last where its caller has imported it
    "treadle_core": {"numpy", "numba"},
    "treadle_sim": {"numpy", "numba", "pydantic"},
}
# Of the client, by folder: extras, and what its user has who plays such an environment or wants a
# bar. None of them is imported before it is used.
LAZY = {
    "training": {"numpy", "pyarrow", "torch"},
    "environments": {"gymnasium", "mcp", "mcp_types", "pydantic", "reasoning_gym", "verifiers"},
    "rollouts": {"tqdm"},
}
# The framework of each adapter of the client, with what the framework itself brings; nothing else
# imports an adapter.
FRAMEWORKS = {
    "verl": {"verl", "ray"},
    "verl_engines": {"verl", "ray"},
    "areal": {"areal"},
    "rllm": {"rllm"},
    "roll": {"roll", "torch"},
    "trl": {"trl", "safetensors"},
    "on_ray": {"ray"},
}
# The core takes time and randomness as arguments; these modules would let it take them, or the
# world, by itself.
IMPURE = {
    *("asyncio", "threading", "time", "datetime", "random", "secrets", "uuid"),
    *("os", "io", "pathlib", "socket", "subprocess"),
}


def sources(package: str) -> list[Path]:
    return [path for path in sorted(PACKAGES[package].rglob("*.py")) if "_pb2" not in path.name]


@cache
def imports(path: Path) -> list[tuple[str, list[str]]]:
    """Each module that a file imports, with the names that it takes from it."""
    found: list[tuple[str, list[str]]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: relative import"
            found.append((node.module, [alias.name for alias in node.names]))
    return found


def top(module: str) -> str:
    return module.partition(".")[0]


def wrong_imports(paths: Iterable[Path], is_wrong: Callable[[str], bool]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in paths
        for module, _ in imports(path)
        if is_wrong(module)
    ]


def not_of(known: set[str]) -> Callable[[str], bool]:
    return lambda module: top(module) not in known


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_imports_only_the_packages_below_it(package: str) -> None:
    above = set(PACKAGES) - ALLOWED_OURS[package] - {package}
    assert not wrong_imports(sources(package), lambda module: top(module) in above)


def test_the_tests_of_the_product_do_without_research() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert tests and not wrong_imports(tests, lambda module: top(module) == "treadle_bench")


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_inside_a_package_run_one_way(package: str) -> None:
    """In each folder, modules and subfolders have an order in which none imports one above it, also
    not for types."""
    here = PACKAGES[package]
    names = {
        ".".join((package, *path.relative_to(here).with_suffix("").parts)): path
        for path in sources(package)
    }
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    graphs: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, path in names.items():
        for parent, taken in imports(path):
            deeper = {f"{parent}.{each}" for each in taken} & set(names)
            for module in (deeper or {parent} & set(names)) - {name}:
                ours, theirs = name.split("."), module.split(".")
                shared = next(
                    (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
                    None,
                )
                if shared is not None:
                    graphs[".".join(ours[:shared])][ours[shared]].add(theirs[shared])
    for folder, graph in graphs.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"{folder}: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize("package", sorted(ALLOWED_THIRD_PARTIES))
def test_the_client_and_the_core_stay_light(package: str) -> None:
    allowed = (
        ALLOWED_THIRD_PARTIES[package]
        | ALLOWED_OURS[package]
        | {package}
        | set(sys.stdlib_module_names)
    )
    for path in sources(package):
        more = LAZY.get(path.parent.name, set()) if package == "treadle" else set()
        if package == "treadle" and path.parent.name == "adapters":
            more = FRAMEWORKS.get(path.stem, set())
        assert not wrong_imports([path], not_of(allowed | more))


def test_an_adapter_is_imported_by_users_of_its_framework_alone() -> None:
    """No module of ours imports one, but for an adapter of the same framework; how to find the mesh
    of a Ray cluster is for all of them."""
    adapters = {f"treadle.adapters.{name}" for name in FRAMEWORKS} - {"treadle.adapters.on_ray"}
    for package in PACKAGES:
        for path in sources(package):
            its = FRAMEWORKS.get(path.stem) if path.parent.name == "adapters" else None
            own = {name for name in adapters if FRAMEWORKS[name.rpartition(".")[2]] == its}
            assert not {module for module, _ in imports(path)} & (adapters - own), path


def test_the_core_has_no_clock_no_io_and_no_randomness_of_its_own() -> None:
    # `compiled` holds no policy: it finds machine code on the disk.
    core = [path for path in sources("treadle_core") if path.name != "compiled.py"]
    assert not wrong_imports(core, lambda module: top(module) in IMPURE or module == "numpy.random")
    waits = ast.Await | ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith
    assert not [
        path
        for path in core
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, waits)
    ]


def test_only_convert_touches_protobuf_messages_and_core_dataclasses() -> None:
    wrong = []
    for path in (path for name in SERVICES for path in sources(f"treadle_{name}")):
        modules = {module for module, _ in imports(path)}
        protobuf = {
            module
            for module in modules
            if module.startswith("treadle.") and module.endswith("_pb2")
        }
        core = {module for module in modules if top(module) == "treadle_core"}
        if protobuf and core and path.stem.partition("_")[0] not in {"convert", "servicer"}:
            wrong.append(f"{path.relative_to(ROOT)}: {sorted(protobuf)} and {sorted(core)}")
    assert not wrong, "\n".join(wrong)


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "helpers", "misc", "common", "manager"}
    named = [path for package in PACKAGES for path in sources(package) if path.stem in drawers]
    assert not named


@pytest.mark.parametrize(
    "script",
    [
        "import treadle_predictor.wire",
        "from treadle_cli.app import COMMANDS, load_command; [*map(load_command, COMMANDS)]",
    ],
    ids=["predictor", "command line"],
)
def test_what_runs_without_a_learned_model_needs_no_torch(script: str) -> None:
    """In a process of its own, where neither torch nor transformers can be imported."""
    without = "import sys; sys.modules.update(torch=None, transformers=None); "
    done = subprocess.run(
        [sys.executable, "-c", f"{without}{script}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_runs_in_a_sandbox_imports_the_standard_library_and_the_tool_alone() -> None:
    """It starts with `python -I -S` in a few milliseconds, where nothing else is to be had."""
    allowed = ("treadle_tools.sandbox.inside", "treadle_tools.tool")
    inside = [path for path in sources("treadle_tools") if path.parent.name == "inside"]
    assert inside and not wrong_imports(
        inside, lambda m: m.startswith("treadle") and not m.startswith(allowed)
    )
