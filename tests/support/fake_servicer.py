"""What the fakes of services share: refusals in google.rpc's messages, scripted failures, a log of
calls, servers."""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from support.processes import free_port
from support.reasons import possible_codes
from treadle.types import duration

# as Treadle's servers: clients ping
_SERVER_OPTIONS = (("grpc.http2.min_ping_interval_without_data_ms", 1_000),)


MADE_UP = frozenset({"", "AWAY", "NO"})  # reasons that no service has


@dataclass(frozen=True)
class Refusal:
    """An error as a Treadle service would send it: with a code and a reason that services have."""

    code: grpc.StatusCode
    reason: str
    message: str = "refused by a test"
    retry_after_s: float | None = None
    fields: tuple[str, ...] = ()
    after: bool = False  # the work is done and recorded, and then the answer is lost

    def __post_init__(self) -> None:
        codes = possible_codes(self.reason)
        assert self.reason in MADE_UP or self.code.name in codes or self.reason == self.code.name, (
            f"{self.code.name} {self.reason}: services have it with {sorted(codes) or 'no code'}"
        )


async def refuse(context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal) -> NoReturn:
    """Ends the call with the refusal."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=refusal.reason, domain="fake.treadle", metadata={"by": "test"}
        )
    ]
    if refusal.retry_after_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration(refusal.retry_after_s)))
    if refusal.fields:
        violation = error_details_pb2.BadRequest.FieldViolation
        violations = [violation(field=field, description="is wrong") for field in refusal.fields]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    status = status_pb2.Status(code=refusal.code.value[0], message=refusal.message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    wire = rpc_status.to_status(status)
    await context.abort(wire.code, wire.details, wire.trailing_metadata)


@dataclass(frozen=True)
class Call:
    """One attempt as it arrived."""

    method: str
    request: Any
    time_s: float  # of the event loop
    deadline_s: float | None  # that was left


class Gate:
    """Holds calls of a fake until it is opened, and counts how many wait."""

    def __init__(self) -> None:
        self.waiting = 0
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        """Make calls wait from now on."""
        self._open.clear()

    def open(self) -> None:
        """Let all calls go on."""
        self._open.set()

    async def pass_through(self) -> None:
        """Wait while the gate is closed."""
        self.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.waiting -= 1


class Port:
    """A server of one fake that may go away and come back at the same address."""

    def __init__(
        self, add_to_server: Callable[[Any, grpc.aio.Server], None], servicer: object
    ) -> None:
        self._add, self._servicer = add_to_server, servicer
        self._server: grpc.aio.Server | None = None
        self.address = f"127.0.0.1:{free_port()}"

    async def start(self) -> None:
        """Listen."""
        self._server = grpc.aio.server(options=_SERVER_OPTIONS)
        self._add(self._servicer, self._server)
        assert self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """Go away at once, as a killed process does."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    async def __aenter__(self) -> str:
        await self.start()
        return self.address

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class FakeServicer:
    """Logs each attempt; refuses as scripted; answers a repeated request_id from its record."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._refusals: dict[str, list[Refusal]] = {}
        self._records: dict[str, tuple[Any, Any]] = {}

    def refuse_next(self, method: str, *refusals: Refusal) -> None:
        """The next attempts of the method are refused, one each."""
        self._refusals.setdefault(method, []).extend(refusals)

    def requests(self, method: str) -> list[Any]:
        """Requests of that method, attempts included, in the order of arrival."""
        return [call.request for call in self.calls if call.method == method]

    async def once(
        self, method: str, request: Any, context: grpc.aio.ServicerContext[Any, Any], work: Any
    ) -> Any:
        """The answer of `work(request)`, made once a request_id; scripted refusals come before or
        after it."""
        self.log(method, request, context)
        refusal = self.next_refusal(method)
        if refusal is not None and not refusal.after:
            await refuse(context, refusal)
        request_id = getattr(request, "request_id", "")
        recorded, answer = self._records.get(request_id, (None, None))
        if recorded is None:
            answer = work(request)
            if isinstance(answer, Refusal):
                await refuse(context, answer)
            if request_id:
                self._records[request_id] = (request, answer)
        elif recorded != request:
            invalid = Refusal(
                grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED", fields=("request_id",)
            )
            await refuse(context, invalid)
        if refusal is not None:
            await refuse(context, refusal)
        return answer

    def log(self, method: str, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Writes an attempt down."""
        now_s = asyncio.get_running_loop().time()
        self.calls.append(Call(method, request, now_s, context.time_remaining()))

    def next_refusal(self, method: str) -> Refusal | None:
        """The scripted refusal of this attempt, taken from the script."""
        scripted = self._refusals.get(method)
        return scripted.pop(0) if scripted else None


def answer(work: Callable[[Any, Any], Any]) -> Any:
    """The RPC of the same name out of what it does with a request: a response or a Refusal, once a
    request_id."""

    @functools.wraps(work)
    async def rpc(
        servicer: FakeServicer, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        return await servicer.once(
            work.__name__, request, context, functools.partial(work, servicer)
        )

    return rpc
