"""What each identity of a mesh can do in its NATS: every call of JetStream, and every message that
makes NATS act, on what each other service keeps there."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nats.js.errors
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import KeyValueConfig
from support.conditions import until_said
from support.nats_server import NatsServer, nats_server_binary
from treadle.certificates import NATS_NAME, Certificates
from treadle_cli.certs import (
    FACTS_ACCOUNT,
    HEARS_FACTS,
    KEEPS_STATE,
    PUBLISHES,
    identities,
    make_certificates,
    nats_config,
)
from treadle_runtime.facts import (
    API_OF_ACCOUNT,
    KINDS,
    MAKER,
    POSITIONS,
    STORED_ROOT,
    STREAM,
    SUBJECT_ROOT,
    stream_config,
)
from treadle_runtime.start import find_service

pytestmark = pytest.mark.asyncio(loop_scope="module")
TENANTS = ("acme", "beta")
USERS = sorted(HEARS_FACTS | KEEPS_STATE | PUBLISHES.keys())
IDENTITIES = sorted(identities(TENANTS))
TIMEOUT_S = 5.0
FACTS_BYTES = 1024 * 1024
# What each service keeps under a name of its own, and under a name that several services use.
BUCKETS = {service: (f"treadle_{service}", POSITIONS) for service in sorted(KEEPS_STATE)}
KEY, READER = "key", "reader"
# A name of JetStream's API as it stands in the server's program, e.g. $JS.API.STREAM.INFO.
NAME = re.compile(rb"\$JS\.API((?:\.[A-Z_]{2,}(?![a-z]))+)")


def calls(stream: str, consumer: str, subject: str) -> Iterator[tuple[str, str]]:
    """Each name of the API, and its subject after the prefix, for one stream."""
    for name in (
        *("INFO", "STREAM.NAMES", "STREAM.LIST", "SERVER.REMOVE", "SERVER.EVACUATE"),
        *("META.LEADER.STEPDOWN", "META.RESCUE"),
    ):
        yield name, name
    for verb in (
        *("CREATE", "UPDATE", "INFO", "DELETE", "PURGE", "SNAPSHOT", "RESTORE", "CANCEL_MOVE"),
        *("MSG.GET", "MSG.DELETE", "PEER.REMOVE", "PEER.EVACUATE", "LEADER.STEPDOWN"),
    ):
        yield f"STREAM.{verb}", f"STREAM.{verb}.{stream}"
    for verb in ("NAMES", "LIST"):
        yield f"CONSUMER.{verb}", f"CONSUMER.{verb}.{stream}"
    yield "CONSUMER.CREATE", f"CONSUMER.CREATE.{stream}"
    yield "CONSUMER.CREATE", f"CONSUMER.CREATE.{stream}.made.{subject}"
    for verb in (
        *("CREATE", "DURABLE.CREATE", "INFO", "DELETE", "PAUSE", "UNPIN", "RESET", "MSG.NEXT"),
        *("LEADER.STEPDOWN", "PEER.REMOVE", "PEER.EVACUATE"),
    ):
        yield f"CONSUMER.{verb}", f"CONSUMER.{verb}.{stream}.{consumer}"
    yield "DIRECT.GET", f"DIRECT.GET.{stream}"
    yield "DIRECT.GET", f"DIRECT.GET.{stream}.{subject}"
    for verb in ("PURGE", "STREAM.MOVE", "STREAM.CANCEL_MOVE"):
        for account in (FACTS_ACCOUNT, MAKER):
            yield f"ACCOUNT.{verb}", f"ACCOUNT.{verb}.{account}.{stream}"
            yield f"ACCOUNT.{verb}", f"ACCOUNT.{verb}.{account}"


def bodies(name: str, stream: str, subject: str, other: str) -> Iterator[dict[str, Any]]:
    """Requests that copy `stream`, change it, or have NATS write to `other`, a subject that another
    service's state has."""
    if name in ("STREAM.CREATE", "STREAM.UPDATE"):
        made = {"name": stream, "storage": "memory"}
        for external in ({}, {"external": {"api": "$JS.API", "deliver": other}}):
            yield made | {"mirror": {"name": stream} | external}
            yield made | {"sources": [{"name": stream} | external]}
        external = {"external": {"api": API_OF_ACCOUNT, "deliver": "made"}}
        yield made | {"sources": [{"name": stream} | external]}
        yield made | {"subjects": [subject], "republish": {"src": ">", "dest": other}}
        yield made | {"subjects": [">"], "no_ack": True}
        yield made | {"subjects": ["made"], "subject_transform": {"src": "made", "dest": other}}
        yield made | {"max_msgs": 1, "discard": "old", "subjects": [f"{SUBJECT_ROOT}.>"]}
    elif name.startswith("CONSUMER.") and name.endswith("CREATE"):
        about = {"ack_policy": "explicit", "deliver_policy": "all"}
        for to in ("made", other, f"$JS.API.STREAM.DELETE.{stream}"):
            yield {"stream_name": stream, "config": about | {"deliver_subject": to}}
        yield {"stream_name": stream, "config": about | {"durable_name": READER}}
    elif name == "CONSUMER.MSG.NEXT":
        yield {"batch": 10}
    elif name in ("STREAM.MSG.GET", "DIRECT.GET"):
        yield {"seq": 1}
        yield {"seq": 1, "batch": 10}
        yield {"last_by_subj": subject}
        yield {"multi_last": [">"], "batch": 10}
    elif name == "STREAM.MSG.DELETE":
        yield {"seq": 1}
    elif name == "STREAM.SNAPSHOT":
        yield {"deliver_subject": "made"}
    elif name == "CONSUMER.PAUSE":
        yield {"pause_until": "2999-01-01T00:00:00Z"}
    elif name == "CONSUMER.RESET":
        yield {"seq": 1}
    elif "PEER" in name or name.startswith("SERVER."):
        yield {"peer": "any"}
    else:
        yield {}


def names_of_server() -> set[str]:
    program = Path(nats_server_binary()).read_bytes()
    return {found.decode().lstrip(".") for found in NAME.findall(program)}


class Kept:
    """What each service keeps in NATS, told by a connection of its own; and what it is before and
    after others have tried to read and to change it."""

    def __init__(self, server: NatsServer, certificates: Path) -> None:
        self.server, self.certificates = server, certificates
        self.owners: dict[str, Client] = {}

    @asynccontextmanager
    async def connection(self, identity: str, **options: Any) -> AsyncIterator[Client]:
        context = Certificates(self.certificates / identity).context()
        tls = {"tls": context, "tls_hostname": NATS_NAME, "tls_handshake_first": True}
        client = await nats.connect(self.server.url, **tls, **options)
        try:
            yield client
        finally:
            await client.close()

    async def answer_to(self, identity: str) -> str:
        """What the server says to who connects."""
        address = self.server.url.removeprefix("nats://")
        certificates = Certificates(self.certificates / identity)
        reader, writer = await certificates.open_tls(address, "nats")
        writer.write(b"CONNECT {}\r\nPING\r\n")
        async with asyncio.timeout(TIMEOUT_S):
            await reader.readuntil(b"\r\n")  # what it tells of itself
            said = await reader.readuntil(b"\r\n")
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        return said.decode()

    async def fill(self, service: str) -> None:
        """Leave nothing but a secret in each bucket of a service, with a consumer."""
        await until_said(lambda: self._is_filled(service), bool)

    async def _is_filled(self, service: str) -> bool:
        """Fill the buckets; return False where the server is still removing what was there."""
        stream = self.owners[service].jetstream()
        try:
            for each in await stream.streams_info():
                await stream.delete_stream(str(each.config.name))
            for bucket in BUCKETS[service]:
                store = await stream.create_key_value(KeyValueConfig(bucket, direct=True))
                await store.put(KEY, secret_of(service))
                await stream.add_consumer(f"KV_{bucket}", durable_name=READER)
        except (nats.js.errors.NotFoundError, nats.js.errors.ServerError):
            return False
        return True

    async def publish(self) -> None:
        """A fact of each kind, in the stream that the scheduler makes."""
        maker = self.owners[MAKER]
        await maker.jetstream(prefix=API_OF_ACCOUNT).add_stream(stream_config(FACTS_BYTES, 1))
        for service, kinds in PUBLISHES.items():
            for kind in kinds:
                subject = f"{SUBJECT_ROOT}.{kind}.{service}"
                await self.owners[service].jetstream().publish(subject, secret_of(FACTS_ACCOUNT))

    async def state_of(self, service: str) -> list[object]:
        """All that a service has in its account."""
        stream = self.owners[service].jetstream()
        found: list[object] = []
        for bucket in BUCKETS[service]:
            info = await stream.stream_info(f"KV_{bucket}")
            entry = await (await stream.key_value(bucket)).get(KEY)
            reader = await stream.consumer_info(f"KV_{bucket}", READER)
            found += [info.config, info.state, entry.value, reader.config, reader.delivered]
        found.append(sorted(each.config.name or "" for each in await stream.streams_info()))
        return found

    async def facts(self) -> tuple[object, dict[str, int]]:
        """How the stream of facts is made, and how many facts it has under each subject."""
        maker = self.owners[MAKER].jetstream(prefix=API_OF_ACCOUNT)
        info = await maker.stream_info(STREAM, subjects_filter=">")
        assert info.state.subjects is not None and info.state.consumer_count == 0
        return info.config, info.state.subjects


def secret_of(account: str) -> bytes:
    return f"the-secret-of-{account}".encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Kept]:
    folder = tmp_path_factory.mktemp("accounts")
    certificates = make_certificates(folder / "certificates", TENANTS)
    server = NatsServer(folder / "nats", more=nats_config(certificates / "nats"))
    server.start()
    made = Kept(server, certificates)
    try:
        async with AsyncExitStack() as stack:
            for user in USERS:
                made.owners[user] = await stack.enter_async_context(made.connection(user))
            for service in BUCKETS:
                await made.fill(service)
            await made.publish()
            yield made
    finally:
        server.kill()


async def test_the_calls_that_are_tried_are_all_that_the_server_has() -> None:
    """A server of a later version may have a new one, which belongs into `calls`."""
    of_server = names_of_server()
    tried = {name for name, _ in calls(STREAM, READER, KEY)}

    def is_tried(name: str) -> bool:
        """Also of a part of a name, and of a name behind which another text of the program
        begins."""
        return any(
            each.startswith(name) or (name.startswith(each) and "." not in name[len(each) :])
            for each in tried
        )

    assert len(of_server) > 30
    assert {name for name in of_server if not is_tried(name)} == set()


async def test_every_kind_of_fact_has_one_service_that_publishes_it() -> None:
    kinds = [kind.replace("-", "_") for kinds in PUBLISHES.values() for kind in kinds]
    assert sorted(kinds) == sorted(KINDS)


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_an_identity_has_an_account_only_where_its_service_uses_nats(
    kept: Kept, identity: str
) -> None:
    kind = identity.partition("-")[0]
    is_service = kind not in ("client", "trainer", "operator", "nats")
    uses_nats = is_service and find_service(kind).settings.uses_nats
    assert (identity in USERS) == uses_nats
    assert ("Authorization Violation" in await kept.answer_to(identity)) == (not uses_nats)


@pytest.mark.parametrize("identity", USERS)
async def test_an_identity_asks_of_the_stream_of_facts_what_its_rule_names(
    kept: Kept, identity: str
) -> None:
    allowed = {"STREAM.INFO"}
    allowed |= {"DIRECT.GET"} if identity in HEARS_FACTS else set()
    allowed |= {"STREAM.CREATE", "STREAM.UPDATE"} if identity == MAKER else set()
    client, answered = kept.owners[identity], set()
    for name, subject in calls(STREAM, READER, f"{SUBJECT_ROOT}.{KEY}"):
        try:
            await client.request(f"{API_OF_ACCOUNT}.{subject}", b"{}", timeout=TIMEOUT_S)
            answered.add(name)
        except nats.errors.NoRespondersError:
            pass
    assert answered == allowed


@pytest.mark.parametrize("identity", USERS)
async def test_an_identity_neither_reads_nor_changes_what_others_keep(
    kept: Kept, identity: str
) -> None:
    """It sends every call, as its own JetStream's, as that of the facts' account and as another
    account's, with answers to its own inbox and to subjects of others; and hears all it can."""
    others = [service for service in BUCKETS if service != identity]
    before = [await kept.state_of(other) for other in others]
    config, counts = await kept.facts()
    heard: list[bytes] = []

    async def hear(message: Msg) -> None:
        heard.append(message.data + json.dumps(message.headers).encode())

    async with kept.connection(identity) as client:
        await client.subscribe(">", cb=hear)
        for prefix in ("$JS.API", API_OF_ACCOUNT, f"$JS.{FACTS_ACCOUNT}.API", f"$JS.{MAKER}.API"):
            for bucket in {bucket for other in others for bucket in BUCKETS[other]}:
                key = f"$KV.{bucket}.{KEY}"
                await _send_calls(client, prefix, f"KV_{bucket}", key, key)
            first, other = f"{SUBJECT_ROOT}.{KEY}", f"$KV.treadle_{others[0]}.{KEY}"
            await _send_calls(client, prefix, STREAM, first, other)
        await _send_messages(client, others)
        await client.flush()
        await _settle(heard)
    if identity in BUCKETS:
        await kept.fill(identity)
    assert [await kept.state_of(other) for other in others] == before
    now, counts_now = await kept.facts()
    added = {subject.split(".")[2] for subject in counts_now if subject not in counts}
    assert (now, {subject: counts_now[subject] for subject in counts}) == (config, counts)
    assert added == set(PUBLISHES.get(identity, ()))
    said = b"".join(heard)
    assert b"io.nats.jetstream.api" in said, "its own JetStream answers"
    secrets = [secret_of(other) for other in others]
    secrets += [] if identity in HEARS_FACTS else [secret_of(FACTS_ACCOUNT)]
    for secret in secrets:
        assert secret not in said and base64.b64encode(secret)[:-4] not in said


async def _send_calls(client: Client, prefix: str, stream: str, subject: str, other: str) -> None:
    """Every call on a stream, each with a reply address of its own and with one of others."""
    for name, call in calls(stream, READER, subject):
        for body in bodies(name, stream, subject, other):
            for reply in (client.new_inbox(), other):
                await client.publish(f"{prefix}.{call}", json.dumps(body).encode(), reply=reply)


async def _send_messages(client: Client, others: list[str]) -> None:
    """Messages that are no calls: to the subjects of others' keys, consumers and inboxes, facts of
    every kind, and requests to the server itself."""
    headers: list[Mapping[str, str]] = [
        {"Nats-Msg-Id": "id"},
        {"Nats-Rollup": "all"},
        {"KV-Operation": "PURGE", "Nats-Rollup": "sub"},
        {"Nats-Request-Info": json.dumps({"acc": MAKER, "svc": MAKER})},
    ]
    subjects = [f"{SUBJECT_ROOT}.{kind.replace('_', '-')}.new" for kind in sorted(KINDS)]
    subjects += [f"{STORED_ROOT}.plan-made.new", f"$JS.ACK.{STREAM}.scheduler.1.1.1.1.0"]
    subjects += [f"_INBOX.treadle-{other}.{KEY}" for other in others]
    for bucket in {bucket for other in others for bucket in BUCKETS[other]}:
        subjects += [f"$KV.{bucket}.{KEY}", f"$JS.ACK.KV_{bucket}.{READER}.1.1.1.1.0"]
    for what in ("STATSZ", "VARZ", "CONNZ", "ROUTEZ", "SUBSZ", "JSZ", "ACCOUNTZ", "ACCSTATZ"):
        subjects += [f"$SYS.REQ.SERVER.PING.{what}", f"$SYS.REQ.ACCOUNT.{MAKER}.{what}"]
    subjects += [f"$SYS.REQ.ACCOUNT.{FACTS_ACCOUNT}.SUBSZ", "$SYS.REQ.SERVER.any.RELOAD"]
    for subject in subjects:
        await client.publish(subject, b"forged", reply=client.new_inbox())
        for each in headers:
            await client.publish(subject, b"forged", headers=dict(each))


async def _settle(heard: list[bytes]) -> None:
    """Wait until nothing comes any more: what NATS does for a caller is done then."""
    count = -1
    while count != len(heard):
        count = len(heard)
        await asyncio.sleep(0.1)
