"""Build the wheels, install them into empty environments outside the checkout, and use what was
installed.

Each set of extras has a venv of its own: every service starts with its own extra alone and answers
a health probe, and every module of every distribution is imported. An editable install cannot show
that a wheel lacks a module, a template or a dependency; this can.

    # in the environment of the checkout:
    python scripts/check_wheels.py
    # the folder of a release, and no checks:
    python scripts/check_wheels.py --release dist --with-dependencies

The folder of a release holds the wheels of all distributions and, with dependencies, all wheels
that `treadle` and `treadle-client` need with their extras (RELEASED), for machines of this platform
without an index or a compiler: `pip install --no-index --find-links dist 'treadle[cli]'`.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from treadle_cli.mesh.processes import ProcessTree
from treadle_cli.mesh.services import read_ready_file, start_nats

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "requirements-mesh.txt"
DISTRIBUTIONS = {"treadle-client": "clients/python", "treadle": ".", "treadle-bench": "research"}
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
# Distributions of a release with dependencies. Not `learned`, whose torch is larger than all the
# rest, and so not treadle-bench.
RELEASED = (f"treadle[{','.join(SERVICES)},sim,cli,kubernetes]", "treadle-client[arrow]")
# the last is grpcio's own
CLIENT_BRINGS = {"treadle-client", "grpcio", "protobuf", "typing_extensions"}
READY_WITHIN_S = 120.0
# Modules that import SGLang, which lives in an environment of its own; the engine tests run them
# there.
NEEDS_SGLANG = ("treadle_sidecar.sglang_cpu.", "treadle_sidecar.hicache.")
# Adapters that build on a framework's classes; `make test-frameworks` runs those whose packages
# install.
NEEDS_FRAMEWORK = tuple(
    f"treadle.adapters.{name}" for name in ("areal", "rllm", "roll", "trl", "verl")
)
NEEDS_EXTRA = ("treadle.training", "treadle.adapters.on_ray")  # of the client
IMPORT_ALL = """
import importlib, json, sys
from pathlib import Path
skipped = tuple(json.loads(sys.argv[1]))
here = Path(next(path for path in sys.path if path.endswith("site-packages")))
names = [
    ".".join(path.relative_to(here).with_suffix("").parts).removesuffix(".__init__")
    for folder in sorted(here.glob("treadle*"))
    if folder.suffix != ".dist-info"
    for path in sorted(folder.rglob("*.py"))
]
for name in names:
    if not name.startswith(skipped) and not name.endswith(".__main__"):
        importlib.import_module(name)
print(len(names))
"""


def main() -> None:
    asked = argparse.ArgumentParser(
        description="Build the wheels, and check them unless they are for a release."
    )
    asked.add_argument(
        "--release", type=Path, help="build them into this folder, and check nothing"
    )
    asked.add_argument(
        "--with-dependencies", action="store_true", help="with all wheels that they need"
    )
    options = asked.parse_args()
    if options.with_dependencies and options.release is None:
        asked.error("--with-dependencies needs --release FOLDER")
    if options.release is None:
        check()
    else:
        release(options.release.resolve(), with_dependencies=options.with_dependencies)


def release(folder: Path, *, with_dependencies: bool) -> None:
    """Fill the folder of a release. Wheels of another version that are there stay."""
    with tempfile.TemporaryDirectory(prefix="treadle-wheels-") as work:
        wheels = build_wheels(Path(work))
        if with_dependencies:
            add_dependencies(wheels)
        folder.mkdir(parents=True, exist_ok=True)
        for wheel in sorted(wheels.iterdir()):
            shutil.copy(wheel, folder / wheel.name)
    say(f"{folder}: {len(list(folder.glob('*.whl')))} wheels")


def add_dependencies(wheels: Path) -> None:
    """Put all wheels that RELEASED needs beside those of the distributions, for this platform and
    Python.

    Packages without a wheel at the index are built here: cellpylib, pycosat (in C) and zss, which
    reasoning-gym needs.
    """
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q")
    run(*pip, "-c", CONSTRAINTS, "--find-links", wheels, "-w", wheels, *RELEASED)


def check_release(folder: Path, wheels: Path) -> None:
    """Check that a release installs without an index, and without a compiler, as it has wheels
    alone."""
    add_dependencies(wheels)
    run(sys.executable, "-m", "venv", folder)
    pip = (
        python(folder),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-compile",
        "--no-index",
    )
    run(*pip, "--only-binary=:all:", "--find-links", wheels, *RELEASED)
    run(folder / "bin/treadle", "--help")
    say(f"release: {len(list(wheels.iterdir()))} wheels install without an index")


def check() -> None:
    """Install the wheels and use what they contain."""
    for name in [name for name in os.environ if name.startswith("TREADLE_")]:
        del os.environ[name]  # settings of the shell are not those of a service that starts here
    with tempfile.TemporaryDirectory(prefix="treadle-wheels-") as folder:
        work = Path(folder)
        wheels = build_wheels(work)
        check_client(work / "client", wheels)
        check_release(work / "release", shutil.copytree(wheels, work / "released"))
        shutil.rmtree(work / "release")
        for service in SERVICES:
            environment = make_environment(work / service, wheels, f"treadle[{service}]")
            asyncio.run(check_service(environment, service, work))
            shutil.rmtree(environment)
        environment = make_environment(
            work / "all", wheels, "treadle[all,ray]", "treadle-client[arrow]", "treadle-bench"
        )
        count = run(
            python(environment),
            "-I",
            "-c",
            IMPORT_ALL,
            json.dumps([*NEEDS_SGLANG, *NEEDS_FRAMEWORK]),
        )
        run(environment / "bin/treadle", "bench", "--help")
        say(f"all: {count.strip()} modules import, the command line finds the benches")


def build_wheels(work: Path) -> Path:
    """Build from a copy of what git would commit: an old build/ in the checkout could supply a
    missing module."""
    source = work / "source"
    names = run(
        "git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"
    ).split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    wheels = work / "wheels"
    for name, folder in DISTRIBUTIONS.items():
        run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, source / folder)
        say(f"{name}: wheel built")
    return wheels


def make_environment(folder: Path, wheels: Path, *requirements: str) -> Path:
    run(sys.executable, "-m", "venv", folder)
    pip = (
        python(folder),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
        "--no-compile",
    )
    run(*pip, "-c", CONSTRAINTS, "--find-links", wheels, *requirements)
    return folder


def check_client(folder: Path, wheels: Path) -> None:
    """Check that the client alone installs grpcio and protobuf, and nothing else, and that all of
    it but its extras imports."""
    environment = make_environment(folder, wheels, "treadle-client")
    listed = json.loads(run(python(environment), "-m", "pip", "list", "--format", "json"))
    brought = {package["name"] for package in listed} - {"pip", "setuptools"}
    if not brought <= CLIENT_BRINGS:
        sys.exit(f"treadle-client brings {sorted(brought - CLIENT_BRINGS)}")
    count = run(
        python(environment), "-I", "-c", IMPORT_ALL, json.dumps([*NEEDS_EXTRA, *NEEDS_FRAMEWORK])
    )
    say(f"client: {count.strip()} modules import; it brings {', '.join(sorted(brought))}")


async def check_service(environment: Path, service: str, work: Path) -> None:
    """Start the service as an operator would and request its health. Without an engine the sidecar
    reports NOT_SERVING."""
    folder = work / f"{service}-run"
    async with ProcessTree(folder) as tree:
        _, nats_url = await start_nats(tree, folder)
        prefix = f"TREADLE_{service.upper()}_"
        variables = {
            "TREADLE_NATS_URL": nats_url,
            f"{prefix}LISTEN": "127.0.0.1:0",
            f"{prefix}READY_FILE": str(folder / "ready.json"),
            **({f"{prefix}ENGINE_ID": "e0"} if service == "sidecar" else {}),
        }
        program = tree.start(
            service,
            [str(python(environment)), "-I", "-m", f"treadle_{service}"],
            variables,
            stage=1,
        )
        address = (await read_ready_file(program, folder, "ready.json", READY_WITHIN_S))["address"]
        probe = (python(environment), "-I", "-m", "treadle_runtime.probe", address)
        answer = await asyncio.to_thread(
            subprocess.run, probe, capture_output=True, text=True, check=False
        )
        healthy = answer.returncode == 0 or (
            service == "sidecar" and "NOT_SERVING" in answer.stderr
        )
        if not healthy:
            sys.exit(f"{service}: probe says {answer.stderr}")
    say(f"{service}: starts from the wheel with [{service}] alone and answers a probe")


def python(environment: Path) -> Path:
    return environment / "bin/python"


def run(*command: str | Path) -> str:
    """Return the stdout of a command; print its stderr and exit where it fails."""
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")
    if done.returncode != 0:
        sys.exit(
            f"{' '.join(words[:8])} ended with "
            f"{done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done.stdout


def say(line: str) -> None:
    sys.stdout.write(f"ok -- {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
