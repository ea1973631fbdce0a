"""Identify callers, check what each may call and what belongs to its tenant, and seal tickets.

The rules stand in the protos (treadle/common/v1/access.proto) and are read from the descriptors: an
RPC without a rule admits nobody. No service keeps a list of tenants. A mesh without certificates
knows neither callers nor tenants, and refuses none (ADR 0047).

A caller is whom its certificate names. A `Border` marks the names in its requests with its tenant
(`fields.TENANT_MARK`), and limits the calls of each tenant. A ticket travels through its client, so
the scheduler seals it: a seal is an HMAC-SHA256 of the ticket with a key of its engine. Scheduler
and sidecar alone know that key: it is made from the mesh's own key and the engine's name, and the
sidecar receives it when it registers the engine. So it stays the same when either of them starts
again, and a ticket of one engine is refused by every other.
"""

import hmac
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, cast
from urllib.parse import urlsplit

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from treadle.certificates import Certificate, Certificates
from treadle.common.v1 import access_pb2
from treadle.common.v1.ticket_pb2 import Ticket

from treadle_runtime.errors import PermissionDenied, ResourceExhausted, Unauthenticated, Unavailable
from treadle_runtime.fields import TENANT_MARK, owner_of

SCHEME = "treadle"
KINDS = frozenset(
    name.removeprefix("CALLER_").lower() for name, number in access_pb2.Caller.items() if number
)
OF_TENANTS = frozenset({"client", "trainer"})  # kinds of callers that have a tenant
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_NAMES = "x509_subject_alternative_name"  # a property of gRPC's context

FULL_RETRY_S = 0.1

HASH = "sha256"
RETRY_NO_KEY_S = 0.5  # a sidecar registers within a second of its start


@dataclass(frozen=True)
class Caller:
    """Identity of a caller. kind: client, trainer, operator or a service. tenant: the client's or
    trainer's; else empty."""

    kind: str
    tenant: str


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return credentials of a server that knows each caller by its certificate. New connections get
    the certificate of the moment."""

    given = certificates.current()
    lock = Lock()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return a new certificate, or None to keep the present one; gRPC calls this at each new
        connection, on a thread of its own. With a configuration it frees what other handshakes
        still use, which can crash the process (also 1.85.3)."""
        nonlocal given
        with lock:
            certificate = certificates.current()
            if certificate is given:
                return None
            given = certificate
            return _configuration(certificate)

    # the stubs do not allow None
    fetch_known = cast("Callable[[], grpc.ServerCertificateConfiguration]", fetch)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(given), fetch_known, require_client_authentication=True
    )


def _configuration(certificate: Certificate) -> grpc.ServerCertificateConfiguration:
    pair = certificate.key, certificate.chain
    return grpc.ssl_server_certificate_configuration([pair], certificate.authorities)


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """Return the caller that the certificate of a call names. Raises Unauthenticated NO_IDENTITY
    where it names none."""
    return _caller(tuple(context.auth_context().get(_NAMES, ())))


def tenant_of(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """Return the tenant to which an answer is confined; None where the caller has none, and sees
    all, as in plaintext."""
    encrypted = context.auth_context().get("transport_security_type") == [b"ssl"]
    return (caller_of(context).tenant or None) if encrypted else None


@cache
def _caller(names: tuple[bytes, ...]) -> Caller:
    uris = [
        name.decode(errors="replace") for name in names if name.startswith(f"{SCHEME}://".encode())
    ]
    caller = caller_in(uris[0]) if len(uris) == 1 else None
    if caller is None:
        what = (
            f"must name one caller by a URI, {SCHEME}://client/TENANT or {SCHEME}://SERVICE, "
            f"names {uris or 'none'}"
        )
        raise Unauthenticated("NO_IDENTITY", f"the certificate {what}")
    return caller


def caller_in(uri: str) -> Caller | None:
    """Return the caller that a certificate's URI names, or None where it names none."""
    parts = urlsplit(uri)
    kind, tenant = parts.netloc, parts.path.removeprefix("/")
    fits = _TENANT.fullmatch(tenant) if kind in OF_TENANTS else not tenant
    return Caller(kind, tenant) if parts.scheme == SCHEME and kind in KINDS and fits else None


def may_call(method: str) -> frozenset[str]:
    """Return the kinds of callers that the RPC `/package.Service/Method` admits."""
    service, _, name = method.lstrip("/").partition("/")
    rpc = descriptor_pool.Default().FindServiceByName(service).FindMethodByName(name)
    access = rpc.GetOptions().Extensions[access_pb2.access]
    return frozenset(
        access_pb2.Caller.Name(each).removeprefix("CALLER_").lower() for each in access.callers
    )


class Border:
    """Check of the callers of one RPC and of the names in their requests."""

    def __init__(self, method: str, limits: "TenantLimits") -> None:
        self._method, self._limits = method, limits
        self._kinds = may_call(method)

    @contextmanager
    def admit(self, caller: Caller, request: object, now: float) -> Iterator[None]:
        """Put the caller's tenant before the names in the request that have none, and count the
        call of the block.

        Raises PermissionDenied CALLER_NOT_ALLOWED, or OF_ANOTHER_TENANT for a name of another
        tenant, and ResourceExhausted. A request that is no message was refused before.
        """
        if caller.kind not in self._kinds:
            allowed = ", ".join(sorted(self._kinds)) or "nobody"
            message = f"{self._method} is for {allowed}; this certificate is of a {caller.kind}"
            raise PermissionDenied("CALLER_NOT_ALLOWED", message, caller=caller.kind)
        if caller.tenant and isinstance(request, Message):
            for own in owned_names(request.DESCRIPTOR):
                own(request, caller.tenant, "")
        with self._limits.admit(caller.tenant, now):
            yield


class TenantLimits:
    """Limits on the calls of each tenant to one process. calls_per_s: the average rate, with a
    second's worth at once. calls: most that run at once, streams included. 0: no limit."""

    def __init__(self, calls_per_s: float, calls: int) -> None:
        self._calls_per_s, self._most = calls_per_s, calls
        self._running: Counter[str] = Counter()
        # calls that a tenant may make at once, as of a time
        self._left: dict[str, tuple[float, float]] = {}

    @contextmanager
    def admit(self, tenant: str, now: float) -> Iterator[None]:
        """Count the call of the block. Raises ResourceExhausted TENANT_CALLS or TENANT_RATE, with a
        pause."""
        if not tenant:
            yield
            return
        if self._most and self._running[tenant] >= self._most:
            said = (
                f"tenant {tenant!r} has {self._most} calls here, which is all that it may have "
                "at once"
            )
            raise ResourceExhausted("TENANT_CALLS", said, retry_after_s=FULL_RETRY_S)
        if self._calls_per_s:
            left, since = self._left.get(tenant, (max(1.0, self._calls_per_s), now))
            left = min(max(1.0, self._calls_per_s), left + (now - since) * self._calls_per_s)
            if left < 1.0:
                said = f"tenant {tenant!r} may make {self._calls_per_s:g} calls a second here"
                raise ResourceExhausted(
                    "TENANT_RATE", said, retry_after_s=(1.0 - left) / self._calls_per_s
                )
            self._left[tenant] = left - 1.0, now
        self._running[tenant] += 1
        try:
            yield
        finally:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]


Own = Callable[[Message, str, str], None]


@cache
def owned_names(kind: Descriptor) -> tuple[Own, ...]:
    """Return functions that put a tenant before the names in a message, one for each field that
    names something owned."""
    return tuple(_owned_names(kind))


def _owned_names(kind: Descriptor) -> Iterator[Own]:
    for field in kind.fields:
        if field.GetOptions().Extensions[access_pb2.owned]:
            yield _repeated(field.name) if field.is_repeated else _single(field.name)
        elif (part := field.message_type) is not None and (inner := owned_names(part)):
            yield _nested(field.name, field.is_repeated, inner)


def _single(name: str) -> Own:
    def own(message: Message, tenant: str, path: str) -> None:
        if value := getattr(message, name):
            setattr(message, name, _owned(value, tenant, path + name))

    return own


def _repeated(name: str) -> Own:
    def own(message: Message, tenant: str, path: str) -> None:
        values = getattr(message, name)
        values[:] = [
            _owned(value, tenant, f"{path}{name}[{index}]") for index, value in enumerate(values)
        ]

    return own


def _nested(name: str, repeated: bool, inner: tuple[Own, ...]) -> Own:
    def own(message: Message, tenant: str, path: str) -> None:
        if repeated:
            parts = [
                (f"{path}{name}[{index}].", part)
                for index, part in enumerate(getattr(message, name))
            ]
        else:
            parts = [(f"{path}{name}.", getattr(message, name))] if message.HasField(name) else []
        for where, part in parts:
            for each in inner:
                each(part, tenant, where)

    return own


def _owned(value: str, tenant: str, field: str) -> str:
    owner = owner_of(value)
    if owner == tenant:
        return value
    if owner:
        said = (
            f"{field}: {value[:64]!r} belongs to tenant {owner[:64]!r}; this certificate is of "
            f"tenant {tenant!r}"
        )
        raise PermissionDenied("OF_ANOTHER_TENANT", said, field=field)
    return f"{tenant}{TENANT_MARK}{value}"


class Sealer:
    """Maker of seals on tickets. mesh_key: at least 32 bytes, secret."""

    def __init__(self, mesh_key: bytes) -> None:
        self._mesh_key = mesh_key
        self.key_of = cache(self._key_of)

    def seal(self, ticket: Ticket) -> None:
        """Seal all other fields of the ticket, for its engine."""
        ticket.seal = _seal_of(ticket, self.key_of(ticket.engine_id))

    def _key_of(self, engine_id: str) -> bytes:
        return hmac.digest(self._mesh_key, engine_id.encode(), HASH)


class SealCheck:
    """Verifier of tickets that were sealed for one engine. key: the engine's; None until it is
    registered."""

    def __init__(self) -> None:
        self.key: bytes | None = None

    def check(self, ticket: Ticket) -> None:
        """Raise PermissionDenied SEAL_REFUSED for a ticket that the scheduler has not made as it
        is, and Unavailable ENGINE_NOT_REGISTERED."""
        if self.key is None:
            said = "the scheduler does not know this engine yet; schedule the step again"
            raise Unavailable("ENGINE_NOT_REGISTERED", said, retry_after_s=RETRY_NO_KEY_S)
        if not hmac.compare_digest(_seal_of(ticket, self.key).encode(), ticket.seal.encode()):
            said = (
                "Ticket.seal: the scheduler of this mesh has not made this ticket, or not for "
                "this engine"
            )
            raise PermissionDenied("SEAL_REFUSED", said)


def _seal_of(ticket: Ticket, key: bytes) -> str:
    said = Ticket()
    said.CopyFrom(ticket)
    said.ClearField("seal")
    return hmac.digest(key, said.SerializeToString(deterministic=True), HASH).hex()
