"""Reading a failed call as a client does."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import grpc
import grpc.aio
import pytest
from treadle.common.v1 import status_pb2

DETAILS_KEY = "grpc-status-details-bin"
TYPE_URL_PREFIX = "type.googleapis.com/google.rpc."
ANSWER_S = 60.0
ASK_AGAIN_S = 0.05

Answer = TypeVar("Answer")


class RpcError(NamedTuple):
    """code; ErrorInfo.reason; BadRequest's fields; RetryInfo in seconds. Empty or None where a
    detail is absent."""

    code: grpc.StatusCode
    reason: str
    fields: tuple[str, ...]
    retry_after_s: float | None


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The google.rpc.Status of a failed call; an empty one where there is none."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            assert isinstance(value, bytes)
            return status_pb2.Status.FromString(value)
    return status_pb2.Status()


def error_of(error: grpc.aio.AioRpcError) -> RpcError:
    """What the call failed with, as (code, reason, fields, retry_after_s)."""
    reason, fields, retry_after_s = "", list[str](), None
    for detail in status_of(error).details:
        name = detail.type_url.removeprefix(TYPE_URL_PREFIX)
        if name == "ErrorInfo":
            reason = status_pb2.ErrorInfo.FromString(detail.value).reason
        elif name == "BadRequest":
            fields = [
                v.field for v in status_pb2.BadRequest.FromString(detail.value).field_violations
            ]
        elif name == "RetryInfo":
            retry_after_s = (
                status_pb2.RetryInfo.FromString(detail.value).retry_delay.ToNanoseconds() / 1e9
            )
    return RpcError(error.code(), reason, tuple(fields), retry_after_s)


async def refusal_of(call: Awaitable[object]) -> RpcError:
    """What the call, which must fail, fails with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return error_of(raised.value)


async def answer_of(call: Callable[[], Awaitable[Answer]], within_s: float = ANSWER_S) -> Answer:
    """The answer, asked for again while the server is UNAVAILABLE."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE
                await asyncio.sleep(ASK_AGAIN_S)


@contextmanager
def refused(
    reason: str, code: grpc.StatusCode | None = None, *, says: str | None = None
) -> Iterator[None]:
    """The block's call must fail with a reason, and with a code and words where they are given."""
    with pytest.raises(grpc.aio.AioRpcError, match=says) as raised:
        yield
    error = error_of(raised.value)
    assert error.reason == reason
    assert code in (None, error.code)
