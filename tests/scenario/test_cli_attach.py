"""`treadle attach` as a real process beside fake SGLang servers: a mesh of its own, a mesh that
runs, and a check."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import treadle
from support.cli import TreadleProcess
from support.commands import output_of
from support.fake_sglang import FakeSglang, expected, fake_sglang
from support.processes import StartService, free_port
from support.scheduler import scheduler_client

PROMPT = list(range(10, 40))
TREADLE = (sys.executable, "-m", "treadle_cli")
NEVER_CALLED = list[str]()  # of what changes weights, memory or caches of a server


@pytest.fixture
async def servers() -> AsyncIterator[list[FakeSglang]]:
    """Two SGLang servers that somebody else runs."""
    async with fake_sglang() as first, fake_sglang() as second:
        yield [first, second]


class Attached:
    """A `treadle attach` under way, watched from a thread so that the fakes go on answering."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = TreadleProcess(["attach", *arguments], folder)

    async def addresses(self) -> dict[str, object]:
        """What --json prints once it serves."""
        await asyncio.to_thread(self.process.until, lambda: '{"scheduler"' in self.process.text())
        line = next(
            each for each in self.process.text().splitlines() if each.startswith('{"scheduler"')
        )
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    async def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send(number)
        return await asyncio.to_thread(self.process.wait)


async def sample_directly(server: FakeSglang) -> list[int]:
    body = {
        "rid": "own",
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 3},
        "stream": True,
    }
    tokens: list[int] = []
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{server.url}/generate", json=body) as answer,
    ):
        async for line in answer.content:
            if line.startswith(b"data: {"):
                tokens += json.loads(line[6:])["output_ids"]
    return tokens


async def generate(url: str) -> list[int]:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5, "temperature": 0.0}}
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as answer:
        found: list[int] = (await answer.json())["output_ids"]
        return found


def written(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def run_trajectory(scheduler: str, name: str) -> list[int]:
    async with treadle.Client(scheduler) as client:
        trajectory = await client.open(prompt_id=name, sample=0, prompt=PROMPT)
        async for _ in trajectory.generate(treadle.Sampling(max_new_tokens=5, temperature=0.0)):
            pass
        return list(trajectory.steps[-1].token_ids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_a_mesh_around_servers_of_others_leaves_them_as_they_were(
    servers: list[FakeSglang], tmp_path: Path, number: signal.Signals
) -> None:
    attached = Attached(tmp_path, *(server.url for server in servers), "--port", "0", "--json")
    try:
        where = await attached.addresses()
        sidecars = where["sidecars"]
        assert isinstance(sidecars, dict)
        assert set(sidecars) == {f"127.0.0.1-{server.port}" for server in servers}
        assert await run_trajectory(str(where["scheduler"]), "p0") == expected(PROMPT, 5)
        assert await generate(f"{where['gateway']}/generate") == expected(PROMPT, 5)
        async with aiohttp.ClientSession() as http, http.get(str(where["console"])) as page:
            assert "Treadle" in await page.text()
        assert "no shared storage of KV" in attached.process.text(), "what could be better is said"
        assert await attached.end(number) == (130 if number is signal.SIGINT else -signal.SIGKILL)
        assert await asyncio.to_thread(attached.process.left_over) == []
    finally:
        attached.process.end()
    for server in servers:
        assert await sample_directly(server) == expected(PROMPT, 3)
        assert server.called == NEVER_CALLED and server.running == 0


async def test_sidecars_join_a_mesh_that_runs_and_leave_it(
    servers: list[FakeSglang], tmp_path: Path, start_service: StartService, nats_url: str
) -> None:
    scheduler = await start_service(
        "treadle_scheduler", {"TREADLE_SCHEDULER_LISTEN": f"127.0.0.1:{free_port()}"}
    )
    options = ("--scheduler", scheduler.address, "--nats-url", nats_url, "--json")
    attached = Attached(tmp_path, servers[0].url, *options)
    try:
        where = await attached.addresses()
        assert where["scheduler"] == scheduler.address and where["nats"] == nats_url
        assert "gateway" not in where, "a mesh that runs has its own"
        assert await run_trajectory(scheduler.address, "p0") == expected(PROMPT, 5)
        at = {"TREADLE_NATS_URL": nats_url}
        code, _, errors = await output_of(
            *TREADLE, "attach", servers[0].url, *options[:2], cwd=tmp_path, env=at
        )
        assert code == 2 and "is it attached already?" in " ".join(errors.split()), errors
        assert await attached.end() == 130
    finally:
        attached.process.end()
    async with scheduler_client(scheduler.address) as calls:
        assert await calls.engines() == [], "its lease was given back, and did not run out"


async def test_a_check_says_which_flag_must_change_and_starts_nothing(
    servers: list[FakeSglang], tmp_path: Path
) -> None:
    good, bad = servers
    code, said, _ = await output_of(
        *TREADLE, "attach", "--check", good.url, bad.url, "--json", cwd=tmp_path
    )
    assert code == 0 and json.loads(said)["worst"] == "warning"
    bad.arguments["disable_radix_cache"] = True
    code, said, _ = await output_of(*TREADLE, "attach", "--check", good.url, bad.url, cwd=tmp_path)
    assert code == 1
    assert "✗ radix cache: is off" in said and "without --disable-radix-cache" in said
    good.key = "correct-horse-battery-staple"
    code, said, _ = await output_of(*TREADLE, "attach", "--check", good.url, cwd=tmp_path)
    assert code == 1 and "Set TREADLE_ENGINE_KEY to that of its --api-key" in said
    key = {"TREADLE_ENGINE_KEY": good.key}
    code, said, errors = await output_of(
        *TREADLE, "attach", good.url, bad.url, cwd=tmp_path, env=key
    )
    assert code == 2 and f"nothing was started: {bad.url}: radix cache: is off" in " ".join(
        errors.split()
    )
    assert written(tmp_path) == []


async def test_what_is_no_scheduler_and_one_server_under_two_names_are_named(
    servers: list[FakeSglang], tmp_path: Path, start_service: StartService, nats_url: str
) -> None:
    other = await start_service(
        "treadle_predictor", {"TREADLE_PREDICTOR_LISTEN": f"127.0.0.1:{free_port()}"}
    )
    options = ("--scheduler", other.address, "--nats-url", nats_url)
    code, said, errors = await output_of(*TREADLE, "attach", servers[0].url, *options, cwd=tmp_path)
    assert code == 2, errors
    assert f"--scheduler {other.address}: what serves there is no scheduler" in " ".join(
        errors.split()
    )
    assert said.splitlines().count(servers[0].url) == 1, (
        "one heading for all that is said of a server"
    )
    again = f"http://localhost:{servers[0].port}"
    code, _, errors = await output_of(
        *TREADLE, "attach", servers[0].url, again, *options, cwd=tmp_path
    )
    assert code == 2 and "two of these are one server" in " ".join(errors.split()), errors


async def test_an_url_without_a_server_and_options_that_do_not_go_together_are_named(
    tmp_path: Path,
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    for options, says in (
        ((nobody,), f"{nobody}: answers: does not answer"),
        ((nobody, "--scheduler", "h:1"), "--scheduler needs --nats-url"),
        ((nobody, "--nats-url", "nats://h:1"), "--nats-url needs --scheduler"),
        (
            (nobody, "--nats-url", "nats://h:1", "--scheduler", "127.0.0.1:1,h:1"),
            "--scheduler h:1 needs --host",
        ),
        ((nobody, "--kv-folder", "nowhere"), "--kv-folder nowhere: there is no such folder"),
        ((nobody, "--port", "70000"), "--port"),
        (("ftp://h",), "ftp://h: must be the URL of a SGLang server"),
    ):
        code, _, errors = await output_of(*TREADLE, "attach", *options, cwd=tmp_path)
        assert code == 2 and says in " ".join(errors.split()), errors
