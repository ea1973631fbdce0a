"""Messages of sidecars to core values and back: engines, their curves, leases and loads. Requests were checked before
(`checks.py`)."""

from treadle.engine.v1 import engine_pb2
from treadle.scheduler.v1 import scheduler_pb2 as pb
from treadle_core.events import EngineRegistered, LeaseRenewed
from treadle_core.model import (
    DEFAULT_PREFILL_TOKENS_PER_S,
    DecodeCurve,
    EngineLoad,
    EngineRecord,
    EngineSpec,
    KvTransfer,
)

from treadle_scheduler.convert import seconds, timestamp

KV_TRANSFERS = {KvTransfer.PREFILL: engine_pb2.KV_TRANSFER_PREFILL, KvTransfer.STORAGE: engine_pb2.KV_TRANSFER_STORAGE}


def engine_registered(request: pb.RegisterEngineRequest, lease_id: str) -> EngineRegistered:
    """The event of a checked request; the lease is the caller's to mint."""
    return EngineRegistered(request.request_id, lease_id, engine_spec(request.info))


def lease_renewed(request: pb.RenewEngineLeaseRequest) -> LeaseRenewed:
    """The event of a checked request."""
    load = engine_load(request.load) if request.HasField("load") else None
    return LeaseRenewed(request.lease_id, request.engine_id, load)


def engine_spec(info: engine_pb2.EngineInfo) -> EngineSpec:
    """What a sidecar declares. A curve without speeds takes the default ones."""
    curve = info.decode_curve
    declared = curve.base_s + curve.per_sequence_s > 0
    prefill = curve.prefill_tokens_per_s or DEFAULT_PREFILL_TOKENS_PER_S
    return EngineSpec(
        engine_id=info.engine_id,
        address=info.address,
        model=info.model,
        weight_version=info.weight_version,
        slot_limit=info.slot_limit,
        kv_tokens_capacity=info.kv_tokens_capacity,
        max_context_tokens=info.max_context_tokens,
        tensor_parallel=max(1, info.tensor_parallel),
        kv_transfer=KvTransfer.STORAGE if info.kv_transfer == engine_pb2.KV_TRANSFER_STORAGE else KvTransfer.PREFILL,
        kv_bytes_per_token=info.kv_bytes_per_token,
        hardware_tags=tuple(info.hardware_tags),
        decode_curve=DecodeCurve(curve.base_s, curve.per_sequence_s, curve.per_kv_token_s, prefill)
        if declared
        else DecodeCurve(prefill_tokens_per_s=prefill),
    )


def curve_message(curve: DecodeCurve) -> engine_pb2.DecodeCurve:
    """A curve as a message."""
    return engine_pb2.DecodeCurve(
        base_s=curve.base_s,
        per_sequence_s=curve.per_sequence_s,
        per_kv_token_s=curve.per_kv_token_s,
        prefill_tokens_per_s=curve.prefill_tokens_per_s,
    )


def engine_info(spec: EngineSpec) -> engine_pb2.EngineInfo:
    """What an engine is, as a message."""
    return engine_pb2.EngineInfo(
        engine_id=spec.engine_id,
        address=spec.address,
        model=spec.model,
        weight_version=spec.weight_version,
        slot_limit=spec.slot_limit,
        kv_tokens_capacity=spec.kv_tokens_capacity,
        max_context_tokens=spec.max_context_tokens,
        tensor_parallel=spec.tensor_parallel,
        kv_transfer=KV_TRANSFERS[spec.kv_transfer],
        kv_bytes_per_token=spec.kv_bytes_per_token,
        hardware_tags=spec.hardware_tags,
        decode_curve=curve_message(spec.decode_curve),
    )


def engine_load(load: engine_pb2.Load) -> EngineLoad:
    """What a sidecar measured."""
    return EngineLoad(
        running_steps=load.running_steps,
        waiting_steps=load.waiting_steps,
        slot_limit=load.slot_limit,
        kv_tokens_used=load.kv_tokens_used,
        kv_tokens_capacity=load.kv_tokens_capacity,
        decode_tokens_per_s=load.decode_tokens_per_s,
        paused=load.paused,
        weight_version=load.weight_version,
        oldest_wait_s=load.oldest_wait_s,
        measured_s=seconds(load.measured_at),
        engine_healthy=load.engine_healthy,
    )


def load_message(load: EngineLoad) -> engine_pb2.Load:
    """A load as a message."""
    return engine_pb2.Load(
        running_steps=load.running_steps,
        waiting_steps=load.waiting_steps,
        slot_limit=load.slot_limit,
        kv_tokens_used=load.kv_tokens_used,
        kv_tokens_capacity=load.kv_tokens_capacity,
        decode_tokens_per_s=load.decode_tokens_per_s,
        paused=load.paused,
        weight_version=load.weight_version,
        oldest_wait_s=load.oldest_wait_s,
        measured_at=timestamp(load.measured_s),
        engine_healthy=load.engine_healthy,
    )


def registered_engine(record: EngineRecord, trajectories: int) -> pb.RegisteredEngine:
    """An engine of the registry as a message; `trajectories` are the open ones on it."""
    message = pb.RegisteredEngine(
        info=engine_info(record.spec),
        lease_expires_at=timestamp(record.lease_expires_s),
        trajectories=trajectories,
    )
    if record.load is not None:
        message.load.CopyFrom(load_message(record.load))
    return message
