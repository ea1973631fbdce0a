"""Read the certificate by which a process is known in a mesh, and open channels that present it.

A folder holds `tls.crt`, `tls.key` and `ca.crt` (PEM, named as in a Kubernetes TLS secret). It is
read again when its files change, so that certificates are replaced while processes run: a new
connection presents the new one, and running calls end on the connection that they began on. A
server proves its service by the DNS name `SERVICE.treadle`, wherever it listens; a caller proves
who it is by a URI, `treadle://client/TENANT` (protos/treadle/common/v1/access.proto lists all
kinds).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from treadle.errors import TreadleError

FOLDER_VARIABLE = "TREADLE_TLS_FOLDER"
CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
NATS_NAME = "nats.treadle"  # DNS name of a NATS server
LOOK_EVERY_S = 1.0  # between two checks of the folder for new files
# how long calls may still run on a connection with the certificate before
LAST_CALLS_S = 24 * 3600.0
HANDSHAKE_S = 5.0
# a server that is ending closes a connection too, but not twice
HANDSHAKES, HANDSHAKE_PAUSE_S = (2, 0.3)
Options = tuple[tuple[str, int | str], ...]

_log = logging.getLogger("treadle")


@dataclass(frozen=True, eq=False)
class Certificate:
    """Certificate in PEM: the private key, the certificate with those between it and the authority,
    and the authorities to trust."""

    key: bytes
    chain: bytes
    authorities: bytes


class Certificates:
    """The certificate files of one folder. Raises ValueError that names the wrong file and its
    fault."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._seen = self._stamp()
        self._current = self._read()
        self._look_at = time.monotonic() + LOOK_EVERY_S

    @classmethod
    def of_environment(cls) -> Certificates | None:
        """Read the folder TREADLE_TLS_FOLDER; return None where it is not set."""
        folder = os.environ.get(FOLDER_VARIABLE, "")
        return cls(folder) if folder else None

    def current(self) -> Certificate:
        """Return the same object until the files change. Where the new ones do not fit together, as
        while they are being written, the ones before stay. Any thread may call."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            try:
                stamp = self._stamp()
                if stamp != self._seen:
                    self._current, self._seen = self._read(), stamp
            except ValueError as error:
                _log.warning("the certificate before stays in use: %s", error)
        return self._current

    def context(self) -> ssl.SSLContext:
        """Make the TLS context for a connection that is not gRPC's."""
        context = ssl.create_default_context(cafile=str(self.folder / AUTHORITY))
        context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
        return context

    def renew(self, context: ssl.SSLContext) -> None:
        """Have the next connection of `context` present the current certificate."""
        try:
            context.load_cert_chain(self.folder / CERTIFICATE, self.folder / KEY)
            context.load_verify_locations(self.folder / AUTHORITY)
        except (ssl.SSLError, OSError) as error:
            _log.warning("the certificate before stays in use: %s", error)

    async def refusal(self, address: str, service: str) -> TreadleError | None:
        """Return UNAUTHENTICATED CERTIFICATE_REFUSED where the server at `address` (host:port) or
        this client refuses the other's certificate, and None where certificates are not why there
        is no connection; gRPC reports UNAVAILABLE for everything."""
        for attempt in range(HANDSHAKES):
            if attempt:
                await asyncio.sleep(HANDSHAKE_PAUSE_S)
            said = await self._try_handshake(address, service)
            if not said:
                return None
        message = f"{address}: {said}; see {self.folder / CERTIFICATE} and {AUTHORITY}"
        return TreadleError(
            grpc.StatusCode.UNAUTHENTICATED, message, "CERTIFICATE_REFUSED", "client.treadle"
        )

    async def open_tls(
        self, address: str, service: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection to a service at `address` (host:port), with the handshake done as gRPC
        does it. Raises OSError."""
        host, _, port = address.rpartition(":")
        context = self.context()
        context.set_alpn_protocols(["h2"])
        return await asyncio.open_connection(
            host.strip("[]"), int(port), ssl=context, server_hostname=f"{service}.treadle"
        )

    async def _try_handshake(self, address: str, service: str) -> str:
        """Return what is wrong with a certificate; empty: none is refused, or no server answers."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                reader, writer = await self.open_tls(address, service)
                try:
                    first = await reader.read(1)
                finally:
                    writer.close()
        except ssl.SSLCertVerificationError as error:
            return f"the server is not the {service} of this mesh: {error.verify_message}"
        except ssl.SSLError as error:
            return f"the server refuses this certificate: {error.reason}"
        except (OSError, TimeoutError):
            return ""
        # In TLS 1.3 a server checks the client's certificate after the handshake; a gRPC server
        # that refuses it closes and sends nothing, and else it sends first.
        refused = (
            "the server refuses this certificate: it has expired, or the server does not "
            "trust its authority"
        )
        return "" if first else refused

    def _stamp(self) -> tuple[int, ...]:
        try:
            return tuple(
                (self.folder / name).stat().st_mtime_ns for name in (CERTIFICATE, KEY, AUTHORITY)
            )
        except OSError as error:
            raise ValueError(
                f"{error.filename}: {error.strerror}; make certificates with `treadle certs`"
            ) from None

    def _read(self) -> Certificate:
        try:
            self.context()  # the key is the certificate's, and all can be parsed
            key, chain, authorities = (
                (self.folder / name).read_bytes() for name in (KEY, CERTIFICATE, AUTHORITY)
            )
        except (ssl.SSLError, OSError) as error:
            raise ValueError(
                f"{self.folder} holds no key with its certificate and authority: {error}"
            ) from None
        return Certificate(key, chain, authorities)


def open_channel(
    address: str,
    service: str,
    certificates: Certificates | None,
    options: Options = (),
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """Open a channel to the `service` (scheduler, sidecar, ...) at `address`; in plaintext without
    certificates."""
    if certificates is None:
        return grpc.aio.insecure_channel(address, options, interceptors=interceptors)
    named = (*options, ("grpc.ssl_target_name_override", f"{service}.treadle"))

    def connect(certificate: Certificate) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(
            certificate.authorities, certificate.key, certificate.chain
        )
        return grpc.aio.secure_channel(address, credentials, named, interceptors=interceptors)

    return _RenewedChannel(certificates, connect)


class _RenewedChannel(grpc.aio.Channel):
    """A channel whose calls begin on a connection with the current certificate."""

    def __init__(
        self, certificates: Certificates, connect: Callable[[Certificate], grpc.aio.Channel]
    ) -> None:
        self._certificates, self._connect = certificates, connect
        self._certificate = certificates.current()
        self._channel = connect(self._certificate)
        self._ending: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def _current(self) -> grpc.aio.Channel:
        certificate = self._certificates.current()
        if certificate is not self._certificate:
            before, self._channel = self._channel, self._connect(certificate)
            self._certificate = certificate
            ending = asyncio.get_running_loop().create_task(before.close(LAST_CALLS_S))
            self._ending[ending] = before
            ending.add_done_callback(self._ending.pop)
        return self._channel

    def _calls(self, kind: str, arguments: Any, options: Any) -> Any:
        made: list[Any] = [None, None]  # the channel, and its way to call

        def call(*request: Any, **limits: Any) -> Any:
            channel = self._current()
            if made[0] is not channel:
                made[:] = channel, getattr(channel, kind)(*arguments, **options)
            return made[1](*request, **limits)

        return call

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._calls("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._calls("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._calls("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._calls("stream_stream", arguments, options)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        for before in (*self._ending.values(), self._channel):
            await before.close(grace)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def __aenter__(self) -> _RenewedChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
