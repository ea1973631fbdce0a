"""The example in examples/quickstart.py runs as it stands."""

import asyncio
import sys
from pathlib import Path

from support.mesh_in_process import WAIT_S, fake_mesh

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.py"


async def test_the_quickstart_plays_its_four_trajectories_and_says_so() -> None:
    async with fake_mesh() as mesh:
        command = (sys.executable, str(QUICKSTART), mesh.address)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            async with asyncio.timeout(WAIT_S):
                stdout, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0
        lines = stdout.decode().splitlines()
        assert [line.split(":")[0] for line in lines] == [f"lake-{n}/{s} finished" for n in (1, 2) for s in (0, 1)]
        assert all("48 tokens in 3 turns, reward 1.5" in line for line in lines)
        assert not mesh.tools.sessions
        assert not mesh.scheduler.open_trajectories
