"""Mark names with the tenant that owns them (`TENANT::name`, so that the name alone shows its
owner), and limit the calls of each tenant."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from treadle.common.v1 import access_pb2

from treadle_runtime.errors import PermissionDenied, ResourceExhausted
from treadle_runtime.identity.callers import Caller, may_call

TENANT_MARK = "::"
FULL_RETRY_S = 0.1


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


def owner_of(name: str) -> str:
    """Return the tenant that owns what has this name; empty: none."""
    owner, mark, _ = name.partition(TENANT_MARK)
    return owner if mark else ""


def like(name: str, value: str) -> str:
    """Return `value` as a name of the tenant that `name` belongs to."""
    owner = owner_of(name)
    return f"{owner}{TENANT_MARK}{value}" if owner else value


def minted(kind: str, request_id: str) -> str:
    """Return the id `KIND-...` of what a request makes: the same for each repeat, and of the tenant
    that sent it."""
    return like(request_id, f"{kind}-{hashlib.sha256(request_id.encode()).hexdigest()[:20]}")
