"""Child processes of the benches that measure live: a mesh with engines, or one service with NATS,
in a temporary folder. They are stopped and the folder is removed when the block ends."""

import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from treadle_cli.mesh.engines import (
    Engine,
    EnginePlan,
    place_kv,
    prepare_model,
    start_engines,
    until_healthy,
)
from treadle_cli.mesh.mesh import Mesh, MeshPlan, StartBoard
from treadle_cli.mesh.processes import HOST, ProcessTree
from treadle_cli.mesh.services import read_ready_file, start_nats

from treadle_bench.bench import BenchOptions

START_TIMEOUT_S = 120.0
SERVICE_STAGE = 2  # the service is stopped before NATS


@asynccontextmanager
async def run_mesh(
    engines: EnginePlan,
    options: BenchOptions,
    *,
    secure: bool = False,
    front_door: bool = False,
    probes: bool = True,
) -> AsyncIterator[Mesh]:
    """A mesh on this machine. secure: with certificates. front_door: with a gateway. probes: of
    idle engines, by their sidecars. Raises ProcessError."""
    async with run_tree(options) as (tree, folder):
        plan = MeshPlan(
            engines, folder / "state", secure=secure, front_door=front_door, probes=probes
        )
        with StartBoard(options.progress) as board:
            mesh = await Mesh.start(plan, tree, board)
        yield mesh


@asynccontextmanager
async def run_engine(plan: EnginePlan, options: BenchOptions) -> AsyncIterator[Engine]:
    """The first engine of a plan, without the rest of the mesh. Raises ProcessError."""
    async with run_tree(options) as (tree, folder):
        kv = place_kv(tree, plan, folder)
        (engine,) = start_engines(tree, replace(plan, count=1), await prepare_model(tree, plan), kv)
        await until_healthy(engine)
        yield engine


@dataclass(frozen=True)
class Service:
    """Where a service and its NATS listen."""

    address: str
    nats_url: str


@asynccontextmanager
async def run_service(name: str, options: BenchOptions, **settings: str) -> AsyncIterator[Service]:
    """One service without the rest of the mesh. settings: in upper case, without the prefix. Raises
    ProcessError."""
    async with run_tree(options) as (tree, folder):
        _, nats_url = await start_nats(tree, folder)
        own = {
            "LISTEN": f"{HOST}:0",
            "READY_FILE": str(folder / "ready.json"),
            "NATS_URL": nats_url,
            **settings,
        }
        env = {f"TREADLE_{name.upper()}_{key}": value for key, value in own.items()}
        child = tree.start(
            name, [sys.executable, "-m", f"treadle_{name}"], env, stage=SERVICE_STAGE
        )
        ready = await read_ready_file(child, folder, "ready.json", START_TIMEOUT_S)
        yield Service(str(ready["address"]), nats_url)


@asynccontextmanager
async def run_tree(options: BenchOptions) -> AsyncIterator[tuple[ProcessTree, Path]]:
    """A tree of child processes and a folder, both gone at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="treadle-bench-", ignore_cleanup_errors=True) as name:
        async with ProcessTree(Path(name) / "logs", hurry=options.hurry) as tree:
            yield tree, Path(name)
