"""`treadle up`: a mesh that runs until Ctrl-C."""

import asyncio
import shutil
from pathlib import Path

from rich.console import Console
from rich.table import Table

from treadle_cli.mesh import Mesh, MeshPlan
from treadle_cli.processes import ProcessTree
from treadle_cli.startboard import StartBoard


async def run_up(plan: MeshPlan, logs: Path, console: Console, hurry: asyncio.Event) -> int:
    """Starts the mesh, prints where everything is, and waits. Ends by a signal, or by ChildDiedError.

    logs: the folder of the children's logs; the plan's own folder, the mesh's state, is removed at the end.
    """
    try:
        async with ProcessTree(logs, hurry=hurry) as tree:
            with StartBoard(console) as board:
                mesh = await Mesh.start(plan, tree, board)
            console.print(_table(mesh))
            console.print(f"Logs: {logs}. Ctrl-C stops everything.", highlight=False, soft_wrap=True)
            await mesh.until_broken()
    finally:
        shutil.rmtree(plan.folder, ignore_errors=True)
    return 0


def _table(mesh: Mesh) -> Table:
    table = Table("service", "address", "what for", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    purposes = {
        "scheduler": "the one address that a client needs",
        "predictor": "how much is left?",
        "placement": "where?",
        "migrator": "how does the KV get there?",
        "tools": "who runs the tool?",
        "rollout": "which trajectories are worth finishing?",
    }
    for name, purpose in purposes.items():
        table.add_row(name, mesh.where.services[name], purpose)
    for engine in mesh.engines:
        cores = f", core {', '.join(map(str, engine.cores))}" if engine.cores else ""
        table.add_row(
            f"sidecar of {engine.engine_id}", mesh.where.sidecars[engine.engine_id], f"SGLang at {engine.url}{cores}"
        )
    table.add_row("NATS", mesh.nats_url, "facts and state")
    return table
