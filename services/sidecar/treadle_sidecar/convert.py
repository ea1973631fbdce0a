"""Check requests and turn them into the sidecar's orders; describe the engine; build the sidecar's
facts.

A function that takes a request raises InvalidArgument naming the field that is wrong.
"""

import json
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

from treadle.common.v1 import tokens_pb2
from treadle.common.v1.ticket_pb2 import Ticket
from treadle.engine.v1 import engine_pb2 as pb
from treadle.telemetry.v1 import facts_pb2 as facts
from treadle_core.model import INCOMPLETE, DecodeCurve
from treadle_runtime.config import is_loopback
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import (
    endpoint,
    finite,
    identifier,
    non_negative,
    optional_identifier,
    require,
    require_timestamp,
    seconds,
)
from treadle_runtime.http.sglang import SAMPLING

from treadle_sidecar.config import SidecarSettings
from treadle_sidecar.engine.watch import ASLEEP, MEMORY, EngineProfile
from treadle_sidecar.step import StepOrder

INT32_BYTES = 4
DEFAULT_TOKEN_INTERVAL_S = (
    0.05  # a caller's process takes in some 10,000 messages a second, of all its steps together
)
LONGEST_TOKEN_INTERVAL_S = 10.0  # what is not sent is lost with the sidecar
# The prompt is published with the first step alone; a trajectory's length depends on it most.
PROMPT_SHARE = 4


@dataclass(frozen=True)
class PushPart:
    """Part of pushed weights. way: distributed, tensor or ipc; empty: nothing but the end. body:
    SGLang's own."""

    push_id: str
    weight_version: str
    index: int
    way: str
    body: Mapping[str, Any]
    last: bool


def step_order(request: pb.GenerateRequest) -> StepOrder:
    """Return the step's order. Tokens and lengths are checked later, where the engine is known."""
    ticket = request.ticket
    return StepOrder(
        ticket_id=identifier("ticket.ticket_id", ticket.ticket_id),
        trajectory_id=identifier("ticket.trajectory_id", ticket.trajectory_id),
        turn=non_negative("ticket.turn", ticket.turn),
        priority=finite("ticket.priority", ticket.priority),
        prompt=some_token_ids("prompt", request.prompt),
        resumed=token_ids("resumed_output", request.resumed_output),
        sampling=sampling(request.sampling),
        preemptible=ticket.preemptible or not ticket.HasField("preemptible"),
        token_interval_s=token_interval(request),
        job=optional_identifier("ticket.job", ticket.job),
        job_weight=non_negative("ticket.job_weight", ticket.job_weight) or 1.0,
    )


def token_interval(request: pb.GenerateRequest) -> float:
    """Return the seconds for which sampled tokens are gathered."""
    if not request.HasField("token_interval"):
        return DEFAULT_TOKEN_INTERVAL_S
    interval_s = seconds(request.token_interval)
    allowed = 0 <= interval_s <= LONGEST_TOKEN_INTERVAL_S
    require(
        allowed,
        "token_interval",
        f"must be from 0 to {LONGEST_TOKEN_INTERVAL_S:g} s, is {interval_s:g} s",
    )
    return interval_s


def ticket_expiry(ticket: Ticket) -> float:
    """Return when the ticket expires, in Unix seconds."""
    require(ticket.HasField("expires_at"), "ticket.expires_at", "must be set")
    return require_timestamp("ticket.expires_at", ticket.expires_at)


def sampling(given: tokens_pb2.SamplingParams) -> tokens_pb2.SamplingParams:
    """Return the parameters as given, once each is in its range."""
    require(given.max_new_tokens, "sampling.max_new_tokens", "must be > 0, is 0")
    for field, value in given.ListFields():
        problem = SAMPLING[field.name].problem(value)
        require(not problem, f"sampling.{field.name}", problem)
    return given


def ends_steps(mode: pb.PauseMode.ValueType) -> bool:
    """Return whether a pause ends the steps."""
    known = (pb.PAUSE_MODE_ABORT, pb.PAUSE_MODE_KEEP)
    require(mode in known, "mode", "must be PAUSE_MODE_ABORT or PAUSE_MODE_KEEP")
    return mode == pb.PAUSE_MODE_ABORT


def weight_version(given: str) -> str:
    """Return the version as given, unless an engine uses that name while its weights are incomplete
    or asleep."""
    own = (INCOMPLETE, ASLEEP)
    require(
        not given.startswith(own),
        "weight_version",
        f"must not begin with {' or '.join(own)}, is {given!r}",
    )
    return identifier("weight_version", given)


def push_part(request: pb.PushWeightsRequest) -> PushPart:
    way = request.WhichOneof("body") or ""
    require(
        way or request.last,
        "body",
        "must be set, but for the last part: distributed, tensor or ipc",
    )
    body = {}
    if way:
        try:
            body = json.loads(getattr(request, way))
        except ValueError as error:
            require(False, way, f"must be SGLang's request as JSON: {error}")
        require(isinstance(body, dict), way, "must be SGLang's request: a JSON object")
    return PushPart(
        push_id=identifier("push_id", request.push_id),
        weight_version=weight_version(request.weight_version),
        index=non_negative("part", request.part),
        way=way,
        body=body,
        last=request.last,
    )


def group(request: pb.JoinWeightsGroupRequest) -> dict[str, object]:
    """Return SGLang's request to join the group."""
    host, _, port = endpoint("master_address", request.master_address).rpartition(":")
    inside = 0 < request.rank_offset < request.world_size
    require(
        inside,
        "rank_offset",
        f"must be in [1, world_size), is {request.rank_offset} of {request.world_size}",
    )
    return {
        "master_address": host.strip("[]"),
        "master_port": int(port),
        "rank_offset": request.rank_offset,
        "world_size": request.world_size,
        "group_name": identifier("group_name", request.group_name),
        "backend": request.backend or "nccl",
    }


def memory_tags(tags: Iterable[str]) -> frozenset[str]:
    """Return the tags of the memory as given; none stands for all."""
    unknown = sorted(set(tags) - set(MEMORY))
    require(not unknown, "tags", f"must be of {', '.join(MEMORY)}; not {', '.join(unknown)}")
    return frozenset(tags)


def prefix_source(request: pb.PrefetchPrefixRequest) -> "array[int] | pb.PrefixRef":
    """Return the prefix's token ids, or the sidecar that has them."""
    kind = request.WhichOneof("prefix")
    require(kind, "prefix", "must be set: token_ids or from")
    if kind == "token_ids":
        return some_token_ids("token_ids", request.token_ids)
    reference: pb.PrefixRef = getattr(request, "from")
    identifier("from.trajectory_id", reference.trajectory_id)
    endpoint("from.engine_address", reference.engine_address)
    return reference


def token_ids(field: str, message: tokens_pb2.TokenIds) -> "array[int]":
    require(
        len(message.int32_le) % INT32_BYTES == 0,
        f"{field}.int32_le",
        "must be a multiple of 4 bytes long",
    )
    ids = array("i")
    ids.frombytes(message.int32_le)
    require(min(ids, default=0) >= 0, f"{field}.int32_le", "must not hold a negative id")
    return ids


def some_token_ids(field: str, message: tokens_pb2.TokenIds) -> "array[int]":
    """Return token ids as `token_ids` does, and refuse a field without any."""
    ids = token_ids(field, message)
    require(ids, field, "must have at least one token")
    return ids


def packed(ids: "array[int]") -> tokens_pb2.TokenIds:
    return tokens_pb2.TokenIds(int32_le=ids.tobytes())


def declared_curve(settings: SidecarSettings) -> DecodeCurve | None:
    """Return the decode curve that the settings declare; None where they declare none."""
    if settings.decode_base_s + settings.decode_per_sequence_s <= 0:
        return None
    return DecodeCurve(
        *(settings.decode_base_s, settings.decode_per_sequence_s, settings.decode_per_kv_token_s),
        *(settings.prefill_tokens_per_s, settings.prefill_pair_s),
    )


def curve_message(curve: DecodeCurve | None) -> pb.DecodeCurve | None:
    return pb.DecodeCurve(**asdict(curve)) if curve is not None else None


def engine_info(
    settings: SidecarSettings,
    profile: EngineProfile,
    address: str,
    slots: int,
    curve: pb.DecodeCurve | None,
) -> pb.EngineInfo:
    """Return what the sidecar registers at the scheduler. curve: None where it is not known."""
    return pb.EngineInfo(
        engine_id=settings.engine_id,
        address=address,
        model=profile.model_path,
        weight_version=profile.weight_version,
        slot_limit=slots,
        kv_tokens_capacity=profile.kv_tokens,
        host_kv_tokens=profile.host_kv_tokens,
        max_context_tokens=profile.max_sequence_tokens,
        tensor_parallel=profile.tensor_parallel,
        kv_transfer=pb.KV_TRANSFER_STORAGE if profile.storage else pb.KV_TRANSFER_PREFILL,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        hardware_tags=settings.hardware_tags,
        decode_curve=curve,
        url=_public_url(settings.engine_url, address),
    )


def _public_url(engine_url: str, address: str) -> str:
    """Return the engine's URL for the gateway; empty where other machines reach the sidecar but not
    its engine: the URL would lead them to themselves."""
    parts = urlsplit(engine_url)
    private = is_loopback(f"{parts.hostname}:{parts.port or 0}") and not is_loopback(address)
    return "" if private else engine_url


class StepFacts:
    """Builder of the facts of one engine.

    published_tokens: most ids of a step's output that its fact carries, for predictors that read
    text; 0 for none. It carries as many of the observation and PROMPT_SHARE times as many of the
    prompt.
    """

    def __init__(self, engine_id: str, published_tokens: int = 0) -> None:
        self._engine_id = engine_id
        self._published = published_tokens
        self._source = f"sidecar/{engine_id}"

    def queued(self, order: StepOrder) -> facts.Fact:
        context_tokens = len(order.prompt) + len(order.resumed)
        fact = facts.StepQueued(
            step=self._step(order), priority=order.priority, context_tokens=context_tokens
        )
        return make_fact(self._source, step_queued=fact)

    def started(self, order: StepOrder, event: pb.StepStarted) -> facts.Fact:
        fact = facts.StepStarted(
            step=self._step(order),
            queue_time=event.queue_time,
            attempt=event.attempt,
            prompt=self._prompt(order),
        )
        return make_fact(self._source, step_started=fact)

    def preempted(self, order: StepOrder, event: pb.StepPreempted) -> facts.Fact:
        fact = facts.StepPreempted(
            step=self._step(order),
            output_tokens=event.output_tokens,
            by_ticket_id=event.by_ticket_id,
        )
        return make_fact(self._source, step_preempted=fact)

    def finished(
        self,
        order: StepOrder,
        event: pb.StepFinished,
        output: "array[int]",
        before: "array[int] | None",
    ) -> facts.Fact:
        """Return the fact of a finished step.

        before: the trajectory's context after its last step here, None where there was none.
        """
        fact = facts.StepFinished(
            step=self._step(order),
            reason=event.reason,
            context_tokens=len(order.prompt),
            output_tokens=event.output_tokens,
            cached_tokens=event.cached_tokens,
            timing=event.timing,
            preemptions=event.preemptions,
            tokens=self._tokens(order, output, before),
        )
        return make_fact(self._source, step_finished=fact)

    def weights_updated(self, weight_version: str) -> facts.Fact:
        fact = facts.WeightsUpdated(engine_id=self._engine_id, weight_version=weight_version)
        return make_fact(self._source, weights_updated=fact)

    def _step(self, order: StepOrder) -> facts.StepRef:
        return facts.StepRef(
            ticket_id=order.ticket_id,
            trajectory_id=order.trajectory_id,
            turn=order.turn,
            engine_id=self._engine_id,
        )

    def _tokens(
        self, order: StepOrder, output: "array[int]", before: "array[int] | None"
    ) -> facts.StepTokens | None:
        if not self._published:
            return None
        tokens = facts.StepTokens(
            output=packed(ends(output, self._published)), prompt=self._prompt(order)
        )
        if order.turn and before is not None and len(before) <= len(order.prompt):
            observation = order.prompt[len(before) :]
            tokens.observation.CopyFrom(packed(ends(observation, self._published)))
            tokens.observation_tokens = len(observation)
        return tokens

    def _prompt(self, order: StepOrder) -> tokens_pb2.TokenIds | None:
        """Return the prompt's ids for the first step's fact; None after that step."""
        if not self._published or order.turn:
            return None
        return packed(ends(order.prompt, PROMPT_SHARE * self._published))


def ends(ids: "array[int]", most: int) -> "array[int]":
    """Return the first and the last ids, `most` in all."""
    if len(ids) <= most:
        return ids
    head = (most + 1) // 2
    return ids[:head] + ids[len(ids) - (most - head) :]
