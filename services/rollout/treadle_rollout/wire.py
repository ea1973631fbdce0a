"""Assemble the rollout service, and remove what nobody can ask for any more."""

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import cast

import nats.errors
import structlog
from treadle.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from treadle_core.rollouts.buffer import GroupTooLargeError, SampleTakenError
from treadle_runtime.errors import AlreadyExists, ErrorTable, FailedPrecondition, InvalidArgument
from treadle_runtime.server import Runtime, Wiring

from treadle_rollout.config import RolloutSettings
from treadle_rollout.rollouts import Rollout, Rollouts
from treadle_rollout.servicer import RolloutServicer
from treadle_rollout.storage import LOG_BUCKET, PAYLOAD_BUCKET, PayloadStore, RolloutLog

SWEEP_PERIOD_S = 60.0  # disk is cheap for a minute, and a sweep looks at every rollout

log = structlog.get_logger()


class Janitor:
    """Removes tokens of batches that can no longer be repeated, tokens dropped after they were kept, and old rollouts.

    Invariant: tokens of a trajectory that waits to be taken, or whose batch may still be repeated, stay.
    """

    def __init__(
        self, rollouts: Rollouts, payloads: PayloadStore, *, batch_replay_s: float, retention_s: float
    ) -> None:
        self._rollouts = rollouts
        self._payloads = payloads
        self._batch_replay_s = batch_replay_s
        self._retention_s = retention_s

    async def run(self) -> None:
        """Sweep until cancelled. A sweep that NATS interrupts is taken up by the next one."""
        while True:
            try:
                await self.sweep(time.time())
            except nats.errors.Error as error:
                log.warning("sweep interrupted", error=str(error))
            await asyncio.sleep(SWEEP_PERIOD_S)

    async def sweep(self, now_s: float) -> None:
        """One pass over all rollouts; `now_s` is Unix time."""
        for rollout in self._rollouts:
            if now_s - rollout.touched_at_s > self._retention_s:
                log.info("rollout forgotten", rollout_id=rollout.rollout_id)
                await self._rollouts.forget(rollout)
                continue
            for trajectory_id in list(self._released(rollout, now_s)):
                await self._payloads.release(rollout.rollout_id, trajectory_id)
                del rollout.payload_names[trajectory_id]

    def _released(self, rollout: Rollout, now_s: float) -> Iterator[str]:
        wanted = {
            sample.trajectory_id for group in rollout.buffer.groups.values() if not group.taken for sample in group.kept
        }
        for batch in rollout.buffer.batches.values():
            if now_s - rollout.batch_times_s[batch.batch_id] <= self._batch_replay_s:
                wanted.update(trajectory_id for _, members in batch.groups for trajectory_id in members)
        return (trajectory_id for trajectory_id in rollout.payload_names if trajectory_id not in wanted)


SERVICE = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name

ERRORS: ErrorTable = {
    SampleTakenError: lambda error: AlreadyExists(
        "SAMPLE_TAKEN", str(error), prompt_id=error.prompt_id, trajectory_id=error.trajectory_id
    ),
    GroupTooLargeError: lambda error: FailedPrecondition(
        "GROUP_TOO_LARGE", f"{error}; raise max_message_bytes of the rollout service", prompt_id=error.prompt_id
    ),
    nats.errors.MaxPayloadError: lambda _: InvalidArgument(
        "spec.prompt_ids", "are too many for one record of NATS; split the rollout or raise max_payload of nats-server"
    ),
}


async def wire(runtime: Runtime) -> Wiring:
    """Load all rollouts, then serve."""
    settings = cast(RolloutSettings, runtime.settings)
    jetstream = runtime.bus.jetstream
    log = RolloutLog(await runtime.bus.key_value(LOG_BUCKET), jetstream)
    payloads = PayloadStore(await runtime.bus.key_value(PAYLOAD_BUCKET), jetstream, runtime.bus.max_payload_bytes)
    rollouts = Rollouts(log, payloads)
    await rollouts.load()
    janitor = Janitor(rollouts, payloads, batch_replay_s=settings.batch_replay_s, retention_s=settings.retention_s)
    servicer = RolloutServicer(rollouts, runtime.records, max_message_bytes=settings.max_message_bytes)

    async def close_at_drain() -> None:
        await runtime.stopping.wait()
        rollouts.close()

    return Wiring(
        services={SERVICE: partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer)},
        tasks=[janitor.run, close_at_drain],
        errors=ERRORS,
    )
