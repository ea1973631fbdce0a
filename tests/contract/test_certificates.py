"""Certificates are read again when they change: by gRPC's channels and servers, and by the
connection to NATS."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cryptography import x509
from nats import errors as nats_errors
from nats.aio.client import Client
from support.conditions import until, until_said
from support.nats_server import NatsServer
from support.processes import free_port
from treadle.certificates import NATS_NAME, Certificates, open_channel
from treadle.telemetry.v1.facts_pb2 import EngineLost, Fact, StepQueued, StepRef, TrajectoryClosed
from treadle_cli.certs import Authority, Identity, identities, make_certificates, nats_config
from treadle_runtime.bus import Bus, bus_name, open_bus
from treadle_runtime.errors import StartError
from treadle_runtime.facts import make_fact
from treadle_runtime.identity import server_credentials

PATH, STREAM = "/test.Echo/Serial", "/test.Echo/Serials"
TIMEOUT_S = 10.0
# A server in a process of its own, which is told its folder of certificates and prints its port.
SERVER = """
import asyncio, pathlib, sys
import grpc.aio
from treadle.certificates import Certificates
from treadle_runtime.identity import server_credentials

async def serve():
    server = grpc.aio.server()
    credentials = server_credentials(Certificates(pathlib.Path(sys.argv[1])))
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()

asyncio.run(serve())
"""


def serial(folder: Path) -> int:
    return x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes()).serial_number


async def serial_of(_: bytes, context: Any) -> bytes:
    """Of the caller's certificate."""
    [pem] = context.auth_context()["x509_pem_cert"]
    return str(x509.load_pem_x509_certificate(pem).serial_number).encode()


@asynccontextmanager
async def echo(folder: Path) -> AsyncIterator[str]:
    """A server that says the serial number of each caller's certificate, once or until the caller
    leaves."""

    async def serials_of(request: bytes, context: Any) -> AsyncIterator[bytes]:
        while True:
            yield await serial_of(request, context)
            await asyncio.sleep(0.01)

    handlers: Any = {
        "Serial": grpc.unary_unary_rpc_method_handler(serial_of),
        "Serials": grpc.unary_stream_rpc_method_handler(serials_of),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    port = server.add_secure_port("127.0.0.1:0", server_credentials(Certificates(folder)))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_calls_begin_with_the_new_certificate_and_end_with_the_old(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    client = made / "operator"
    async with (
        echo(made / "scheduler") as address,
        open_channel(address, "scheduler", Certificates(client)) as channel,
    ):
        ask: Any = channel.unary_unary(PATH)
        watch: Any = channel.unary_stream(STREAM)
        before = serial(client)
        stream = watch(b"")
        assert int(await ask(b"", timeout=TIMEOUT_S)) == before == int(await stream.read())
        make_certificates(tmp_path)
        after = serial(client)
        assert after != before
        await until_said(lambda: ask(b"", timeout=TIMEOUT_S), lambda said: int(said) == after)
        assert int(await stream.read()) == before
        stream.cancel()


async def test_a_server_presents_its_new_certificate_to_new_connections(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    certificates = Certificates(made / "operator")

    async def presented(address: str) -> int:
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(
            host, int(port), ssl=certificates.context(), server_hostname="scheduler.treadle"
        )
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return x509.load_der_x509_certificate(found).serial_number

    async with echo(made / "scheduler") as address:
        assert await presented(address) == serial(made / "scheduler")
        make_certificates(tmp_path)
        await until_said(
            lambda: presented(address), lambda said: said == serial(made / "scheduler")
        )


async def test_a_server_lives_through_many_handshakes_at_once(tmp_path: Path) -> None:
    """As after a restart, when every client connects again. gRPC must not crash."""
    made = make_certificates(tmp_path)
    context = Certificates(made / "operator").context()
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVER, str(made / "scheduler"), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        port = int(await server.stdout.readline())

        async def connect() -> None:
            for _ in range(100):
                name = "scheduler.treadle"
                _, writer = await asyncio.open_connection(
                    "127.0.0.1", port, ssl=context, server_hostname=name
                )
                writer.transport.abort()

        await asyncio.gather(*(connect() for _ in range(32)))
        assert server.returncode is None
        async with open_channel(
            f"127.0.0.1:{port}", "scheduler", Certificates(made / "operator")
        ) as channel:
            await asyncio.wait_for(channel.channel_ready(), TIMEOUT_S)
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


async def test_a_key_that_does_not_fit_yet_leaves_the_certificate_before(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path) / "operator"
    certificates = Certificates(folder)
    before = certificates.current()
    key = (folder / "tls.key").read_bytes()
    (folder / "tls.key").write_bytes((tmp_path / "scheduler" / "tls.key").read_bytes())
    certificates._look_at = 0.0
    assert certificates.current() is before
    (folder / "tls.key").write_bytes(key)
    certificates._look_at = 0.0
    assert certificates.current() is not before
    with pytest.raises(ValueError, match=r"tls\.crt: No such file"):
        Certificates(tmp_path / "nothing")


@pytest.fixture
def nats(tmp_path: Path) -> Any:
    make_certificates(tmp_path / "certificates")
    server = NatsServer(tmp_path / "nats", more=nats_config(tmp_path / "certificates" / "nats"))
    server.start()
    yield server
    server.kill()


async def test_the_bus_comes_back_to_a_nats_server_of_another_authority(
    nats: NatsServer, tmp_path: Path
) -> None:
    """Between, the authority was replaced, and every certificate with it."""
    folder = tmp_path / "certificates"
    async with open_bus(
        nats.url, "treadle-scheduler", certificates=Certificates(folder / "scheduler")
    ) as bus:
        store = await bus.key_value("treadle_trajectories")
        await store.put("key", b"before")
        nats.kill()
        (folder / "ca.key").unlink()
        make_certificates(folder)
        nats.start()

        async def read() -> bytes | None:
            try:
                return (await store.get("key")).value
            except (nats_errors.Error, OSError):
                return None

        assert await until_said(read, lambda said: said is not None) == b"before"


async def test_services_of_a_secure_mesh_hear_each_other_s_facts(
    nats: NatsServer, tmp_path: Path
) -> None:
    """Each has an account of its own. Rollout starts before the scheduler, waits until that has made
    the stream, and goes on where it was when it starts again."""
    folder, heard, listens = tmp_path / "certificates", list[str](), asyncio.Event()

    def connect(service: str, timeout_s: float = TIMEOUT_S) -> AbstractAsyncContextManager[Bus]:
        own = Certificates(folder / service)
        return open_bus(nats.url, bus_name(service), timeout_s=timeout_s, certificates=own)

    async def hear(fact: Fact) -> None:
        heard.append(fact.fact_id)

    async def close_trajectory(bus: Bus, name: str) -> None:
        await bus.publish(
            Fact(fact_id=name, trajectory_closed=TrajectoryClosed(trajectory_id=name))
        )
        await bus.flush()

    async def listen(until_heard: int) -> None:
        async with connect("rollout") as rollout:
            await rollout.subscribe(["trajectory_closed"], hear, durable="rollout")
            listens.set()
            await until(lambda: len(heard) == until_heard)

    with pytest.raises(StartError, match="the scheduler has not made the stream of facts"):
        async with connect("rollout", timeout_s=1.0):
            pass
    async with asyncio.TaskGroup() as group:
        first = group.create_task(listen(1))
        async with connect("scheduler") as scheduler:
            await listens.wait()
            await close_trajectory(scheduler, "1")
            await first
            await close_trajectory(scheduler, "2")
            second = group.create_task(listen(3))
            await close_trajectory(scheduler, "3")
            await second
    assert heard == ["1", "2", "3"]


def refused(tmp_path: Path) -> tuple[Certificates, Certificates]:
    """Certificates that NATS refuses: of another authority, and of a client."""
    made = tmp_path / "certificates"
    Authority.create().issue(tmp_path / "foreign", identities(())["scheduler"], timedelta(days=1))
    (tmp_path / "foreign" / "ca.crt").write_bytes((made / "ca.crt").read_bytes())
    Authority.at(made).issue(tmp_path / "client", Identity("treadle://client/a"), timedelta(days=1))
    return Certificates(tmp_path / "foreign"), Certificates(tmp_path / "client")


async def test_nats_takes_nobody_without_a_certificate_of_its_authority(
    nats: NatsServer, tmp_path: Path
) -> None:
    for certificates in (None, *refused(tmp_path)):
        with pytest.raises(StartError, match="did not answer"):
            async with open_bus(
                nats.url, "treadle-scheduler", timeout_s=1.0, certificates=certificates
            ):
                pass


async def test_services_that_nats_refuses_all_give_up(nats: NatsServer, tmp_path: Path) -> None:
    """One in fifty connections whose handshake failed was never reported closed, and its bus waited
    for ever."""
    both = refused(tmp_path)

    async def give_up(certificates: Certificates) -> None:
        with pytest.raises(StartError, match="did not answer"):
            async with open_bus(
                nats.url, "treadle-scheduler", timeout_s=1.0, certificates=certificates
            ):
                pass

    async with asyncio.timeout(60.0), asyncio.TaskGroup() as group:
        for number in range(96):
            group.create_task(give_up(both[number % 2]))


@pytest.mark.parametrize("joins", ["nats", "scheduler", "sidecar", "gateway-default"])
async def test_only_the_certificate_of_a_nats_server_joins_a_cluster(
    joins: str, tmp_path: Path
) -> None:
    """The server of a pod, and another one, whose account of facts is open. A server of the cluster
    sees all accounts."""
    certificates = make_certificates(tmp_path / "certificates")
    name = Identity("", (NATS_NAME, "localhost"))  # as in the routes here
    Authority.at(certificates).issue(certificates / "nats", name, timedelta(days=1))
    route, own = free_port(), free_port()
    in_pod = nats_config(certificates / "nats", in_pod=True).replace("8222", "-1")
    cluster = ("--cluster_name", "c", "--routes", f"nats://localhost:{route}", "--cluster")
    mine = (*cluster, f"nats://127.0.0.1:{route}", "--name", "a")
    server = NatsServer(tmp_path / "a", more=in_pod, arguments=mine)
    files = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    tls = "\n".join(f'{what}_file: "{certificates / joins / file}"' for what, file in files.items())
    foreign = f"cluster {{ tls {{ {tls} }} }}\naccounts {{ facts {{ users: [{{user: u, password: p}}] }} }}"
    other = NatsServer(
        tmp_path / "b", more=foreign, arguments=(*cluster, f"nats://127.0.0.1:{own}", "--name", "b")
    )
    heard: list[str] = []

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    server.start()
    other.start()
    context = Certificates(certificates / "scheduler").context()
    secure: dict[str, Any] = {
        "tls": context,
        "tls_hostname": NATS_NAME,
        "tls_handshake_first": True,
    }
    try:
        client, scheduler = Client(), Client()
        await client.connect(other.url, user="u", password="p")
        await scheduler.connect(server.url, **secure)
        await client.subscribe("treadle.facts.>", cb=hear)

        async def has_joined_or_not() -> bool:
            await scheduler.publish("treadle.facts.plan-made.p", b"")
            return bool(heard) or "authentication error" in (tmp_path / "a" / "log").read_text()

        await until_said(has_joined_or_not, lambda said: said)
        await client.close()
        await scheduler.close()
    finally:
        server.kill()
        other.kill()
    assert bool(heard) == (joins == "nats")


@pytest.mark.full
async def test_services_have_their_accounts_on_three_servers(tmp_path: Path) -> None:
    """As pods with the components mtls and nats-cluster. Each service is connected to another
    server; one server dies."""
    certificates = make_certificates(tmp_path / "certificates")
    name = Identity("", (NATS_NAME, "localhost"))  # as in the routes here
    Authority.at(certificates).issue(certificates / "nats", name, timedelta(days=1))
    in_pod = nats_config(certificates / "nats", in_pod=True).replace("8222", "-1")
    ports = [free_port() for _ in range(3)]
    routes = ",".join(f"nats://localhost:{port}" for port in ports)
    common = ("--cluster_name", "c", "--routes", routes, "--cluster")
    servers = [
        NatsServer(
            tmp_path / str(port),
            more=in_pod,
            arguments=(*common, f"nats://127.0.0.1:{port}", "--name", f"n{port}"),
        )
        for port in ports
    ]
    heard: list[str] = []

    async def hear(fact: Fact) -> None:
        heard.append(fact.engine_lost.engine_id or fact.step_queued.step.engine_id)

    def connect(service: str, first: int) -> AbstractAsyncContextManager[Bus]:
        urls = ",".join(servers[(first + step) % 3].url for step in range(3))
        own = Certificates(certificates / service)
        return open_bus(urls, bus_name(service), replicas=3, certificates=own)

    try:
        for server in servers:
            server.start()
        async with (
            connect("scheduler", 0) as scheduler,
            connect("sidecar", 1) as sidecar,
            connect("rollout", 2) as rollout,
        ):
            bucket = await scheduler.key_value("treadle_trajectories")

            async def put() -> bool:
                with suppress(nats_errors.Error):  # the servers choose who leads
                    return bool(await bucket.put("key", b"value"))
                return False

            assert await until_said(put, lambda said: said)
            await rollout.subscribe(["engine_lost", "step_queued"], hear, durable="rollout")
            for number in range(2):
                await scheduler.publish(
                    make_fact("t", engine_lost=EngineLost(engine_id=f"a{number}"))
                )
                step = StepRef(engine_id=f"b{number}", trajectory_id="t")
                await sidecar.publish(make_fact("t", step_queued=StepQueued(step=step)))
                await scheduler.flush()
                await sidecar.flush()
                await until(lambda: len(heard) == 2 * (number + 1), 60.0)  # noqa: B023
                if number == 0:
                    servers[0].kill()
            assert sorted(heard) == ["a0", "a1", "b0", "b1"]
    finally:
        for server in servers:
            server.kill()
