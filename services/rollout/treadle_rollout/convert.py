"""Convert between the messages of the contract and the core's values, and check those of a
request."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np
import numpy.typing as npt
from treadle.common.v1.tokens_pb2 import Logprobs, TokenIds, VersionSpan
from treadle.rollout.v1 import rollout_pb2 as pb
from treadle.scheduler.v1.scheduler_pb2 import OUTCOME_CANCELLED
from treadle.telemetry.v1.facts_pb2 import Fact, GroupSettled
from treadle_core.rollouts.buffer import Aborted, Batch, SampleBuffer
from treadle_core.rollouts.group import Group, Sample, Verdict
from treadle_core.rollouts.length_cap import CutReward
from treadle_core.rollouts.spec import RolloutSpec
from treadle_runtime.facts import make_fact
from treadle_runtime.fields import (
    finite,
    identifier,
    non_negative,
    number_of,
    positive,
    require,
    require_duration,
    seconds,
    timestamp,
)

from treadle_rollout.convert_shaping import cap_from, fill_shaping, redundancy_from, selection_from
from treadle_rollout.rollouts import BatchRequest, Rollout
from treadle_rollout.running import ITEM_BYTES, Ended, Stretch

MOST_PARTS = 65_536  # far more ranks than one trainer has
NO_BOUND = -1  # value of max_staleness on the wire
# SGLang's name for the weights that it was launched with, unless --weight-version names them.
LAUNCH_VERSION = "default"


def spec_from(spec: pb.RolloutSpec) -> RolloutSpec:
    """Return the spec of a request, where keep 0 is all, staleness -1 and other numbers 0 no bound.
    Raises InvalidArgument."""
    positive("spec.samples_per_prompt", spec.samples_per_prompt)
    require(
        0 <= spec.keep_per_prompt <= spec.samples_per_prompt,
        "spec.keep_per_prompt",
        f"must be 0 (all) or 1..samples_per_prompt ({spec.samples_per_prompt}), is "
        f"{spec.keep_per_prompt}",
    )
    require(
        spec.max_staleness >= -1,
        "spec.max_staleness",
        f"must be >= 0, or -1 for no bound, is {spec.max_staleness}",
    )
    non_negative("spec.max_total_tokens", spec.max_total_tokens)
    prompts, keep = len(spec.prompt_ids), spec.keep_per_prompt or spec.samples_per_prompt
    require(prompts, "spec.prompt_ids", "must name at least one prompt")
    for index, prompt_id in enumerate(spec.prompt_ids):
        identifier(f"spec.prompt_ids[{index}]", prompt_id)
    require(len(set(spec.prompt_ids)) == prompts, "spec.prompt_ids", "must be distinct")
    require(
        len(spec.samples) in (0, prompts),
        "spec.samples",
        f"must be empty, or one number for each of {prompts} prompts, has {len(spec.samples)}",
    )
    for index, samples in enumerate(spec.samples):
        require(
            samples >= keep,
            f"spec.samples[{index}]",
            f"must be keep_per_prompt ({keep}) or more, is {samples}",
        )
    require(
        0 <= spec.keep_groups <= prompts,
        "spec.keep_groups",
        f"must be 0 (all) or 1..{prompts} (prompts)",
    )
    non_negative("spec.max_open_groups", spec.max_open_groups)
    bounded, all_groups = spec.max_staleness != NO_BOUND, not spec.keep_groups
    require(not spec.replace_stale or bounded, "spec.replace_stale", "needs max_staleness >= 0")
    require(
        not spec.replace_stale or all_groups,
        "spec.replace_stale",
        "needs keep_groups = 0: all groups",
    )
    non_negative("spec.batch_groups", spec.batch_groups)
    paced = spec.batch_groups > 0
    require(not paced or bounded, "spec.batch_groups", "needs max_staleness >= 0")
    require(not paced or all_groups, "spec.batch_groups", "needs keep_groups = 0: all groups")
    non_negative("spec.samples_in_flight", spec.samples_in_flight)
    require(paced or not spec.samples_in_flight, "spec.samples_in_flight", "needs batch_groups")
    has_history = bool(spec.HasField("redundancy") or spec.HasField("length_cap"))
    require(
        spec.history or not has_history,
        "spec.history",
        "must be given with redundancy or length_cap",
    )
    return RolloutSpec(
        prompt_ids=tuple(spec.prompt_ids),
        samples_per_prompt=spec.samples_per_prompt,
        keep_per_prompt=keep,
        max_staleness=None if spec.max_staleness == NO_BOUND else spec.max_staleness,
        max_total_tokens=spec.max_total_tokens or None,
        selection=selection_from(spec.selection, keep),
        samples=tuple(spec.samples),
        keep_groups=spec.keep_groups or None,
        max_open_groups=spec.max_open_groups or None,
        replace_stale=spec.replace_stale,
        batch_groups=spec.batch_groups or None,
        samples_in_flight=spec.samples_in_flight or None,
        history=identifier("spec.history", spec.history) if spec.history else "",
        redundancy=redundancy_from(spec, keep) if spec.HasField("redundancy") else None,
        cap=cap_from(spec.length_cap) if spec.HasField("length_cap") else None,
    )


def spec_to(spec: RolloutSpec) -> pb.RolloutSpec:
    """Return the spec as it is in force: keep_per_prompt is never 0, and a selection is there where
    it is not the default."""
    message = pb.RolloutSpec(
        prompt_ids=spec.prompt_ids,
        samples_per_prompt=spec.samples_per_prompt,
        keep_per_prompt=spec.keep_per_prompt,
        max_staleness=NO_BOUND if spec.max_staleness is None else spec.max_staleness,
        max_total_tokens=spec.max_total_tokens or 0,
        samples=spec.samples if spec.redundancy is None else (),
        history=spec.history,
        keep_groups=spec.keep_groups or 0,
        max_open_groups=spec.max_open_groups or 0,
        replace_stale=spec.replace_stale,
        batch_groups=spec.batch_groups or 0,
        samples_in_flight=spec.samples_in_flight or 0,
    )
    fill_shaping(message, spec)
    return message


def watch_to(rollout: Rollout, since_revision: int | None) -> pb.WatchRolloutResponse:
    """Return the next message of a watch that has sent `since_revision`, or nothing yet."""
    message = rollout_to(rollout, since_revision)
    if since_revision is not None:
        message.ClearField("spec")  # the spec names every prompt, and never changes
    return pb.WatchRolloutResponse(rollout=message, changes=since_revision is not None)


def rollout_with_samples(rollout: Rollout) -> pb.Rollout:
    """Return the resource as it stands, with each sample that was submitted."""
    message = rollout_to(rollout)
    for status, group in zip(message.groups, rollout.buffer.groups.values(), strict=True):
        for sample, trajectory_id in group.owners.items():
            answer = verdict_to(group.verdicts[trajectory_id])
            status.samples.add(
                sample=sample,
                trajectory_id=trajectory_id,
                kept=answer.kept,
                drop_reason=answer.drop_reason,
            )
    return message


def rollout_to(rollout: Rollout, since_revision: int | None = None) -> pb.Rollout:
    """Return the resource without its samples; where `since_revision` is given, with those of its
    groups that changed after it."""
    buffer = rollout.buffer
    return pb.Rollout(
        rollout_id=rollout.rollout_id,
        spec=spec_to(buffer.spec),
        state=number_of(buffer.state, pb.RolloutState),
        revision=buffer.revision,
        groups=[
            pb.GroupStatus(
                prompt_id=each.prompt_id,
                received=each.received,
                kept=len(each.kept),
                settled=each.settled,
                started=each.started,
            )
            for each in buffer.groups.values()
            if since_revision is None or each.revision > since_revision
        ],
        drops=[
            pb.DropCount(reason=number_of(reason, pb.DropReason), count=count)
            for reason, count in buffer.drops.items()
        ],
        buffered_trajectories=buffer.buffered,
        taken_trajectories=buffer.taken_total,
        created_at=timestamp(rollout.created_at_s),
        groups_admitted=buffer.groups_admitted,
        newest_version=buffer.newest_version,
        length_cap_tokens=buffer.spec.limit_tokens or 0,
    )


def settled_fact(rollout: Rollout, group: Group) -> Fact:
    """Return the fact that no further sample of a group is needed, with the same id each time."""
    settled = GroupSettled(
        rollout_id=rollout.rollout_id, prompt_id=group.prompt_id, samples=group.started
    )
    fact = make_fact("rollout", group_settled=settled)
    # No id may hold a slash, so that no two groups have one fact.
    fact.fact_id = f"group-settled/{rollout.rollout_id}/{group.prompt_id}/{group.started}"
    return fact


def aborted_from(fact: Fact) -> tuple[str, Aborted] | None:
    """Return the rollout and the sample of a trajectory that was ended early; None for one that was
    not, or had no tokens."""
    closed = fact.trajectory_closed
    if not closed.rollout_id or closed.outcome != OUTCOME_CANCELLED or not closed.gen_tokens:
        return None
    return closed.rollout_id, Aborted(closed.prompt_id, closed.trajectory_id, closed.gen_tokens)


def verdict_to(verdict: Verdict) -> pb.SubmitTrajectoryResponse:
    """Return the answer to a submission."""
    reason = verdict.drop_reason
    return pb.SubmitTrajectoryResponse(
        kept=verdict.kept,
        drop_reason=pb.DROP_REASON_UNSPECIFIED
        if reason is None
        else number_of(reason, pb.DropReason),
        group_settled=verdict.group_settled,
    )


def batch_request_from(request: pb.GetBatchRequest, spec: RolloutSpec) -> BatchRequest:
    """Return what the request describes; its fingerprint is the same after a restart. Raises
    InvalidArgument."""
    positive("max_groups", request.max_groups)
    require(
        not request.wait or request.max_groups <= (spec.batch_groups or request.max_groups),
        "max_groups",
        f"must be batch_groups of the rollout ({spec.batch_groups}) or fewer where it waits: no "
        f"more may be open, is {request.max_groups}",
    )
    non_negative("weight_version", request.weight_version)
    require_duration("wait_at_most", request.wait_at_most)
    part, parts = part_from(request)
    whole = pb.GetBatchRequest()
    whole.CopyFrom(request)
    whole.ClearField("part")
    return BatchRequest(
        request_id=identifier("request_id", request.request_id),
        fingerprint=hashlib.sha256(whole.SerializeToString(deterministic=True)).hexdigest()[:16],
        max_groups=request.max_groups,
        weight_version=request.weight_version,
        wait=request.wait,
        wait_at_most_s=seconds(request.wait_at_most) or inf,
        part=part,
        parts=parts,
    )


def part_from(
    request: pb.GetBatchRequest | pb.ConfirmBatchRequest | pb.StreamTokensRequest,
) -> tuple[int, int]:
    """Return which of how many parts the request names. Raises InvalidArgument."""
    require(0 <= request.parts <= MOST_PARTS, "parts", f"must be 0 (one part) or 1..{MOST_PARTS}")
    parts = request.parts or 1
    require(
        0 <= request.part < parts, "part", f"must be 0..{parts - 1} (parts - 1), is {request.part}"
    )
    return request.part, parts


def batch_to(batch: Batch, payloads: Mapping[str, bytes]) -> pb.GetBatchResponse:
    """Return a batch with the stored tokens of its trajectories."""
    response = pb.GetBatchResponse(exhausted=batch.exhausted)
    for prompt_id, trajectory_ids in batch.groups:
        group = response.groups.add(prompt_id=prompt_id)
        for trajectory_id in trajectory_ids:
            group.trajectories.add().ParseFromString(payloads[trajectory_id])
    return response


def sample_from(trajectory: pb.FinishedTrajectory, buffer: SampleBuffer) -> Sample:
    """Return what the buffer of its rollout keeps of a trajectory. Raises InvalidArgument for one
    that no trainer could use.

    A failed trajectory may have no tokens at all; what it has must still fit together.
    """
    spec = buffer.spec
    identifier("trajectory.prompt_id", trajectory.prompt_id)
    require(
        trajectory.prompt_id in buffer.groups,
        "trajectory.prompt_id",
        "must be a prompt of the rollout",
    )
    started = buffer.groups[trajectory.prompt_id].started
    require(
        0 <= trajectory.sample < started,
        "trajectory.sample",
        f"must be 0..{started - 1}, is {trajectory.sample}",
    )
    finite("trajectory.reward", trajectory.reward)
    non_negative("trajectory.turns", trajectory.turns)
    require_duration("trajectory.elapsed", trajectory.elapsed)
    mask = _check_tokens("trajectory", trajectory, may_be_empty=trajectory.failed)
    sampled, cap = int(mask.sum()), spec.limit_tokens
    require(
        cap is None or sampled <= cap,
        "trajectory.tokens",
        f"must hold at most {cap} sampled tokens (length_cap_tokens of the rollout), holds "
        f"{sampled}",
    )
    versions = _check_spans(trajectory.version_spans, mask, bounded=spec.max_staleness is not None)
    cut = spec.cut is not None and trajectory.truncated
    return Sample(
        trajectory_id=identifier("trajectory.trajectory_id", trajectory.trajectory_id),
        prompt_id=trajectory.prompt_id,
        sample=trajectory.sample,
        failed=trajectory.failed,
        oldest_version=min(versions, default=None),
        payload_bytes=trajectory.ByteSize(),
        length_tokens=sampled,
        reward=trajectory.reward,
        truncated=trajectory.truncated,
        left_out=cut and spec.cut is not None and spec.cut.reward is CutReward.IGNORE,
        version_tokens=tuple(sorted(versions.items())),
    )


def stretch_from(chunk: pb.TokenChunk, buffer: SampleBuffer) -> Stretch:
    """Return tokens of a running trajectory. Raises InvalidArgument."""
    identifier("chunk.prompt_id", chunk.prompt_id)
    require(chunk.prompt_id in buffer.groups, "chunk.prompt_id", "must be a prompt of the rollout")
    started, start = buffer.groups[chunk.prompt_id].started, chunk.start_token
    require(
        0 <= chunk.sample < started, "chunk.sample", f"must be 0..{started - 1}, is {chunk.sample}"
    )
    non_negative("chunk.start_token", start)
    mask = _check_tokens("chunk", chunk, may_be_empty=False)
    spans = [
        (span.weight_version, span.start_token, span.end_token) for span in chunk.version_spans
    ]
    for index, (_, low, high) in enumerate(spans):
        inside = start <= low < high <= start + len(mask)
        what = (
            f"must lie within the chunk, {start}..{start + len(mask)}, and not be empty, is "
            f"{low}..{high}"
        )
        require(inside, f"chunk.version_spans[{index}]", what)
    return Stretch(
        trajectory_id=identifier("chunk.trajectory_id", chunk.trajectory_id),
        prompt_id=chunk.prompt_id,
        sample=chunk.sample,
        start=start,
        ids=bytearray(chunk.tokens.int32_le),
        loss_mask=bytearray(chunk.loss_mask),
        logprobs=bytearray(chunk.logprobs.float32_le),
        spans=spans,
    )


def event_to(event: Stretch | Ended) -> pb.StreamTokensResponse:
    """Return the message for a reader of tokens."""
    if isinstance(event, Ended):
        reason = event.drop_reason
        ended = pb.TokensEnded(
            trajectory_id=event.trajectory_id,
            prompt_id=event.prompt_id,
            sample=event.sample,
            kept=reason is None,
            drop_reason=pb.DROP_REASON_UNSPECIFIED
            if reason is None
            else number_of(reason, pb.DropReason),
        )
        return pb.StreamTokensResponse(ended=ended)
    chunk = pb.TokenChunk(
        trajectory_id=event.trajectory_id,
        prompt_id=event.prompt_id,
        sample=event.sample,
        start_token=event.start,
        tokens=TokenIds(int32_le=bytes(event.ids)),
        loss_mask=bytes(event.loss_mask),
        logprobs=Logprobs(float32_le=bytes(event.logprobs)),
        version_spans=[
            VersionSpan(weight_version=version, start_token=low, end_token=high)
            for version, low, high in event.spans
        ],
    )
    return pb.StreamTokensResponse(chunk=chunk)


def _check_tokens(
    name: str, given: pb.FinishedTrajectory | pb.TokenChunk, *, may_be_empty: bool
) -> npt.NDArray[np.uint8]:
    """Return the loss mask of a message that has tokens; `name` is its field. Raises
    InvalidArgument."""
    ids, probabilities = given.tokens.int32_le, given.logprobs.float32_le
    require(
        len(ids) % ITEM_BYTES == 0,
        f"{name}.tokens",
        f"must be {ITEM_BYTES} bytes a token, has {len(ids)} bytes",
    )
    count = len(ids) // ITEM_BYTES
    without = " unless the trajectory failed" if name == "trajectory" else ""
    require(count or may_be_empty, f"{name}.tokens", f"must not be empty{without}")
    require(
        len(given.loss_mask) == count,
        f"{name}.loss_mask",
        f"must have one byte a token ({count}), has {len(given.loss_mask)}",
    )
    require(
        len(probabilities) == count * ITEM_BYTES,
        f"{name}.logprobs",
        f"must have {ITEM_BYTES} bytes for each of {count} tokens, has {len(probabilities)}",
    )
    require(
        count == 0 or np.frombuffer(ids, dtype="<i4").min() >= 0,
        f"{name}.tokens",
        "must be token ids, none below 0",
    )
    mask = np.frombuffer(given.loss_mask, dtype=np.uint8)
    require(count == 0 or mask.max() <= 1, f"{name}.loss_mask", "must be 0 or 1 in each byte")
    values = np.frombuffer(probabilities, dtype="<f4")
    require(not np.isnan(values).any(), f"{name}.logprobs", "must not hold NaN")
    require(not values[mask == 0].any(), f"{name}.logprobs", "must be 0.0 where loss_mask is 0")
    return mask


def _check_spans(
    spans: Sequence[VersionSpan], mask: npt.NDArray[np.uint8], *, bounded: bool
) -> dict[int, int]:
    """Return the numbers of sampled tokens by weight version where staleness is bounded, else
    nothing.

    Spans must lie over sampled tokens, none twice. Under a bound they must cover them all, with
    integers as versions; launch weights without a name count as version 0.
    """
    covered = np.zeros(len(mask), dtype=bool)
    versions: Counter[int] = Counter()
    for index, span in enumerate(spans):
        name = f"trajectory.version_spans[{index}]"
        start, end = span.start_token, span.end_token
        require(
            0 <= start < end <= len(mask),
            name,
            f"must lie within 0..{len(mask)} and not be empty, is {start}..{end}",
        )
        require(mask[start:end].all(), name, "must lie over sampled tokens (loss_mask 1)")
        require(not covered[start:end].any(), name, "must not overlap another span")
        covered[start:end] = True
        if bounded:
            text = span.weight_version
            number = "0" if text == LAUNCH_VERSION else text
            require(
                number.isascii() and number.isdigit(),
                f"{name}.weight_version",
                f"must be an integer >= 0 (or {LAUNCH_VERSION!r}, which counts as 0), because the "
                "rollout bounds"
                f" staleness, is {text[:64]!r}: start the engines with --weight-version N",
            )
            versions[int(number)] += end - start
    require(
        not bounded or int(covered.sum()) == int(mask.sum()),
        "trajectory.version_spans",
        "must cover every sampled token, because the rollout bounds staleness",
    )
    return versions
