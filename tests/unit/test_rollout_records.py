"""Stored records of a rollout: what goes in comes out."""

import pytest
from treadle_core.rollouts.buffer import (
    Admitted,
    Advanced,
    Arrived,
    Batch,
    Cancelled,
    Event,
    GroupDropped,
)
from treadle_core.rollouts.group import DropReason, Sample, Verdict
from treadle_core.rollouts.spec import RolloutSpec
from treadle_rollout.storage import COMPRESS_FROM_BYTES, Created, Record, decode, encode

SPEC = RolloutSpec(("p.0", "p:1"), 4, 2, max_staleness=1, max_total_tokens=100)


@pytest.mark.parametrize(
    "body",
    [
        Arrived(
            Sample("t", "p.0", 3, oldest_version=7, payload_bytes=9),
            Verdict(None, group_settled=False),
        ),
        Advanced(3, ("a", "b")),
        Cancelled(("a",)),
        GroupDropped("p.0", DropReason.STALE, ("a",)),
        Admitted(7),
    ],
)
def test_a_record_comes_out_as_it_went_in(body: Created | Event) -> None:
    record = Record(12.5, body, request="f", payload="d.2")
    assert decode(encode(record)) == record


@pytest.mark.parametrize(
    ("stored", "body"),
    [
        (
            b'{"kind":"created","at_s":1.5,"rollout_id":"r","spec":{"prompt_ids":["p.0","p:1"],"samples_per_prompt":4,'
            b'"keep_per_prompt":2,"max_staleness":1,"max_total_tokens":100},"request_id":"req"}',
            Created("r", SPEC, "req"),
        ),
        (
            b'{"kind":"arrived","at_s":1.5,"sample":{"trajectory_id":"t","prompt_id":"p.0","sample":3,"failed":true},'
            b'"verdict":{"drop_reason":"failed","group_settled":true}}',
            Arrived(
                Sample("t", "p.0", 3, failed=True), Verdict(DropReason.FAILED, group_settled=True)
            ),
        ),
        (
            b'{"kind":"batch","at_s":1.5,"batch_id":"b","groups":[["p.0",["a","b"]]],"exhausted":true}',
            Batch("b", (("p.0", ("a", "b")),), exhausted=True),
        ),
    ],
)
def test_records_are_stored_in_this_form(stored: bytes, body: Created | Event) -> None:
    assert encode(Record(1.5, body)) == stored
    assert decode(stored) == Record(1.5, body)


def test_a_record_of_an_earlier_version_is_read() -> None:
    stored = (
        b'{"kind":"arrived","at_s":1.5,"sample":{"trajectory_id":"t","prompt_id":"p.0","sample":3,"failed":true,'
        b'"oldest_version":null,"payload_bytes":0},"verdict":{"drop_reason":"failed","group_settled":true}}'
    )
    expected = Arrived(
        Sample("t", "p.0", 3, failed=True), Verdict(DropReason.FAILED, group_settled=True)
    )
    assert decode(stored) == Record(1.5, expected)


def test_a_rollout_of_ten_thousand_prompts_fits_into_one_nats_message() -> None:
    spec = RolloutSpec(
        tuple(f"dataset-with-a-long-name/prompt-number-{i:09d}" * 2 for i in range(10_000)), 8, 8
    )
    record = Record(0.0, Created("r", spec, "req"))
    data = encode(record)
    assert len(data) * 20 > COMPRESS_FROM_BYTES and len(data) < 512 * 1024
    assert decode(data) == record


def test_a_record_of_no_known_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no such record"):
        decode(b'{"kind":"renamed","at_s":1}')
