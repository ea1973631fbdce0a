"""Make the identities of a mesh: `treadle certs` makes an authority once, and certificates of it as
often as it is run.

Any other authority does as well (cert-manager, Vault): what Treadle needs of a certificate stands
in docs/security.md. In NATS a service has an account, by the DNS name in its certificate: there it
keeps its state, and from there it publishes the facts of its own kinds and reads facts
(`nats_config`). Services that do neither have no access, nor have callers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
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
from treadle.certificates import AUTHORITY, CERTIFICATE, FOLDER_VARIABLE, KEY, NATS_NAME
from treadle_runtime.facts import API_OF_ACCOUNT, MAKER, STORED_ROOT, STREAM, SUBJECT_ROOT
from treadle_runtime.identity import OF_TENANTS, SCHEME, caller_in

from treadle_cli import exits
from treadle_cli.exits import Terminal, UsageProblem
from treadle_cli.options import AsJson, make_private_folder, print_json, require_own, write_private

SERVICES = ("scheduler", "predictor", "placement", "migrator", "tools", "rollout", "sidecar")
OPERATOR, CONSOLE, NATS = "operator", "console", "nats"
RESOURCES_NAME = "resources.treadle"  # an operator's process serves resources
DEFAULT_TENANT = "default"
AUTHORITY_KEY = "ca.key"
AUTHORITY_DAYS = 3650
DEFAULT_DAYS = 90  # for which certificates are valid
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
        UsageProblem, also where another user owns the folder or a file of it, or can change it."""
        make_private_folder(folder)
        key_file = folder / AUTHORITY_KEY
        if not key_file.exists():
            made = cls.create()
            write_private(key_file, _private(made._key))
            write_private(folder / AUTHORITY, made.certificate.public_bytes(Encoding.PEM))
            return made
        try:
            require_own(key_file)
            require_own(folder / AUTHORITY)
            if key_file.stat().st_mode & 0o077:
                raise UsageProblem(f"{key_file} can be read by other users: make a new authority")
            key = load_pem_private_key(key_file.read_bytes(), password=None)
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
        make_private_folder(folder)
        write_private(folder / AUTHORITY, self.certificate.public_bytes(Encoding.PEM))
        write_private(folder / KEY, _private(key))
        write_private(
            folder / CERTIFICATE, builder.sign(self._key, SHA256()).public_bytes(Encoding.PEM)
        )


def certs(
    folder: Annotated[Path, typer.Argument(help="Where the certificates go; kept between runs.")],
    tenant: Annotated[
        list[str] | None,
        typer.Option(help="Whose clients get a certificate; may be given several times."),
    ] = None,
    days: Annotated[
        float, typer.Option(min=0.001, help="How long the certificates are valid.")
    ] = DEFAULT_DAYS,
    as_json: AsJson = False,
) -> None:
    """Make certificates for all parts of a mesh and for its clients; run again, make new ones of
    the same authority."""
    with exits.end_with_one_line():
        tenants = tenant or [DEFAULT_TENANT]
        make_certificates(folder, tenants, days)
        if as_json:
            names = sorted(identities(tenants))
            print_json({"folder": str(folder), "days": days, "identities": names})
            return
        Terminal().print(
            f"{folder}: certificates for {days:g} days. Set TREADLE_TLS_FOLDER to the folder of "
            "each service."
        )


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


def describe_clients(folder: Path) -> str:
    """Return the line that names what clients need of the certificates in `folder`."""
    client = folder / f"trainer-{DEFAULT_TENANT}"
    return f"Clients: export {FOLDER_VARIABLE}={client}  (or {OPERATOR})"


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


PUBLISHES = {
    "scheduler": (
        *("trajectory-opened", "trajectory-closed", "trajectory-predicted"),
        *("engine-joined", "engine-lost", "plan-made"),
    ),
    "sidecar": (
        "step-queued",
        "step-started",
        "step-preempted",
        "step-finished",
        "weights-updated",
    ),
    "tools": ("tool-started", "tool-finished", "reward-ended"),
    "migrator": ("migration-ended",),
    "rollout": ("group-settled",),
}
HEARS_FACTS = frozenset({"scheduler", "predictor", "tools", "rollout", "console"})
KEEPS_STATE = frozenset({"scheduler", "predictor", "migrator", "tools", "rollout", "sidecar"})
FACTS_ACCOUNT = "facts"
# NATS knows that an answer has ended only where it is one message; the reply address of others it
# forgets after so long.
ANSWERS_END_AFTER = "5s"
ROUTES_OF_CLUSTER = "verify_cert_and_check_known_urls: true"


def nats_config(certificate: Path, *, in_pod: bool = False) -> str:
    """Return the configuration of a server that speaks TLS alone, from the first byte on.
    certificate: the folder of its own. in_pod: with what one in Kubernetes needs too, where several
    may be a cluster, whose servers know each other by the names of their routes."""
    files = {"cert_file": CERTIFICATE, "key_file": KEY, "ca_file": AUTHORITY}
    lines = [f"  {name}: {json.dumps(str(certificate / file))}" for name, file in files.items()]
    accounts = [f"  {name}: {json.dumps(account)}" for name, account in _accounts().items()]
    tls = ["tls {", *lines, "  verify_and_map: true", "  handshake_first: true", "}"]
    pod = (
        ['http: "127.0.0.1:8222"', "cluster { tls {", *lines, f"  {ROUTES_OF_CLUSTER}", "} }"]
        if in_pod
        else []
    )
    return "\n".join([*tls, *pod, "accounts {", *accounts, "}", ""])


def _accounts() -> dict[str, dict[str, object]]:
    """Return the accounts of NATS: one for each service, and one that holds the stream of facts.

    JetStream does for a caller what the caller's account may do, whatever the caller itself may: it
    copies any stream of the account into a new one, and sends what it stores or answers to any
    subject there. So no permission within an account protects one service from another.
    """
    accounts: dict[str, dict[str, object]] = {FACTS_ACCOUNT: {"jetstream": "enabled"}}
    callers: dict[str, list[str]] = {}
    for service in sorted(HEARS_FACTS | KEEPS_STATE | PUBLISHES.keys()):
        imports: list[dict[str, object]] = []
        for subject, to in _calls(service):
            callers.setdefault(subject, []).append(service)
            imports.append({"service": _of_facts(subject), "to": to})
        if service in HEARS_FACTS:
            imports.append({"stream": _of_facts(f"{STORED_ROOT}.>")})
        accounts[service] = {"users": [{"user": f"{service}.treadle"}], "imports": imports}
        if service in KEEPS_STATE:
            accounts[service]["jetstream"] = "enabled"
    several = {"response_type": "Stream", "response_threshold": ANSWERS_END_AFTER}
    accounts[FACTS_ACCOUNT]["exports"] = [
        {"stream": f"{STORED_ROOT}.>", "accounts": sorted(HEARS_FACTS)},
        *(
            {"service": subject, "accounts": services}
            | (several if ".DIRECT.GET." in subject else {})
            for subject, services in callers.items()
        ),
    ]
    return accounts


def _of_facts(subject: str) -> dict[str, str]:
    return {"account": FACTS_ACCOUNT, "subject": subject}


def _calls(service: str) -> Iterator[tuple[str, str]]:
    """Yield what a service may send to the account of the facts: the subject there, and in its own
    account."""
    for kind in PUBLISHES.get(service, ()):
        yield f"{SUBJECT_ROOT}.{kind}.>", f"{SUBJECT_ROOT}.{kind}.>"
    verbs = ["STREAM.INFO"]
    verbs += ["STREAM.CREATE", "STREAM.UPDATE"] if service == MAKER else []
    verbs += ["DIRECT.GET"] if service in HEARS_FACTS else []
    for verb in verbs:
        yield f"$JS.API.{verb}.{STREAM}", f"{API_OF_ACCOUNT}.{verb}.{STREAM}"
