"""Certificates are read again when they change: by gRPC's channels and servers, and by the
connection to NATS."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cryptography import x509
from nats import errors as nats_errors
from support.conditions import until_said
from support.nats_server import NatsServer
from treadle.certificates import Certificates, open_channel
from treadle_cli.certs import Authority, Identity, identities, make_certificates, nats_config
from treadle_runtime.bus import open_bus
from treadle_runtime.errors import StartError
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


async def test_a_service_reaches_its_own_buckets_and_facts_alone(
    nats: NatsServer, tmp_path: Path
) -> None:
    folder = tmp_path / "certificates"
    async with (
        open_bus(
            nats.url, "treadle-scheduler", certificates=Certificates(folder / "scheduler")
        ) as scheduler,
        open_bus(
            nats.url, "treadle-sidecar", certificates=Certificates(folder / "sidecar")
        ) as sidecar,
        open_bus(
            nats.url, "treadle-rollout", certificates=Certificates(folder / "rollout")
        ) as rollout,
    ):
        store = await scheduler.key_value("treadle_trajectories")
        await store.put("t", b"state")
        for other in (sidecar, rollout):
            for subject in (
                "$KV.treadle_trajectories.t",
                "$JS.API.STREAM.DELETE.KV_treadle_trajectories",
                "$JS.API.STREAM.PURGE.TREADLE_FACTS",
                "treadle.facts.trajectory-closed.t",
                "$JS.API.DIRECT.GET.KV_treadle_trajectories.$KV.treadle_trajectories.t",
            ):
                with pytest.raises(nats_errors.TimeoutError):
                    await other._client.request(subject, b"{}", timeout=0.3)
        assert (await store.get("t")).value == b"state"
        heard: list[str] = []

        async def hear(message: Any) -> None:
            heard.append(message.subject)

        for subject in ("_INBOX.treadle-scheduler.>", "treadle.deliver.>", "$KV.>"):
            await rollout._client.subscribe(subject, cb=hear)
        await store.put("t", b"again")
        await store.get("t")
        await rollout._client.flush()
        assert heard == []


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
