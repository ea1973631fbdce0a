"""A whole mesh with certificates: a real nats-server and real services as processes, before fake
engines."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import grpc.aio
import nats
import treadle
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from support.conditions import until_said
from support.fake_sglang import FakeSglang, fake_sglang
from support.mesh_in_process import QUICK
from support.processes import fork_server
from treadle.certificates import NATS_NAME, Certificates, open_channel
from treadle.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from treadle_cli.certs import make_certificates
from treadle_cli.mesh.processes import ProcessTree
from treadle_cli.mesh.services import Addresses, ControlPlane, choose_addresses
from treadle_runtime.identity import Sealer
from treadle_scheduler.driver import POLICY_KEY, MeshRecord, decode
from treadle_scheduler.lease import BUCKET

SERVICES = {  # of the protos, and who answers
    "treadle.engine.v1.EngineService": "sidecar",
    "treadle.migrator.v1.MigratorService": "migrator",
    "treadle.placement.v1.PlacementService": "placement",
    "treadle.predictor.v1.PredictorService": "predictor",
    "treadle.rollout.v1.RolloutService": "rollout",
    "treadle.scheduler.v1.SchedulerService": "scheduler",
    "treadle.tools.v1.RewardsService": "tools",
    "treadle.tools.v1.ToolsService": "tools",
}
TENANTS = ("acme", "beta")
ANSWER_S = 60.0
ENGINES = ("e0", "e1")


def rpcs() -> list[MethodDescriptor]:
    """All of the protos, but those of a process that is no service (`resources`)."""
    return [rpc for rpc in every_rpc() if rpc.containing_service.name != "ResourceService"]


def every_rpc() -> list[MethodDescriptor]:
    """All of the protos."""
    folder = Path(treadle.__file__).parents[1]
    stubs = sorted(
        path.relative_to(folder).with_suffix("") for path in folder.rglob("treadle/**/*_pb2.py")
    )
    files = [import_module(".".join(stub.parts)).DESCRIPTOR for stub in stubs]
    services = [service for file in files for service in file.services_by_name.values()]
    return [rpc for service in services for rpc in service.methods]


@dataclass
class SecureMesh:
    """certificates: a folder for each identity."""

    tree: ProcessTree
    plane: ControlPlane
    where: Addresses
    engines: dict[str, FakeSglang]
    certificates: Path

    def address(self, service: str) -> str:
        """host:port"""
        return self.where.sidecars["e0"] if service == "sidecar" else self.where.services[service]

    def client(self, identity: str, **options: object) -> treadle.Client:
        """Of an identity, e.g. client-acme."""
        given = {"retry": QUICK, "seed": 0, "tls_folder": self.certificates / identity, **options}
        return treadle.Client(self.where.scheduler, **given)  # type: ignore[arg-type]

    def channel(self, identity: str | Path, service: str) -> grpc.aio.Channel:
        """To a service, as an identity or with the certificates of another folder."""
        return open_channel(
            self.address(service), service, Certificates(self.certificates / identity)
        )

    async def start_sidecar(self, engine_id: str) -> None:
        """The first time or again."""
        settings = {
            "TREADLE_SIDECAR_ENGINE_URL": self.engines[engine_id].url,
            "TREADLE_SIDECAR_PROBE_S": "0",
        }
        await self.plane.start_sidecar(engine_id, settings)

    async def restart(self, name: str) -> None:
        """A service, or the sidecar of an engine: SIGTERM, its drain, and the next process at the
        same address."""
        await self.tree.stop(
            [self.plane.child(f"sidecar-{name}" if name in self.engines else name)]
        )
        await (self.start_sidecar(name) if name in self.engines else self.plane.start_service(name))

    async def sealer(self) -> Sealer:
        """Seals as the scheduler does, with the key that it keeps in its bucket."""
        context = Certificates(self.certificates / "scheduler").context()
        tls = {"tls": context, "tls_hostname": NATS_NAME, "tls_handshake_first": True}
        client = await nats.connect(
            self.plane.nats_url, inbox_prefix="_INBOX.treadle-scheduler", **tls
        )
        try:
            bucket = await client.jetstream().key_value(BUCKET)
            stored = (await bucket.get(POLICY_KEY)).value
        finally:
            await client.close()
        assert stored is not None
        return Sealer(bytes.fromhex(decode(MeshRecord, stored).ticket_key))

    async def registered(self) -> list[str]:
        """The engines that the scheduler knows."""
        async with self.channel("operator", "scheduler") as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            answer = await stub.ListEngines(scheduler_pb2.ListEnginesRequest(), timeout=ANSWER_S)
        return [each.info.engine_id for each in answer.engines]


async def call(channel: grpc.aio.Channel, rpc: MethodDescriptor, request: Message) -> object:
    """The answer, or the first message of a stream. Raises AioRpcError."""
    path = f"/{rpc.containing_service.full_name}/{rpc.name}"
    write, read = type(request).SerializeToString, GetMessageClass(rpc.output_type).FromString
    if not rpc.server_streaming:
        return await channel.unary_unary(path, write, read)(request, timeout=ANSWER_S)
    stream = channel.unary_stream(path, write, read)(request, timeout=ANSWER_S)
    answer = await stream.read()
    stream.cancel()
    return answer


@asynccontextmanager
async def secure_mesh(
    folder: Path, *, token_s: float = 0.002, arguments: Mapping[str, object] = MappingProxyType({})
) -> AsyncIterator[SecureMesh]:
    """A running one, whose engines e0 and e1 are registered. arguments: of SGLang, as its
    /server_info tells them."""
    certificates = make_certificates(folder / "certificates", TENANTS)
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(fake_sglang(token_s=token_s)) for name in ENGINES
        }
        for engine in engines.values():
            engine.arguments.update(arguments)
        tree = await stack.enter_async_context(
            ProcessTree(folder / "logs", grace_s=5.0, fork_server=fork_server())
        )
        where = choose_addresses(tree.ports, 0, ENGINES)
        plane = ControlPlane(tree, where, folder / "state", certificates=certificates)
        mesh = SecureMesh(tree, plane, where, engines, certificates)
        await plane.start(together=())  # tests kill one service at a time
        async with asyncio.TaskGroup() as group:
            for name in engines:
                group.create_task(mesh.start_sidecar(name))
        await until_said(mesh.registered, lambda engines: len(engines) == len(ENGINES))
        yield mesh
