"""Commands that tests run to their end."""

import asyncio
from pathlib import Path

COMMAND_S = 90.0


async def output_of(*command: str, cwd: Path) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command. It is killed after COMMAND_S, or where the caller is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, stdout.decode(), stderr.decode()
