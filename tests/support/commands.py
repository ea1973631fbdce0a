"""Commands that tests run to their end."""

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

COMMAND_S = 90.0


async def output_of(
    *command: str, cwd: Path, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a command. It is killed after COMMAND_S, or where the
    caller is cancelled.

    env: beside this process's own.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
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
