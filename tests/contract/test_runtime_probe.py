"""`python -m treadle_runtime.probe`: what a container asks its own server."""

import asyncio
import sys

from support.probe_service import PROBE
from support.processes import StartService


async def asked(*arguments: str) -> tuple[int | None, str]:
    """Exit code and stderr of the health probe."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "treadle_runtime.probe", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


async def test_a_serving_server_is_healthy_and_one_that_is_gone_is_not(start_service: StartService) -> None:
    process = await start_service(PROBE, service="probe")
    assert await asked(process.address) == (0, "")
    assert await asked(process.address, "treadle.placement.v1.PlacementService") == (0, "")
    code, line = await asked(process.address, "treadle.loom.v1.LoomService")
    assert (code, "NOT_FOUND" in line) == (1, True)
    process.terminate()
    await process.wait()
    code, line = await asked(process.address)
    assert (code, process.address in line) == (1, True)
    code, line = await asked()
    assert (code, line.startswith("usage:")) == (2, True)
