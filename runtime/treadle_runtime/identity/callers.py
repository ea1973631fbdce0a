"""Read the identity in a caller's certificate, and the kinds of callers that an RPC admits."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, cast
from urllib.parse import urlsplit

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from treadle.certificates import Certificate, Certificates
from treadle.common.v1 import access_pb2

from treadle_runtime.errors import Unauthenticated

SCHEME = "treadle"
KINDS = frozenset(
    name.removeprefix("CALLER_").lower() for name, number in access_pb2.Caller.items() if number
)
OF_TENANTS = frozenset({"client", "trainer"})  # kinds of callers that have a tenant
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_NAMES = "x509_subject_alternative_name"  # a property of gRPC's context


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
