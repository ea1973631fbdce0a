"""A real Ray cluster of one node, and what runs in it: SGLang servers in actors, as verl starts
them, and a rollout."""

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import ray
import treadle
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from support.fake_sglang import FakeSglang, expected
from support.processes import clean_environment, free_port, import_path
from treadle.adapters.calls import client_at
from treadle.adapters.on_ray import find_mesh

STORE_BYTES = 80_000_000  # Ray takes no less than 75 MB
START_S, LOOK_S = 60.0, 0.2
TOKENS = 12
TOKEN_S = 0.02
OBSERVATION = [7, 8, 9]


@contextmanager
def ray_cluster() -> Iterator[str]:
    """The address of a cluster whose workers can import the tests. Ended by the pids of its own
    processes."""
    folder = Path(tempfile.mkdtemp(prefix="tr-"))  # short: it is in the paths of unix sockets
    port = free_port()
    ports = {
        name: free_port() for name in ("--ray-client-server-port", "--dashboard-agent-listen-port")
    }
    own = {
        "--port": port,
        "--include-dashboard": "false",
        "--temp-dir": folder,
        "--node-ip-address": "127.0.0.1",
    }
    try:
        with _node(
            folder,
            "--head",
            "--num-cpus=2",
            *(f"{name}={value}" for name, value in {**ports, **own}.items()),
        ):
            yield f"127.0.0.1:{port}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def another_node(address: str, folder: Path) -> Iterator[None]:
    """One more node of a cluster, on this machine, with the resource `second`."""
    port = f"--dashboard-agent-listen-port={free_port()}"
    with _node(folder, f"--address={address}", "--num-cpus=1", '--resources={"second": 1}', port):
        yield


@contextmanager
def _node(folder: Path, *options: str) -> Iterator[None]:
    common = ("--block", "--disable-usage-stats", "--min-worker-port=0", "--max-worker-port=0")
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        *common,
        f"--object-store-memory={STORE_BYTES}",
    ]
    log = folder / "node.log"
    with log.open("wb") as file:
        node = subprocess.Popen(
            [*command, *options],
            env=clean_environment({"PYTHONPATH": import_path(), "TMPDIR": str(folder)}),
            stdout=file,
            stderr=file,
        )
    try:
        give_up_at = time.monotonic() + START_S
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None and time.monotonic() < give_up_at, log.read_text()
            time.sleep(LOOK_S)
        yield
    finally:
        ours = psutil.Process(node.pid).children(recursive=True) if node.poll() is None else []
        node.terminate()
        _, alive = psutil.wait_procs(ours, timeout=10.0)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()  # never another's: psutil looks at when it began
        node.kill()
        node.wait()


class FakeServer:
    """The actor of an engine: a fake SGLang server, whose address a method tells, on a new port at
    each start."""

    def __init__(self, arguments: Mapping[str, Any] = {}) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._fake = asyncio.run_coroutine_threadsafe(self._start(arguments), self._loop).result()

    async def _start(self, arguments: Mapping[str, Any]) -> FakeSglang:
        fake = FakeSglang(token_s=TOKEN_S)
        fake.arguments.update(arguments)
        await fake.start()
        return fake

    async def get_server_address(self) -> tuple[str, int]:
        """As verl's."""
        return "127.0.0.1", self._fake.port

    async def take_for_a_token(self, token_s: float) -> None:
        """From now on."""
        self._fake.token_s = token_s

    async def called(self) -> list[str]:
        """Calls that changed weights or memory."""
        return self._fake.called


class Rollout:
    """An actor that plays trajectories of several turns through the mesh that it finds on its
    cluster."""

    def __init__(self) -> None:
        self.steps = 0

    async def count_steps(self) -> int:
        """Steps that have ended."""
        return self.steps

    async def play(self, trajectories: int, turns: int) -> list[str]:
        """What went wrong: trajectories whose tokens are not those of one uninterrupted engine."""
        async with client_at("ray") as client:
            found = await asyncio.gather(
                *[self._play(client, each, turns) for each in range(trajectories)]
            )
        return [each for each in found if each]

    async def ask_gateway(self, prompt: list[int]) -> list[int]:
        """What the gateway has sampled, asked in SGLang's form; empty while it does not serve."""
        mesh = await asyncio.to_thread(find_mesh)
        trust = (
            None
            if mesh.tls_folder is None
            else ssl.create_default_context(cafile=str(mesh.tls_folder / "ca.crt"))
        )
        if trust is not None:
            trust.check_hostname = False  # its name is gateway.treadle wherever it listens
        body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": TOKENS, "temperature": 0.0},
        }
        headers = {"Authorization": f"Bearer {mesh.api_key}"}
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.post(
                    f"{mesh.gateway}/generate", json=body, headers=headers, ssl=trust or True
                ) as answer,
            ):
                return list((await answer.json())["output_ids"])
        except aiohttp.ClientConnectorError:
            return []

    async def _play(self, client: treadle.Client, number: int, turns: int) -> str:
        prompt = list(range(10 + number, 40 + number))
        async with await client.open(prompt_id=f"p{number}", sample=0, prompt=prompt) as trajectory:
            context = list(prompt)
            for _ in range(turns):
                async for _ in trajectory.generate(
                    treadle.Sampling(max_new_tokens=TOKENS, temperature=0.0)
                ):
                    pass
                self.steps += 1
                sampled = list(trajectory.steps[-1].token_ids)
                if sampled != expected(context, TOKENS):
                    return f"p{number}: {sampled} after {context}"
                context += [*sampled, *OBSERVATION]
                trajectory.observe(OBSERVATION)
        return ""


class Job:
    """What a framework has on the cluster: actors of engines in a placement group, a bundle
    each."""

    def __init__(self) -> None:
        self.group = placement_group([{"CPU": 0.5}, {"CPU": 0.5}])
        self._servers: list[Any] = []  # an actor whose handle is gone ends
        ray.get(self.group.ready())

    def start_server(self, name: str, bundle: int, arguments: Mapping[str, Any] = {}) -> Any:
        """The handle of a new engine's actor, which Ray starts again."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return self._start(name, arguments, scheduling_strategy=strategy)

    def start_server_elsewhere(self, name: str) -> Any:
        """One on the other node, in no placement group, as verl places its servers."""
        return self._start(name, {}, resources={"second": 0.1})

    def _start(self, name: str, arguments: Mapping[str, Any], **where: Any) -> Any:
        options = {"name": name, "num_cpus": 0, "max_restarts": -1, **where}
        self._servers.append(ray.remote(FakeServer).options(**options).remote(arguments))
        return self._servers[-1]

    def end(self) -> None:
        """Ends all of its actors."""
        remove_placement_group(self.group)


@contextmanager
def driver(address: str) -> Iterator[Job]:
    """This process as the driver of a job."""
    ray.init(address, namespace="job", log_to_driver=False, logging_level="ERROR")
    try:
        job = Job()
        yield job
        job.end()
    finally:
        ray.shutdown()


def mesh_actor(name: str) -> Any:
    """Of the mesh."""
    return ray.get_actor(name, namespace="treadle")


def mesh_actors() -> set[str]:
    """Names of all actors of the mesh."""
    return {
        each["name"]
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["namespace"] == "treadle"
    }


def pid_of(name: str) -> int:
    """Of the process of a service, once it serves; 0 while its actor is away."""
    try:
        return int(ray.get(mesh_actor(name).until_ready.remote(), timeout=60.0))
    except (ValueError, ray.exceptions.RayError):
        return 0


def place_of(actor: Any) -> tuple[str, int]:
    """Placement group and bundle in which Ray keeps an actor."""

    def read(_: object) -> list[str]:
        import ray

        return list(ray._private.worker.global_worker.core_worker.resource_ids())

    read.__module__ = "__main__"  # pickled with its code
    (held,) = [
        name.removeprefix("bundle_group_").split("_")
        for name in ray.get(actor.__ray_call__.remote(read))
        if name.startswith("bundle_group_") and name.count("_") == 3
    ]
    return held[1], int(held[0])


def left_behind() -> list[str]:
    """Temporary folders of the mesh's actors on the head node."""

    def read() -> list[str]:
        import tempfile

        return [path.name for path in Path(tempfile.gettempdir()).glob("treadle-*")]

    return list(ray.get(ray.remote(read).options(num_cpus=0).remote()))


def node_of(actor: Any) -> str:
    """Id of the node on which an actor is."""

    def read(_: object) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    read.__module__ = "__main__"
    return str(ray.get(actor.__ray_call__.remote(read)))


def until(condition: Callable[[], object], within_s: float = 90.0) -> None:
    """Wait for a condition of the cluster."""
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "it never came true"
        time.sleep(LOOK_S)


# else Ray writes a token into the home folder of whoever runs this
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
