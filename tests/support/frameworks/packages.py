"""Frameworks' own packages, each in a folder that only its own processes import from: `make
frameworks` fills it.

They are installed without their dependencies, which would bring CUDA, Ray and other versions of
what the mesh uses. What runs is their own code that sends requests; a file beside this one calls
it.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from support.processes import clean_environment

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
PROCESS_S = 60.0


def folder_of(framework: str) -> Path:
    """Where its packages are. Raises AssertionError saying how to get them."""
    folder = Path(os.environ.get("TREADLE_TEST_FRAMEWORKS", ROOT / ".cache/frameworks")) / framework
    assert folder.is_dir(), f"no packages of {framework} at {folder}: make frameworks"
    return folder


async def run_rollouts(framework: str, options: dict[str, Any]) -> Any:
    """What a framework's own code brings: the answer of `<framework>_rollouts.py` to options, both
    JSON."""
    program = HERE / f"{framework.replace('-', '_')}_rollouts.py"
    folder = folder_of(framework)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(program), str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=clean_environment({}) | {"PYTHONPATH": str(folder)},
    )
    try:
        async with asyncio.timeout(PROCESS_S):
            out, err = await process.communicate(json.dumps(options).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-4000:]
    return json.loads(out.splitlines()[-1])
