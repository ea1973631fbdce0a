"""Push and read tokens of trajectories that still run: their sampler pushes them, a trainer reads
them (DARTS, section 4.3.2).

These tokens let a trainer start early and are never needed for a right result: no push fails its
trajectory, and what is trained on comes with a batch.
"""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict

import grpc

from treadle.common.v1 import tokens_pb2
from treadle.connection import Mesh, finish
from treadle.errors import TreadleError
from treadle.rollout.v1 import rollout_pb2
from treadle.rollouts.samples import DROP_REASONS, check_part
from treadle.trajectory import Trajectory
from treadle.types import (
    RunningTokens,
    TrajectoryEnded,
    VersionSpan,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)

MOST_PUSH_TOKENS = 50_000  # 450 kB


@asynccontextmanager
async def pushing(mesh: Mesh, trajectory: Trajectory, least_tokens: int) -> AsyncIterator[None]:
    """Push the tokens of a trajectory while the body runs, `least_tokens` or more at a time; none
    where that is 0."""
    if not least_tokens:
        yield
        return
    push = _Push(mesh, trajectory, least_tokens)
    trajectory.on_tokens = push.note
    task = asyncio.create_task(push.run())
    try:
        yield
    finally:
        trajectory.on_tokens = None
        task.cancel()
        await finish(asyncio.wait({task}))


class _Push:
    """Push of the tokens of one trajectory. The service has `_sent` of them or more, or a push that
    runs now brings them."""

    def __init__(self, mesh: Mesh, trajectory: Trajectory, least_tokens: int) -> None:
        self._mesh, self._trajectory, self._least_tokens = mesh, trajectory, least_tokens
        self._sent = self._count = 0
        self._grown = asyncio.Event()

    def note(self, count: int) -> None:
        """Note the new number of tokens: more than before, or fewer, where a step has failed."""
        self._count, self._sent = count, min(self._sent, count)
        if count - self._sent >= self._least_tokens:
            self._grown.set()

    async def run(self) -> None:
        """Push until cancelled, or until the service wants no more or accepts none."""
        mesh, t = self._mesh, self._trajectory
        service = await mesh.rollout()
        while True:
            await self._grown.wait()
            self._grown.clear()
            start = self._sent
            tokens, loss_mask, logprobs, spans = t.tokens_from(start, MOST_PUSH_TOKENS)
            self._sent = start + len(tokens)
            chunk = rollout_pb2.TokenChunk(
                trajectory_id=t.trajectory_id,
                prompt_id=t.prompt_id,
                sample=t.sample,
                start_token=start,
                tokens=tokens_pb2.TokenIds(int32_le=pack_ids(tokens)),
                loss_mask=bytes(loss_mask),
                logprobs=tokens_pb2.Logprobs(float32_le=pack_logprobs(logprobs)),
                version_spans=[tokens_pb2.VersionSpan(**asdict(span)) for span in spans],
            )
            request = rollout_pb2.PushTokensRequest(rollout_id=t.rollout_id, chunk=chunk)
            try:
                answer = await mesh.call(
                    service.PushTokens, request, mesh.timeouts.cleanup_s, t.trace
                )
            except TreadleError as error:
                if not error.retryable and error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    return  # the service has no such call, or the rollout is gone
                self._sent = min(self._sent, start)  # again with what comes next
                continue
            if not answer.wanted:
                return
            self._sent = min(self._sent, answer.next_token)
            self.note(self._count)


async def read_tokens(
    mesh: Mesh, rollout_id: str, min_tokens: int, part: tuple[int, int]
) -> AsyncIterator[RunningTokens | TrajectoryEnded]:
    """Yield events of running trajectories until their rollout is over; see
    Client.stream_tokens."""
    check_part(part)
    request = rollout_pb2.StreamTokensRequest(
        rollout_id=rollout_id, min_tokens=min_tokens, part=part[0], parts=part[1]
    )
    service = await mesh.rollout()
    backoff = mesh.backoff(math.inf)
    known: dict[str, list[int]] = {}
    async for message in mesh.watch(
        lambda: service.StreamTokens(request, timeout=mesh.timeouts.stream_s), backoff
    ):
        if message.HasField("ended"):
            ended = message.ended
            known.pop(ended.trajectory_id, None)
            # a number: the outcome is newer than this client
            reason = DROP_REASONS.get(ended.drop_reason, str(ended.drop_reason))
            yield TrajectoryEnded(
                ended.trajectory_id, ended.prompt_id, ended.sample, ended.kept, reason
            )
        elif tokens := _news(message.chunk, known.setdefault(message.chunk.trajectory_id, [])):
            yield tokens


def _news(chunk: rollout_pb2.TokenChunk, known: list[int]) -> RunningTokens | None:
    """Return the part of a chunk that was not known, and note its tokens: after a connection was
    lost all are sent again."""
    ids, start = unpack_ids(chunk.tokens.int32_le), chunk.start_token
    pairs = zip(ids, known[start:], strict=False)
    same = next(
        (at for at, (one, other) in enumerate(pairs) if one != other),
        min(len(ids), len(known) - start),
    )
    if same == len(ids):
        return None
    known[start + same :] = ids[same:]
    return RunningTokens(
        trajectory_id=chunk.trajectory_id,
        prompt_id=chunk.prompt_id,
        sample=chunk.sample,
        start_token=start + same,
        tokens=ids[same:],
        loss_mask=list(chunk.loss_mask[same:]),
        logprobs=unpack_logprobs(chunk.logprobs.float32_le)[same:],
        version_spans=tuple(
            VersionSpan(span.weight_version, max(span.start_token, start + same), span.end_token)
            for span in chunk.version_spans
            if span.end_token > start + same
        ),
    )
