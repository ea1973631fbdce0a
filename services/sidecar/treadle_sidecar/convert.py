"""Between protobuf messages and the sidecar's dataclasses. Validation of single fields stands here too, beside the
field's name.
"""

import math
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from treadle.common.v1 import tokens_pb2
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.engine.v1 import engine_pb2
from treadle_runtime.errors import identifier, non_negative, positive, require

from treadle_sidecar.config import SidecarSettings
from treadle_sidecar.engine.client import EngineProfile
from treadle_sidecar.steps.step import (
    Finished,
    PauseMode,
    Preempted,
    Reason,
    Sampling,
    Span,
    Started,
    StepOrder,
    Timing,
    Tokens,
)

if TYPE_CHECKING:
    from treadle_sidecar.kv.prefixes import Export, Prefetched

INT32_BYTES = 4
MOST_STOP_STRINGS = 32  # SGLang's MAX_STOP_COUNT
_REASONS: Mapping[Reason, engine_pb2.FinishReason.ValueType] = {
    Reason.STOP: engine_pb2.FINISH_REASON_STOP,
    Reason.LENGTH: engine_pb2.FINISH_REASON_LENGTH,
    Reason.ABORTED: engine_pb2.FINISH_REASON_ABORTED,
}
_MODES = {engine_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT, engine_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP}


def step_order(request: engine_pb2.GenerateRequest) -> StepOrder:
    """A validated order; which tokens and lengths the engine takes is checked where the engine is known."""
    ticket = request.ticket
    require(math.isfinite(ticket.priority), "ticket.priority", f"must be a finite number, is {ticket.priority}")
    prompt = token_ids("prompt", request.prompt)
    require(prompt, "prompt", "must have at least one token")
    return StepOrder(
        ticket_id=identifier("ticket.ticket_id", ticket.ticket_id),
        trajectory_id=identifier("ticket.trajectory_id", ticket.trajectory_id),
        turn=int(non_negative("ticket.turn", ticket.turn)),
        priority=ticket.priority,
        prompt=prompt,
        resumed=token_ids("resumed_output", request.resumed_output),
        sampling=sampling(request.sampling),
        preemptible=ticket.preemptible or not ticket.HasField("preemptible"),
    )


def ticket_expiry(ticket: Ticket) -> float:
    """Unix seconds."""
    require(ticket.HasField("expires_at"), "ticket.expires_at", "must be set")
    return ticket.expires_at.ToNanoseconds() / 1e9


def sampling(message: tokens_pb2.SamplingParams) -> Sampling:
    """Raises InvalidArgument naming sampling.<field>."""

    def given(name: str) -> bool:
        return message.HasField(name)  # type: ignore[arg-type]

    positive("sampling.max_new_tokens", message.max_new_tokens)
    if given("temperature"):
        non_negative("sampling.temperature", message.temperature)
    require(not given("top_p") or 0 < message.top_p <= 1, "sampling.top_p", f"must be in (0, 1], is {message.top_p}")
    require(
        not given("top_k") or message.top_k >= 1 or message.top_k == -1,
        "sampling.top_k",
        f"must be >= 1, or -1 for all, is {message.top_k}",
    )
    require(not given("min_p") or 0 <= message.min_p <= 1, "sampling.min_p", f"must be in [0, 1], is {message.min_p}")
    require(not given("seed") or message.seed >= 0, "sampling.seed", f"must be >= 0, is {message.seed}")
    require(len(message.stop) <= MOST_STOP_STRINGS, "sampling.stop", f"must be {MOST_STOP_STRINGS} strings at most")
    require(all(message.stop), "sampling.stop", "must not hold an empty string")
    require(
        all(token >= 0 for token in message.stop_token_ids), "sampling.stop_token_ids", "must not hold a negative id"
    )
    return Sampling(
        max_new_tokens=message.max_new_tokens,
        temperature=message.temperature if given("temperature") else None,
        top_p=message.top_p if given("top_p") else None,
        top_k=message.top_k if given("top_k") else None,
        min_p=message.min_p if given("min_p") else None,
        seed=message.seed if given("seed") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def token_ids(field: str, message: tokens_pb2.TokenIds) -> "array[int]":
    """Raises InvalidArgument where the bytes are no int32 array, or an id is negative."""
    require(len(message.int32_le) % INT32_BYTES == 0, f"{field}.int32_le", "must be a multiple of 4 bytes long")
    ids = array("i")
    ids.frombytes(message.int32_le)
    require(min(ids, default=0) >= 0, f"{field}.int32_le", "must not hold a negative id")
    return ids


def packed(ids: "array[int]") -> tokens_pb2.TokenIds:
    """As they travel."""
    return tokens_pb2.TokenIds(int32_le=ids.tobytes())


def pause_mode(mode: engine_pb2.PauseMode.ValueType) -> PauseMode:
    """Raises InvalidArgument for mode."""
    require(mode in _MODES, "mode", "must be PAUSE_MODE_ABORT or PAUSE_MODE_KEEP")
    return _MODES[mode]


def generate_response(event: Started | Tokens | Preempted | Finished) -> engine_pb2.GenerateResponse:
    """One event of the stream."""
    if isinstance(event, Tokens):
        return engine_pb2.GenerateResponse(
            tokens=engine_pb2.TokenChunk(
                offset=event.offset,
                token_ids=packed(event.token_ids),
                logprobs=tokens_pb2.Logprobs(float32_le=event.logprobs.tobytes()),
                weight_version=event.weight_version,
            )
        )
    if isinstance(event, Started):
        return engine_pb2.GenerateResponse(
            started=engine_pb2.StepStarted(queue_time=duration(event.queue_s), attempt=event.attempt)
        )
    if isinstance(event, Preempted):
        return engine_pb2.GenerateResponse(
            preempted=engine_pb2.StepPreempted(output_tokens=event.output_tokens, by_ticket_id=event.by)
        )
    return engine_pb2.GenerateResponse(
        finished=engine_pb2.StepFinished(
            reason=finish_reason(event.reason),
            output_tokens=event.output_tokens,
            version_spans=[_span(span) for span in event.spans],
            timing=timing(event.timing),
            cached_tokens=event.cached_tokens,
            preemptions=event.preemptions,
            resumed_prompt_tokens=event.resumed_prompt_tokens,
            resumed_cached_tokens=event.resumed_cached_tokens,
        )
    )


def finish_reason(reason: Reason) -> engine_pb2.FinishReason.ValueType:
    """The wire's name of it."""
    return _REASONS[reason]


def timing(value: Timing) -> engine_pb2.StepTiming:
    """Durations and timestamps."""
    return engine_pb2.StepTiming(
        queue=duration(value.queue_s),
        prefill=duration(value.prefill_s),
        decode=duration(value.decode_s),
        accepted_at=timestamp(value.accepted_at),
        finished_at=timestamp(value.finished_at),
    )


def engine_info(settings: SidecarSettings, profile: EngineProfile, address: str, slots: int) -> engine_pb2.EngineInfo:
    """What the scheduler is told."""
    return engine_pb2.EngineInfo(
        engine_id=settings.engine_id,
        address=address,
        model=profile.model_path,
        weight_version=profile.weight_version,
        slot_limit=slots,
        kv_tokens_capacity=profile.kv_tokens,
        max_context_tokens=profile.max_sequence_tokens,
        tensor_parallel=profile.tensor_parallel,
        kv_transfer=engine_pb2.KV_TRANSFER_STORAGE if profile.storage else engine_pb2.KV_TRANSFER_PREFILL,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        hardware_tags=settings.hardware_tags,
        decode_curve=engine_pb2.DecodeCurve(
            base_s=settings.decode_base_s,
            per_sequence_s=settings.decode_per_sequence_s,
            per_kv_token_s=settings.decode_per_kv_token_s,
            prefill_tokens_per_s=settings.prefill_tokens_per_s,
        ),
    )


def prefetch_response(done: "Prefetched") -> engine_pb2.PrefetchPrefixResponse:
    """What a prefetch found."""
    return engine_pb2.PrefetchPrefixResponse(
        prefix_tokens=done.prefix_tokens,
        tokens_from_cache=done.from_cache,
        tokens_from_storage=done.from_storage,
        tokens_prefilled=done.prefilled,
        elapsed=duration(done.elapsed_s),
    )


def export_response(export: "Export", *, counts_only: bool = False) -> engine_pb2.ExportPrefixResponse:
    """A trajectory's context, or its counts."""
    return engine_pb2.ExportPrefixResponse(
        token_ids=None if counts_only else packed(export.token_ids),
        cache_salt=export.cache_salt,
        stored_tokens=export.stored_tokens,
        prefix_tokens=len(export.token_ids),
    )


def duration(seconds: float) -> Duration:
    """Not below 0."""
    message = Duration()
    message.FromNanoseconds(max(round(seconds * 1e9), 0))
    return message


def timestamp(unix_s: float) -> Timestamp:
    """Of Unix seconds."""
    message = Timestamp()
    message.FromNanoseconds(round(unix_s * 1e9))
    return message


def _span(span: Span) -> tokens_pb2.VersionSpan:
    return tokens_pb2.VersionSpan(weight_version=span.weight_version, start_token=span.start, end_token=span.end)
