"""`python -m treadle_runtime.probe`: what a container asks its own server."""

import asyncio
import sys
from pathlib import Path

import pytest
from support.probe_service import PROBE
from support.processes import StartService

SERVICE, NO_SERVICE = "treadle.placement.v1.PlacementService", "treadle.loom.v1.LoomService"


async def asked(*arguments: str) -> tuple[int | None, str]:
    """Exit code and stderr of the health probe."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "treadle_runtime.probe", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


@pytest.mark.parametrize("over", ["gRPC", "a socket"])
async def test_a_serving_server_is_healthy_and_one_that_is_gone_is_not(
    start_service: StartService, tmp_path: Path, over: str
) -> None:
    socket = tmp_path / "health"
    process = await start_service(
        PROBE, {"TREADLE_PROBE_HEALTH_SOCKET": str(socket)}, service="probe"
    )
    address = process.address if over == "gRPC" else str(socket)
    assert await asked(address) == (0, "")
    assert await asked(address, SERVICE) == (0, "")
    assert await asked(address, "alive") == (0, "")
    code, line = await asked(address, NO_SERVICE)
    assert (code, "NOT_FOUND" in line or "SERVICE_UNKNOWN" in line) == (1, True)
    process.terminate()
    await process.wait()
    code, line = await asked(address)
    assert (code, address in line) == (1, True)
    code, line = await asked()
    assert (code, line.startswith("usage:")) == (2, True)


async def test_a_socket_of_a_killed_process_is_taken_over(
    start_service: StartService, tmp_path: Path
) -> None:
    socket = {"TREADLE_PROBE_HEALTH_SOCKET": str(tmp_path / "health")}
    process = await start_service(PROBE, socket, service="probe")
    process.kill()
    code, line = await asked(str(tmp_path / "health"))
    assert (code, "refused" in line) == (1, True)
    await start_service(PROBE, socket, service="probe")
    assert await asked(str(tmp_path / "health")) == (0, "")


async def test_a_socket_that_cannot_be_made_says_which_setting(
    start_service: StartService, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"HEALTH_SOCKET=.*/no/health"):
        await start_service(
            PROBE, {"TREADLE_PROBE_HEALTH_SOCKET": f"{tmp_path}/no/health"}, service="probe"
        )
