"""Make certificates for a mesh: `treadle certs` makes an authority once, and certificates of it as
often as it is run.

Any other authority does as well (cert-manager, Vault): what Treadle needs of a certificate stands
in docs/security.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from treadle.certificates import AUTHORITY, CERTIFICATE, KEY, NATS_NAME
from treadle_runtime.identity import OF_TENANTS, SCHEME, caller_in

from treadle_cli.options import DEFAULT_DAYS
from treadle_cli.problems import UsageProblem

SERVICES = ("scheduler", "predictor", "placement", "migrator", "tools", "rollout", "sidecar")
OPERATOR, CONSOLE, NATS = "operator", "console", "nats"
RESOURCES_NAME = "resources.treadle"  # an operator's process serves resources
DEFAULT_TENANT = "default"
AUTHORITY_KEY = "ca.key"
AUTHORITY_DAYS = 3650
BACKDATED = timedelta(minutes=5)  # for clocks that are late


@dataclass(frozen=True)
class Identity:
    """Contents of a certificate. uri: who its holder is as a caller; empty: it calls nobody. dns:
    the names that it serves under."""

    uri: str
    dns: Sequence[str] = ()


class Authority:
    """Authority of a mesh, which issues its certificates."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._key, self.certificate = key, certificate

    @classmethod
    def create(cls, name: str = "Treadle") -> Authority:
        """Return a new authority, which signs itself."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = (
            _builder(subject, subject, key, timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        return cls(key, builder.sign(key, SHA256()))

    @classmethod
    def at(cls, folder: Path) -> Authority:
        """Return the authority in the folder, and make one where there is none. Raises
        UsageProblem."""
        if not (folder / AUTHORITY_KEY).exists():
            made = cls.create()
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / AUTHORITY_KEY, _private(made._key))
            _write(folder / AUTHORITY, made.certificate.public_bytes(Encoding.PEM))
            return made
        try:
            key = load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
        except (OSError, ValueError) as error:
            raise UsageProblem(f"{folder} has an authority that cannot be read: {error}") from None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(key, certificate)

    def issue(self, folder: Path, identity: Identity, valid: timedelta) -> None:
        """Write a new key and certificate to the folder, with the authority beside them."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(name) for name in identity.dns]
        if identity.uri:
            names.append(x509.UniformResourceIdentifier(identity.uri))
        uses = [
            ExtendedKeyUsageOID.CLIENT_AUTH,
            *([ExtendedKeyUsageOID.SERVER_AUTH] if identity.dns else []),
        ]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name[:64])])
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _builder(subject, self.certificate.subject, key, valid)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(authority_key, critical=False)
        )
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / AUTHORITY, self.certificate.public_bytes(Encoding.PEM))
        _write(folder / KEY, _private(key))
        _write(folder / CERTIFICATE, builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM))


def identities(tenants: Sequence[str]) -> dict[str, Identity]:
    """Return the identities of a whole mesh, by the name of their folder. Raises UsageProblem for a
    tenant of a bad name."""
    found = {name: Identity(f"{SCHEME}://{name}", (f"{name}.treadle",)) for name in SERVICES}
    found[OPERATOR] = Identity(f"{SCHEME}://{OPERATOR}", (RESOURCES_NAME,))
    # it shows what an operator sees
    found[CONSOLE] = Identity(f"{SCHEME}://{OPERATOR}", (f"{CONSOLE}.treadle",))
    found[NATS] = Identity("", (NATS_NAME, "*.nats"))  # and those of a cluster to each other
    for tenant in tenants:
        for kind in sorted(OF_TENANTS):
            uri = f"{SCHEME}://{kind}/{tenant}"
            if caller_in(uri) is None:
                raise UsageProblem(
                    f"--tenant {tenant}: must be 1 to 32 characters of A-Z a-z 0-9 _ . -"
                )
            found[f"{kind}-{tenant}"] = Identity(uri)
        # A tenant's gateway calls as its trainer does, and serves under a name of its own.
        found[f"gateway-{tenant}"] = Identity(f"{SCHEME}://trainer/{tenant}", ("gateway.treadle",))
    return found


def make_certificates(
    folder: Path, tenants: Sequence[str] = (DEFAULT_TENANT,), days: float = DEFAULT_DAYS
) -> Path:
    """Make a folder for each part of a mesh and for each tenant's clients, all of one authority, in
    `folder`; return that. Run again, it replaces the certificates and keeps the authority. Raises
    UsageProblem."""
    wanted = identities(tenants)
    authority = Authority.at(folder)
    for name, identity in wanted.items():
        authority.issue(folder / name, identity, timedelta(days=days))
    return folder


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, content: bytes) -> None:
    """Write a file in one step, readable by its owner alone: a process may be reading the one
    before."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    part.replace(path)
