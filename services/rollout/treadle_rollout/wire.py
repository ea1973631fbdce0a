"""Assemble the rollout service."""

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import Any, cast

import nats.errors
import structlog
from treadle.rollout.v1.rollout_pb2_grpc import add_RolloutServiceServicer_to_server
from treadle_core.rollouts.buffer import GroupTooLargeError, SampleTakenError
from treadle_core.rollouts.group import Group
from treadle_runtime.errors import (
    AlreadyExists,
    ErrorTable,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    StartError,
    contain,
)
from treadle_runtime.server import Runtime, Wiring

from treadle_rollout import convert
from treadle_rollout.config import RolloutSettings
from treadle_rollout.metrics import Meters
from treadle_rollout.rollouts import Rollout, Rollouts
from treadle_rollout.running import TokenRoom
from treadle_rollout.servicer import RolloutServicer
from treadle_rollout.storage import (
    HISTORY_BUCKET,
    LOG_BUCKET,
    PAYLOAD_BUCKET,
    HistoryStore,
    PayloadStore,
    RolloutLog,
)

DURABLE = "rollout"  # the name under which the bus keeps this service's position among the facts
SWEEP_PERIOD_S = 60.0  # disk is cheap for a minute, and a sweep checks every rollout

log = structlog.get_logger()


ERRORS: ErrorTable = {
    SampleTakenError: lambda error: AlreadyExists(
        "SAMPLE_TAKEN", str(error), prompt_id=error.prompt_id, trajectory_id=error.trajectory_id
    ),
    GroupTooLargeError: lambda error: FailedPrecondition(
        "GROUP_TOO_LARGE",
        f"{error}: call StreamBatch, which has no limit",
        prompt_id=error.prompt_id,
    ),
    nats.errors.MaxPayloadError: lambda _: InvalidArgument(
        "spec.prompt_ids",
        "are too many for one record of NATS; split the rollout or raise max_payload of "
        "nats-server",
    ),
}


async def wire(runtime: Runtime) -> Wiring:
    """Load all rollouts, then serve."""
    settings = cast(RolloutSettings, runtime.settings)
    jetstream = runtime.bus.jetstream
    records = RolloutLog(await runtime.bus.key_value(LOG_BUCKET), jetstream)
    try:
        bucket = await runtime.bus.key_value(PAYLOAD_BUCKET, max_bytes=settings.payload_bytes)
    except StartError as error:
        raise StartError(
            f"TREADLE_ROLLOUT_PAYLOAD_BYTES={settings.payload_bytes}: {error}"
        ) from error
    payloads = PayloadStore(
        bucket, jetstream, runtime.bus.max_payload_bytes, settings.payload_bytes
    )

    async def tell_settled(rollout: Rollout, group: Group) -> None:
        await runtime.bus.publish(convert.settled_fact(rollout, group))

    histories = HistoryStore(await runtime.bus.key_value(HISTORY_BUCKET))
    room = TokenRoom(settings.token_stream_bytes)
    rollouts = Rollouts(records, payloads, histories, room, tell_settled)
    await rollouts.load()

    async def receive(fact: Any) -> None:
        """Count a trajectory that was ended early as sampled, with the tokens that it had."""
        ended = convert.aborted_from(fact)
        if ended is not None:
            rollout_id, aborted = ended
            with suppress(NotFound):  # the rollout is forgotten
                await (await rollouts.find(rollout_id)).note_aborted(aborted)

    await runtime.bus.subscribe(["trajectory_closed"], receive, durable=DURABLE)
    meters = Meters(runtime.metrics, rollouts, room)
    servicer = RolloutServicer(
        rollouts, await runtime.open_records(), meters, max_message_bytes=settings.max_message_bytes
    )

    async def sweep() -> None:
        """Remove what no request can need any more.

        A sweep that NATS interrupts is taken up by the next one.
        """
        while True:
            with contain("a sweep"):
                try:
                    await rollouts.sweep(
                        time.time(),
                        batch_replay_s=settings.batch_replay_s,
                        retention_s=settings.retention_s,
                    )
                except* nats.errors.Error as errors:
                    log.warning("sweep interrupted", error=repr(errors.exceptions[0]))
            await asyncio.sleep(SWEEP_PERIOD_S)

    async def close_at_drain() -> None:
        await runtime.stopping.wait()
        rollouts.close()

    return Wiring(
        services={
            "treadle.rollout.v1.RolloutService": partial(
                add_RolloutServiceServicer_to_server, servicer
            )
        },
        tasks=[sweep, close_at_drain],
        errors=ERRORS,
    )
