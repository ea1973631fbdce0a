"""An attempt's request to the engine: what is left to sample, and when a cut step is over without another attempt."""

import hashlib
import uuid
from array import array
from dataclasses import dataclass

from treadle_runtime.errors import InvalidArgument, require

from treadle_sidecar.engine.client import EngineProfile, EngineRequest
from treadle_sidecar.steps.record import StepRecord
from treadle_sidecar.steps.step import Reason, StepOrder

SEED_BYTES = 7  # below SGLang's limit of 63 bits


@dataclass(frozen=True)
class Limits:
    """Where the step ends: output tokens in all, and the tokens that end it."""

    output_tokens: int
    end_token_ids: frozenset[int]


def limits(order: StepOrder, profile: EngineProfile) -> Limits:
    """Raises InvalidArgument for what this engine cannot take, in particular for token ids that would kill it."""
    room = profile.max_sequence_tokens - len(order.prompt)
    require(
        room > 0,
        "prompt",
        f"has {len(order.prompt)} tokens; the engine takes {profile.max_sequence_tokens} with the output",
    )
    check_ids("prompt", order.prompt, profile)
    check_ids("resumed_output", order.resumed, profile)
    if profile.deterministic and order.sampling.min_p:
        raise InvalidArgument("sampling.min_p", "must be 0 on an engine with deterministic inference")
    ends = (
        frozenset() if order.sampling.ignore_eos else profile.end_token_ids | frozenset(order.sampling.stop_token_ids)
    )
    return Limits(min(order.sampling.max_new_tokens, room), ends)


def check_ids(field: str, token_ids: "array[int]", profile: EngineProfile) -> None:
    """Raises InvalidArgument for an id outside the vocabulary: the engine would die of it."""
    highest = max(token_ids, default=0)
    known = profile.vocab_size
    require(not known or highest < known, f"{field}.int32_le", f"must hold ids below {known}, holds {highest}")


def over(record: StepRecord, limit: Limits) -> Reason | None:
    """Why a step that was cut here needs no further attempt; None where it does. An abort can overtake the engine's
    own end.
    """
    if record.output and record.output[-1] in limit.end_token_ids:
        return Reason.STOP
    if len(record.output) >= limit.output_tokens:
        return Reason.LENGTH
    return None


def attempt_request(record: StepRecord, limit: Limits, weight_version: str) -> EngineRequest:
    """Prompt and output so far, and the tokens that are left. The salt is the engine's weight version, whatever the
    ticket said.
    """
    order, sampling = record.order, record.order.sampling
    params: dict[str, object] = {
        "max_new_tokens": limit.output_tokens - len(record.output),
        "ignore_eos": sampling.ignore_eos,
        "sampling_seed": _default_seed(order) if sampling.seed is None else sampling.seed,
        "skip_special_tokens": False,
    }
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = getattr(sampling, name)
        if value is not None:
            params[name] = value
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    # The random part comes first and has a fixed length, so that no rid is the beginning of another.
    rid = f"{uuid.uuid4().hex}-{order.ticket_id}"
    return EngineRequest(rid, record.context.tolist(), params, weight_version)


def _default_seed(order: StepOrder) -> int:
    # An engine that honours seeds gives all requests without one the same; siblings of a group would sample the same
    # text.
    digest = hashlib.sha256(f"{order.trajectory_id}/{order.turn}".encode()).digest()
    return int.from_bytes(digest[:SEED_BYTES], "big")
