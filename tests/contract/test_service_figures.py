"""The figures of the services, as an OTLP collector gets them from real processes."""

import asyncio
import re
from pathlib import Path

import grpc.aio
import pytest
import treadle
from support.collector import collecting
from support.fake_migration_peers import MigratorCalls
from support.fake_sglang import fake_sglang
from support.mesh_in_process import QUICK, generate
from support.processes import ServiceProcess, StartService, free_port
from support.scheduler import scheduler_client
from treadle.migrator.v1 import migrator_pb2

SERVICES = ("scheduler", "sidecar", "predictor", "placement", "migrator", "rollout")
ROOT = Path(__file__).resolve().parents[2]
UNITS = ("_seconds", "_total")


def documented(service: str) -> set[str]:
    """Names of figures in the README of a service."""
    text = (ROOT / "services" / service / "README.md").read_text()
    return set(re.findall(rf"`(treadle_{service}_\w+)`", text))


async def one_turn(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
    await generate(trajectory, 4)
    return 1.0


@pytest.mark.timeout(240)
async def test_each_service_sends_the_figures_that_its_readme_has_and_each_names_its_unit(
    start_service: StartService,
) -> None:
    """A rollout on two engines, a batch, a move that fails; then all services are stopped."""
    processes: list[ServiceProcess] = []
    async with collecting() as (collector, endpoint), fake_sglang() as first, fake_sglang() as second:

        async def start(service: str, **own: str) -> str:
            variables = {f"TREADLE_{service.upper()}_{name}": value for name, value in own.items()}
            process = await start_service(f"treadle_{service}", {**variables, "TREADLE_OTLP_ENDPOINT": endpoint})
            processes.append(process)
            return process.address

        peers = {name: await start(name) for name in ("predictor", "placement", "rollout")}
        address = f"127.0.0.1:{free_port()}"
        migrator = await start("migrator", SCHEDULER=address)
        settings = {"PREDICTOR": peers["predictor"], "PLACEMENT": peers["placement"], "ROLLOUT": peers["rollout"]}
        await start("scheduler", LISTEN=address, MIGRATOR=migrator, **settings)
        for number, engine in enumerate((first, second)):
            curve = {"DECODE_BASE_S": "0.01", "PREFILL_TOKENS_PER_S": "10000"}
            await start("sidecar", ENGINE_ID=f"e{number}", ENGINE_URL=engine.url, SCHEDULER=address, **curve)
        async with scheduler_client(address) as control, treadle.Client(address, retry=QUICK) as client:
            await control.until_registered(2)
            prompts = [treadle.Prompt(f"p{number}", [5, 6, 7]) for number in range(2)]
            result = await client.rollout(prompts, one_turn, samples_per_prompt=3)
            await client.get_batch(result.rollout_id)
        request = migrator_pb2.StartMigrationRequest(
            request_id="m",
            trajectory_id="t",
            source=migrator_pb2.Endpoint(engine_id="e0", address="127.0.0.1:9"),
            target=migrator_pb2.Endpoint(engine_id="e1", address="127.0.0.1:10"),
            cache_salt="default",
        )
        async with grpc.aio.insecure_channel(migrator) as channel:
            await MigratorCalls(channel).moved(request)
        for process in processes:
            process.terminate()
        assert await asyncio.gather(*(process.wait() for process in processes)) == [0] * len(processes)

    for service in SERVICES:
        sent = {name for name in collector.metrics if name.startswith(f"treadle_{service}_")}
        assert sent == documented(service), service
        assert all(name.endswith(UNITS) for name in sent)
    parts = {labels["part"] for labels, _ in collector.points("treadle_scheduler_trajectory_seconds")}
    assert {"held", "decode", "control"} <= parts
