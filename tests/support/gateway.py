"""A mesh of real services as processes before fake engines, with a gateway in front, for tests of
its HTTP surface."""

import json
import os
import signal
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from support.conditions import until_said
from support.fake_chat import teach_chat, write_tokenizer
from support.fake_sglang import FakeSglang
from support.processes import fork_server, free_port
from treadle.certificates import AUTHORITY
from treadle_cli.mesh.processes import ProcessTree
from treadle_cli.mesh.services import GATEWAY_FOLDER, ControlPlane, choose_addresses
from treadle_gateway.config import GatewaySettings
from treadle_gateway.wire import wire
from treadle_runtime.server import serving

ENGINES = ("e0", "e1")
SERVICES = ("placement", "predictor", "migrator")  # beside the scheduler
MODEL = "fake/model"
PROMPT = list(range(10, 40))
GREEDY = {"max_new_tokens": 12, "temperature": 0.0}
START_S = 120.0  # placement compiles its kernels at the first start on a machine


def ask(prompt: list[int] = PROMPT, **more: Any) -> dict[str, Any]:
    """A body of /generate."""
    return {"input_ids": prompt, "sampling_params": GREEDY, "return_logprob": True, **more}


@dataclass
class FrontDoor:
    """url: of the gateway. http: a session on it. how: options of each request. engines: fakes.
    urls: of all. scheduler: its address."""

    url: str
    how: dict[str, Any]
    http: aiohttp.ClientSession
    tree: ProcessTree
    plane: ControlPlane
    engines: dict[str, FakeSglang]
    urls: Mapping[str, str]
    scheduler: str

    async def post(self, path: str, body: object, status: int = 200, **headers: str) -> Any:
        """The JSON of an answer with this status."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(
            f"{self.url}{path}", json=body, headers=named, **self.how
        ) as response:
            answer = await response.json()
            assert response.status == status, answer
            return answer

    async def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, without [DONE]."""
        asked = {**body, "stream": True}
        async with self.http.post(f"{self.url}{path}", json=asked, **self.how) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            lines = [line async for line in response.content if line.startswith(b"data: {")]
        return [json.loads(line[6:]) for line in lines]

    def script(self, tokens: list[int]) -> None:
        """Let all engines sample these tokens from now on, or their own where there are none."""
        for engine in self.engines.values():
            engine.script = tokens

    async def get(self, path: str) -> Any:
        """The JSON of an answer."""
        async with self.http.get(f"{self.url}{path}", **self.how) as response:
            return await response.json()

    async def until_mesh(self, where: str) -> None:
        """Until the gateway says that the mesh is "there" or "away"."""
        await until_said(
            lambda: self.get("/health"), lambda answer: answer["mesh"] == where, START_S
        )

    async def kill_mesh(self, number: signal.Signals) -> None:
        """All that a request needs of the mesh, by a signal."""
        names = [
            "scheduler",
            *SERVICES,
            *(f"sidecar-{engine_id}" for engine_id in self.urls),
            "nats",
        ]
        children = [self.plane.child(name) for name in names]
        for child in children:
            os.kill(child.pid, number)
        for child in children:
            await child.exited.wait()

    async def start_mesh(self) -> None:
        """Again, after `kill_mesh`."""
        await self.plane.start_nats()
        for name in ("scheduler", *SERVICES):
            await self.plane.start_service(name)
        for engine_id in self.urls:
            await self.start_sidecar(engine_id)

    async def start_sidecar(self, engine_id: str) -> None:
        settings = {
            "TREADLE_SIDECAR_ENGINE_URL": self.urls[engine_id],
            "TREADLE_SIDECAR_PROBE_S": "0",
        }
        await self.plane.start_sidecar(engine_id, settings)


@dataclass(frozen=True)
class Direct:
    """What an engine answers without a gateway. versions: as of meta_info.weight_versions."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[dict[str, Any]]


async def ask_directly(
    http: aiohttp.ClientSession, url: str, context: list[int], new_tokens: int
) -> Direct:
    """Greedy tokens after a context, by the /generate of one engine."""
    sampling = {"max_new_tokens": new_tokens, "temperature": 0.0}
    body = {
        "rid": uuid.uuid4().hex,
        "input_ids": context,
        "sampling_params": sampling,
        "return_logprob": True,
    }
    async with http.post(f"{url}/generate", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    meta = answer["meta_info"]
    entries = meta["output_token_logprobs"]
    return Direct(answer["output_ids"], [entry[0] for entry in entries], meta["weight_versions"])


@asynccontextmanager
async def front_door(
    folder: Path,
    *,
    token_s: float = 0.002,
    teach: Callable[[FakeSglang], object] = id,
    urls: Mapping[str, str] | None = None,
    certificates: Path | None = None,
    **settings: Any,
) -> AsyncIterator[FrontDoor]:
    """A running one. teach: what its fake engines are given before they start. urls: of engines
    that run, by id; None: two fakes. certificates: of the mesh; None: plaintext. settings: of the
    gateway."""
    settings.setdefault("away_after_s", 10.0)  # a slow answer does not mean that the mesh is away
    async with AsyncExitStack() as stack:
        engines = {name: FakeSglang(token_s=token_s) for name in (ENGINES if urls is None else ())}
        for engine in engines.values():
            teach(engine)
            await engine.start()
            stack.push_async_callback(engine.stop)
        urls = {name: engine.url for name, engine in engines.items()} if urls is None else urls
        tree = await stack.enter_async_context(
            ProcessTree(folder / "logs", grace_s=5.0, fork_server=fork_server())
        )
        where = choose_addresses(tree.ports, 0, list(urls))
        plane = ControlPlane(tree, where, folder / "state", certificates=certificates)
        await plane.start_nats()
        for name in ("scheduler", *SERVICES):
            await plane.start_service(name)
        http = f"127.0.0.1:{free_port()}"
        how: dict[str, Any] = {}
        if certificates is not None:
            own_folder = certificates / GATEWAY_FOLDER
            settings["tls_folder"] = str(own_folder)
            context = ssl.create_default_context(cafile=str(own_folder / AUTHORITY))
            how = {"ssl": context, "server_hostname": "gateway.treadle"}
        own = GatewaySettings(
            nats_url=plane.nats_url,
            listen="127.0.0.1:0",
            http_listen=http,
            scheduler=where.scheduler,
            **settings,
        )
        await stack.enter_async_context(serving(own, wire))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        door = FrontDoor(
            f"{'https' if how else 'http'}://{http}",
            how,
            session,
            tree,
            plane,
            engines,
            urls,
            where.scheduler,
        )
        for name in urls:
            await door.start_sidecar(name)
        await until_said(
            lambda: door.get("/health"),
            lambda said: said == {"mesh": "there", "engines": len(urls)},
            START_S,
        )
        yield door


@asynccontextmanager
async def chat_door(folder: Path) -> AsyncIterator[FrontDoor]:
    """A front door with the tokenizer, template and parsers of `fake_chat`."""
    model = write_tokenizer(folder / "model")
    async with front_door(folder, teach=teach_chat, tokenizer=str(model)) as door:
        yield door
