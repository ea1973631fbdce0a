"""Milliseconds of a tool in a Docker container, as JSON.

`python -m treadle_bench.containers.measure --host URL --image NAME`

Quantiles of wall time. ready: start of a container until its worker answers, one at a time. update:
`docker update` of cores and quota. first_ask: a trivial snippet, the first of its container, whose
process was forked before, as for stateless calls. ask: a further snippet, which forks.
ask_with_update: the same, with other cores each time (allocate on execution, ARL-Tangram §5.2).
docker_exec: for comparison, `docker exec` of a Python that does nothing. remove: until the
container is gone. load_1m: of the machine.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
from treadle_tools.builtin import PYTHON
from treadle_tools.sandbox.containers.docker import DockerHost
from treadle_tools.sandbox.containers.hosts import Allotment, Recipe, sweep
from treadle_tools.sandbox.containers.sandbox import ContainerSandbox
from treadle_tools.tool import Granted, Limits

OWNER = "treadle-bench-containers"
SILENCE_S = 300.0


async def quantiles_ms(repeats: int, work: Callable[[int], Awaitable[object]]) -> dict[str, float]:
    """Run `work` `repeats` times, one after the other; quantiles of its milliseconds."""
    times_s = []
    for number in range(repeats):
        began = time.perf_counter()
        await work(number)
        times_s.append(time.perf_counter() - began)
    return {
        name: round(float(np.quantile(times_s, q)) * 1e3, 2)
        for name, q in (("p50", 0.5), ("p99", 0.99))
    }


async def main(url: str, image: str, repeats: int) -> None:
    """Measure, and print one JSON object."""
    host = DockerHost(url, owner=OWNER)
    version = await host.check()
    recipe = Recipe.for_tool(PYTHON, image=image, code_in_image=False, silence_s=SILENCE_S)
    cores = sorted(os.sched_getaffinity(0))
    sandboxes: list[ContainerSandbox] = []
    async with asyncio.TaskGroup() as group:

        def spawn(work: Coroutine[Any, Any, None]) -> None:
            group.create_task(work)

        async def make(number: int) -> None:
            name = f"{OWNER}-{os.getpid()}-{number}"
            await host.make(recipe, name)
            sandboxes.append(ContainerSandbox(host, name, spawn, lambda sandbox: None))
            await sandboxes[-1].start(PYTHON.limits)

        few = max(2, repeats // 10)
        report: dict[str, object] = {"docker": version, "repeats": repeats, "containers": few}
        report["ready_ms"] = await quantiles_ms(few, make)
        sandbox = sandboxes[0]

        async def ask(
            number: int, limits: Limits = PYTHON.limits, sandbox: ContainerSandbox = sandbox
        ) -> None:
            reply = await sandbox.ask("call", {"code": "1 + 1"}, limits, PYTHON.processes)
            assert reply["output"] == "2\n"

        async def execute(number: int) -> None:
            process = await asyncio.create_subprocess_exec(
                *("docker", "-H", url, "exec", sandbox.name, "python3", "-I", "-S", "-c", "")
            )
            assert await process.wait() == 0

        report["first_ask_ms"] = await quantiles_ms(
            few, lambda number: ask(number, sandbox=sandboxes[number])
        )
        report["update_ms"] = await quantiles_ms(
            repeats,
            lambda number: host.allot(sandbox.name, Allotment(1, (cores[number % len(cores)],))),
        )
        report["ask_ms"] = await quantiles_ms(repeats, ask)
        report["ask_with_update_ms"] = await quantiles_ms(
            repeats, lambda number: ask(number, Granted(cores=(cores[number % len(cores)],)))
        )
        report["docker_exec_ms"] = await quantiles_ms(few, execute)
        report["remove_ms"] = await quantiles_ms(
            few, lambda number: host.remove(sandboxes[number].name)
        )
    await sweep(host)
    await host.close()
    print(json.dumps({**report, "load_1m": round(os.getloadavg()[0], 1)}, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--host", default="unix:///var/run/docker.sock")
    parser.add_argument("--image", default="python:3.11-slim-bookworm")
    parser.add_argument("--repeats", type=int, default=200)
    given = parser.parse_args()
    asyncio.run(main(given.host, given.image, given.repeats))
