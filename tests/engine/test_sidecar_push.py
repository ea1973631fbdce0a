"""A trainer process broadcasts weights to a real engine over gloo, through the client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import treadle
from support import weights_trainer
from support.conditions import until
from support.processes import StartService, free_port
from support.real_engines import RealEngine, engine_python
from support.sidecar_in_process import sidecar

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
PROMPT = [3 + (position * 7919) % 40_000 for position in range(48)]
TOKENS = 32
RUNNING_TOKENS = 160  # of the step during which weights change
PARTS = 2


class Trainer:
    """The trainer process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def ask(self, *words: object) -> Any:
        """One command; its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        return await self.hear()

    async def hear(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, "the trainer has died"
        return json.loads(line)

    async def parts(self, which: str) -> AsyncIterator[treadle.WeightPush]:
        """All weights, in PARTS broadcasts."""
        for part in range(PARTS):
            yield treadle.WeightPush(
                "distributed", await self.ask("body", which, part, PARTS, "treadle")
            )
            await self.ask("broadcast", which, part, PARTS)


@asynccontextmanager
async def trainer_of(model: str) -> AsyncIterator[Trainer]:
    """A running one for the time of the block."""
    command = [str(engine_python()), "-P", str(weights_trainer.__file__), model]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, env=env, limit=2**24
    )
    try:
        trainer = Trainer(process)
        await trainer.hear()
        yield trainer
    finally:
        process.kill()
        await process.wait()


async def greedy(client: treadle.Client, name: str) -> list[int]:
    """What the present weights say after PROMPT."""
    trajectory = await client.open(prompt_id=name, sample=0, prompt=PROMPT)
    async for _ in trajectory.generate(
        treadle.Sampling(max_new_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    ):
        pass
    await trajectory.close()
    return trajectory.steps[-1].token_ids


async def test_tokens_follow_the_weights_that_a_trainer_broadcasts(
    nats_url: str,
    two_engines: tuple[RealEngine, RealEngine],
    start_service: StartService,
    tmp_path: Path,
) -> None:
    """Two layers are exchanged by a broadcast while a step runs, loaded from disk as such, and put
    back by a broadcast. Result: greedy tokens after the broadcast are those after the load, and at
    the end those of the beginning; the step has a span of each version. The engine, which cannot
    sleep, says so."""
    engine = two_engines[0]
    scheduler = await start_service(
        "treadle_scheduler", {"TREADLE_SCHEDULER_LISTEN": f"127.0.0.1:{free_port()}"}
    )
    curve: dict[str, Any] = {"decode_base_s": 0.05, "prefill_tokens_per_s": 500.0}
    async with (
        sidecar(nats_url, engine.url, scheduler=scheduler.address, **curve) as side,
        treadle.Client(scheduler.address) as client,
        trainer_of(engine.spec.model_path) as trainer,
    ):
        original = await greedy(client, "original")
        master = f"127.0.0.1:{free_port()}"

        async def join(world_size: int) -> None:
            await trainer.ask("join", master, world_size, "treadle")

        assert await client.join_weights_group(master, join, backend="gloo") == {}
        running = await client.open(prompt_id="running", sample=0, prompt=PROMPT[::-1])
        seen: list[int] = []

        async def run() -> None:
            sampling = treadle.Sampling(
                max_new_tokens=RUNNING_TOKENS, temperature=0.0, ignore_eos=True
            )
            async for chunk in running.generate(sampling):
                seen.extend(chunk.token_ids)

        task = asyncio.create_task(run())
        await until(lambda: len(seen) > 5, within_s=60.0)
        assert await client.push_weights("changed", trainer.parts("changed"), timeout_s=120.0) == {}
        pushed = await greedy(client, "pushed")
        await task
        versions = [span.weight_version for span in running.version_spans]
        assert len(versions) == 2 and versions[1] == "changed"
        assert (
            sum(span.end_token - span.start_token for span in running.version_spans)
            == RUNNING_TOKENS
        )

        await trainer.ask("save", tmp_path / "changed")
        assert await client.update_weights(str(tmp_path / "changed"), "changed-on-disk") == {}
        assert pushed == await greedy(client, "loaded")
        assert pushed != original

        assert await client.push_weights("default", trainer.parts("own"), timeout_s=120.0) == {}
        assert await greedy(client, "back") == original
        assert (await side.load()).weight_version == "default"
        assert await client.leave_weights_group() == {}
        assert "without --enable-memory-saver" in (await client.sleep())["e0"]
    shutil.rmtree(tmp_path / "changed")
