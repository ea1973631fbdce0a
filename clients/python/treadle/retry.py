"""One logical call: a deadline around attempts with backoff.

Purpose: every unary RPC of the client goes through Calls.unary. Invariants: a call ends by its deadline, attempts
included; the request object, and so its request_id, is the same in every attempt, so that a server answers a repeat
from its record.

Retried: UNAVAILABLE and a connection that broke under the call (any mutation carries a request_id, so this is safe),
and RESOURCE_EXHAUSTED where the server sent a RetryInfo. Everything else is the answer.

Why not gRPC's own retryPolicy: it cannot see RetryInfo, stops at 5 attempts, and two layers of retries multiply. Its
transparent retries, of calls that never left this process, stay on.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc

from treadle.errors import TreadleError, error_from

Q = TypeVar("Q", contravariant=True)
A = TypeVar("A", covariant=True)


class UnaryMethod(Protocol[Q, A]):
    """A unary method of a generated stub on a grpc.aio channel."""

    def __call__(self, request: Q, *, timeout: float | None = None) -> Awaitable[A]: ...


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff: the n-th wait is drawn evenly from half to the whole of first_delay_s · growth^n, at most
    max_delay_s.

    A server's RetryInfo is a lower bound of the wait.
    """

    first_delay_s: float = 0.05
    growth: float = 2.0
    max_delay_s: float = 2.0  # a scheduler restarts in seconds; waiting longer would only add idle time

    def delay_s(self, attempt: int, draw: float, at_least_s: float | None) -> float:
        """Seconds before the next attempt; attempt counts from 0, draw is uniform in [0, 1)."""
        longest = min(self.first_delay_s * self.growth ** min(attempt, 32), self.max_delay_s)
        return max(longest * (0.5 + 0.5 * draw), at_least_s or 0.0)


@dataclass(frozen=True)
class Timeouts:
    """Deadlines of whole logical calls in seconds, retries included."""

    control_s: float = 60.0  # open, close, submit, ask: outlasts a restart of the scheduler
    schedule_s: float = 300.0  # a step waits this long for an engine, or for a word of the scheduler
    step_s: float = 3600.0  # one step: queue, all resumptions, and up to 64k tokens at 20 tokens a second
    tool_s: float = 600.0  # the tool's own wall-time limit is shorter
    reward_s: float = 3600.0  # how long a score is waited for; it may stand behind those of other jobs
    batch_s: float = 600.0  # how long get_batch(wait=True) waits
    cleanup_s: float = 10.0  # abort and close on the way out, where nobody wants to wait


def retryable(error: TreadleError) -> bool:
    """Whether the same request may be sent again as it is."""
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return (
            error.retry_after_s is not None
        )  # without RetryInfo it is a limit that waiting will not move, e.g. message size
    return error.lost_connection


class Backoff:
    """The waits of one logical call: between attempts, never past its deadline."""

    def __init__(self, policy: RetryPolicy, rng: random.Random, timeout_s: float) -> None:
        self._policy, self._rng = policy, rng
        self._deadline = time.monotonic() + timeout_s
        self._attempt = 0

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline; may be negative."""
        return self._deadline - time.monotonic()

    def restart(self) -> None:
        """Progress was made: the next wait is a first one again."""
        self._attempt = 0

    async def wait(self, error: TreadleError, at_least_s: float | None) -> None:
        """Sleeps before the next attempt; raises `error` when the deadline would come first."""
        delay_s = self._policy.delay_s(self._attempt, self._rng.random(), at_least_s)
        self._attempt += 1
        if delay_s >= self.remaining_s:
            raise error
        await asyncio.sleep(delay_s)


class Calls:
    """Makes unary calls by one policy. Owns no channel."""

    def __init__(self, policy: RetryPolicy, rng: random.Random) -> None:
        self._policy, self._rng = policy, rng

    def backoff(self, timeout_s: float) -> Backoff:
        """A fresh deadline with waits by this policy."""
        return Backoff(self._policy, self._rng, timeout_s)

    async def unary(self, method: UnaryMethod[Q, A], request: Q, timeout_s: float, told: str = "") -> A:
        """The response; TreadleError when the server refuses or the deadline passes. told: the reason of a refusal that
        is the caller's to wait on.
        """
        backoff = self.backoff(timeout_s)
        while True:
            try:
                return await method(request, timeout=max(backoff.remaining_s, 0.001))
            except grpc.aio.AioRpcError as failure:
                error = error_from(failure)
            if not retryable(error) or (told and error.reason == told):
                raise error
            await backoff.wait(error, error.retry_after_s)
