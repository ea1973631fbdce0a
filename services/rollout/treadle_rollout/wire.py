"""Puts the rollout service together."""

import nats.errors
from treadle.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from treadle_core.buffer import GroupTooLargeError
from treadle_core.groups import SampleTakenError
from treadle_runtime.errors import AlreadyExists, ErrorTable, FailedPrecondition, InvalidArgument, NotFound, Unavailable
from treadle_runtime.server import Runtime, Wiring

from treadle_rollout.config import RolloutSettings
from treadle_rollout.janitor import Janitor
from treadle_rollout.rollouts import BatchReusedError, DrainingError, RolloutExistsError, Rollouts, UnknownRolloutError
from treadle_rollout.servicer import RolloutServicer
from treadle_rollout.storage import LOG_BUCKET, PAYLOAD_BUCKET, PayloadLostError, PayloadStore, RolloutLog

SERVICE = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
RETRY_DRAINING_S = 0.5  # by then the process that comes after this one listens

ERRORS: ErrorTable = {
    UnknownRolloutError: lambda error: NotFound(
        "ROLLOUT_NOT_FOUND", f"no rollout {error}; it may have been forgotten", rollout_id=str(error)
    ),
    RolloutExistsError: lambda error: AlreadyExists(
        "ROLLOUT_EXISTS", f"rollout {error} was created by another request", rollout_id=str(error)
    ),
    BatchReusedError: lambda error: InvalidArgument(
        "request_id", f"{error} named another GetBatch before; mint a new one for new parameters"
    ),
    SampleTakenError: lambda error: AlreadyExists(
        "SAMPLE_TAKEN", str(error), prompt_id=error.prompt_id, trajectory_id=error.trajectory_id
    ),
    GroupTooLargeError: lambda error: FailedPrecondition(
        "GROUP_TOO_LARGE",
        f"{error}; raise max_message_bytes of the rollout service",
        prompt_id=error.prompt_id,
    ),
    PayloadLostError: lambda error: FailedPrecondition(
        "BATCH_EXPIRED", f"the tokens of trajectory {error} are gone: a batch can be repeated for a limited time only"
    ),
    DrainingError: lambda _: Unavailable("DRAINING", "this server is shutting down", retry_after_s=RETRY_DRAINING_S),
    nats.errors.MaxPayloadError: lambda _: InvalidArgument(
        "spec.prompt_ids", "are too many for one record of NATS; split the rollout or raise max_payload of nats-server"
    ),
}


async def wire(runtime: Runtime) -> Wiring:
    """Load all rollouts, then serve."""
    settings = runtime.settings
    if not isinstance(settings, RolloutSettings):
        raise TypeError(f"expected RolloutSettings, got {type(settings).__name__}")
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
        services={SERVICE: lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)},
        tasks=[janitor.run, close_at_drain],
        errors=ERRORS,
    )
