"""A client as a process of its own, which a test kills: `python -m support.client_process ADDRESS
OPTIONS`.

OPTIONS is JSON. `client`: arguments of treadle.Client. Without `rollout` the process opens
`trajectories` and generates in each without end. With `rollout` (arguments of Client.rollout, and
`tokens` a sample) it appends `prompt sample` to the file `started` as each agent begins, and at the
end writes the file `done`.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import pytest
import treadle
from support.processes import clean_environment, fork_server, import_path
from treadle_runtime.fork_server import ForkedProcess

PROMPT = [5, 6, 7]
STDERR = 2
MANY_TOKENS = 3_000  # of a turn that lasts for longer than any test


async def hold(client: treadle.Client, options: dict[str, Any]) -> None:
    """Use trajectories until this process is killed."""

    async def use(sample: int) -> None:
        t = await client.open(prompt_id="p", sample=sample, prompt=PROMPT)
        async for _ in t.generate(treadle.Sampling(max_new_tokens=MANY_TOKENS, ignore_eos=True)):
            pass

    async with asyncio.TaskGroup() as group:
        for sample in range(options["trajectories"]):
            group.create_task(use(sample))


async def roll_out(client: treadle.Client, options: dict[str, Any]) -> None:
    """One rollout, started anew or gone on with."""

    async def agent(t: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        append(options["started"], f"{prompt.id} {t.sample}\n")
        sampling = treadle.Sampling(
            max_new_tokens=options["tokens"] * (1 + t.sample), ignore_eos=True
        )
        async for _ in t.generate(sampling):
            pass
        return 1.0

    prompts = [treadle.Prompt(prompt_id, PROMPT) for prompt_id in options["prompts"]]
    result = await client.rollout(prompts, agent, **options["rollout"])
    append(options["done"], json.dumps(asdict(result)))


def append(path: str, text: str) -> None:
    with Path(path).open("a") as file:
        file.write(text)


async def main(address: str, options: dict[str, Any]) -> None:
    async with treadle.Client(address, **options["client"]) as client:
        await (roll_out if "rollout" in options else hold)(client, options)


class Processes(Protocol):
    """The type of the fixture `client_processes`."""

    def __call__(self, address: str, **options: Any) -> ForkedProcess: ...


@pytest.fixture
def client_processes() -> Iterator[Processes]:
    """`client_processes(address, **options)` starts one, which is killed at the end of the test at
    the latest."""
    started: list[ForkedProcess] = []

    def start(address: str, **options: Any) -> ForkedProcess:
        environment = clean_environment({"PYTHONPATH": import_path()})
        arguments = (address, json.dumps({"client": {}, **options}))
        process = fork_server().start(
            "support.client_process", environment, STDERR, arguments=arguments
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
