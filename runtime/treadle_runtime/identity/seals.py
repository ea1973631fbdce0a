"""A seal on a message that a third party carries: who made it and what it said, checked without asking anybody.

A seal is a JSON Web Token (ES256, RFC 7519) signed with the key of its maker's certificate, which travels in it as
`x5c`. So whoever trusts the authority can check it, also after the maker has got another certificate or has died.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any

import jwt
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from google.protobuf.message import Message
from treadle.certificates import Certificate, Certificates

from treadle_runtime.errors import PermissionDenied
from treadle_runtime.identity.callers import caller_in

ALGORITHM = "ES256"
SEAL = "seal"  # the field that holds it


class Sealer:
    """Seals messages in the name of this process."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        self._signing: tuple[Certificate, Any, dict[str, Any]] | None = None

    def seal(self, message: Message) -> str:
        """The seal of all fields that are set."""
        certificate = self._certificates.current()
        if self._signing is None or self._signing[0] is not certificate:
            key: Any = load_pem_private_key(certificate.key, password=None)
            chain = [
                base64.b64encode(each.public_bytes(Encoding.DER)).decode()
                for each in x509.load_pem_x509_certificates(certificate.chain)
            ]
            self._signing = certificate, key, {"x5c": chain}
        _, key, headers = self._signing
        return jwt.encode({"said": _said(message)}, key, ALGORITHM, headers)


class SealCheck:
    """Accepts the seals of one kind of maker (`scheduler`)."""

    def __init__(self, certificates: Certificates, maker: str) -> None:
        self._certificates, self._maker = certificates, maker

    def check(self, message: Message) -> None:
        """Raises PermissionDenied SEAL_REFUSED where the message is not, field by field, what the maker has sealed. A
        field that this process does not know is not compared."""
        try:
            token = getattr(message, SEAL)
            chain = tuple(jwt.get_unverified_header(token).get("x5c", ()))
            maker = _trusted(chain, self._certificates.current())
            self._require_valid(maker)
            claims = jwt.decode(token, maker.public_key(), algorithms=[ALGORITHM])  # type: ignore[arg-type]
            said, sealed = _said(message), claims.get("said")
            known = {field.name for field in message.DESCRIPTOR.fields}
            if not isinstance(sealed, dict) or {k: v for k, v in sealed.items() if k in known} != said:
                raise ValueError("it is of another message")
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise PermissionDenied("SEAL_REFUSED", f"{message.DESCRIPTOR.name}.{SEAL}: {error}") from None

    def _require_valid(self, maker: x509.Certificate) -> None:
        if not maker.not_valid_before_utc <= datetime.now(UTC) <= maker.not_valid_after_utc:
            raise ValueError("its maker's certificate has expired")
        names = maker.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        callers = [caller_in(uri) for uri in names.get_values_for_type(x509.UniformResourceIdentifier)]
        if [caller and caller.kind for caller in callers] != [self._maker]:
            raise ValueError(f"its maker is not a {self._maker}")


@lru_cache(maxsize=64)
def _trusted(chain: tuple[str, ...], trust: Certificate) -> x509.Certificate:
    """The first certificate of a chain, each of which the next one has issued, and an authority the last. Raises
    ValueError."""
    if not 0 < len(chain) <= 4:
        raise ValueError("it carries no certificate of its maker")
    found = [x509.load_der_x509_certificate(base64.b64decode(each)) for each in chain]
    for subject, issuer in pairwise(found):
        if not _issued(subject, issuer):
            raise ValueError("the certificates that it carries are no chain")
    if not any(_issued(found[-1], authority) for authority in x509.load_pem_x509_certificates(trust.authorities)):
        raise ValueError("its maker's certificate is of another authority")
    return found[0]


def _issued(subject: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        may_issue = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        subject.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    return may_issue and isinstance(subject.public_key(), ec.EllipticCurvePublicKey)


def _said(message: Message) -> dict[str, Any]:
    """The fields that are set, as JSON has them."""
    return {
        field.name: value.SerializeToString(deterministic=True).hex() if isinstance(value, Message) else value
        for field, value in message.ListFields()
        if field.name != SEAL
    }
