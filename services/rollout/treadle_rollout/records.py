"""What the log of a rollout holds: its creation, then every event of its buffer, as JSON.

Stored records outlive this version of the program: names are only added, never renamed or given another meaning.
"""

import json
import zlib
from dataclasses import dataclass
from typing import Any

from treadle_core.rollouts.buffer import (
    Advanced,
    Arrived,
    Batch,
    Cancelled,
    DropReason,
    Event,
    RolloutSpec,
    Sample,
    Verdict,
)

# A rollout of thousands of prompts, or a batch of them, comes near NATS's 1 MiB; ids compress to a fraction.
COMPRESS_FROM_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Created:
    """The first record of a log."""

    rollout_id: str
    spec: RolloutSpec
    request_id: str  # a repeat of this request finds its own rollout, not somebody else's


@dataclass(frozen=True, slots=True)
class Record:
    """One entry.

    `at_s` is Unix time; `request` is the fingerprint of the request behind a batch; `payload` names a sample's
    tokens.
    """

    at_s: float
    body: Created | Event
    request: str = ""
    payload: str = ""


def encode(record: Record) -> bytes:
    """JSON of a record, compressed where it is long."""
    kind, fields = _fields_of(record.body)
    document = {"kind": kind, "at_s": record.at_s, **fields}
    if record.request:
        document["request"] = record.request
    if record.payload:
        document["payload"] = record.payload
    data = json.dumps(document, separators=(",", ":")).encode()
    return data if len(data) < COMPRESS_FROM_BYTES else zlib.compress(data)


def decode(data: bytes) -> Record:
    """The record of its JSON. Raises ValueError or KeyError where it is none of ours."""
    document = json.loads(data if data.startswith(b"{") else zlib.decompress(data))
    return Record(
        at_s=float(document["at_s"]),
        body=_body_of(document),
        request=document.get("request", ""),
        payload=document.get("payload", ""),
    )


def _fields_of(body: Created | Event) -> tuple[str, dict[str, Any]]:
    match body:
        case Created():
            spec = {name: getattr(body.spec, name) for name in RolloutSpec.__slots__}
            return "created", {"rollout_id": body.rollout_id, "spec": spec, "request_id": body.request_id}
        case Arrived():
            reason = body.verdict.drop_reason
            sample = {name: getattr(body.sample, name) for name in Sample.__slots__}
            verdict = {"drop_reason": reason and reason.value, "group_settled": body.verdict.group_settled}
            return "arrived", {"sample": sample, "verdict": verdict}
        case Advanced():
            return "advanced", {"version": body.version, "stale": body.stale}
        case Batch():
            return "batch", {"batch_id": body.batch_id, "groups": body.groups, "exhausted": body.exhausted}
        case Cancelled():
            return "cancelled", {"dropped": body.dropped}


def _body_of(document: dict[str, Any]) -> Created | Event:
    match document["kind"]:
        case "created":
            spec = {**document["spec"], "prompt_ids": tuple(document["spec"]["prompt_ids"])}
            return Created(document["rollout_id"], RolloutSpec(**spec), document["request_id"])
        case "arrived":
            verdict = document["verdict"]
            reason = verdict["drop_reason"]
            return Arrived(
                Sample(**document["sample"]),
                Verdict(None if reason is None else DropReason(reason), verdict["group_settled"]),
            )
        case "advanced":
            return Advanced(document["version"], tuple(document["stale"]))
        case "batch":
            groups = tuple((prompt_id, tuple(trajectory_ids)) for prompt_id, trajectory_ids in document["groups"])
            return Batch(document["batch_id"], groups, document["exhausted"])
        case "cancelled":
            return Cancelled(tuple(document["dropped"]))
        case kind:
            raise ValueError(f"no such record: {kind!r}")
