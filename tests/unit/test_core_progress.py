"""An engine is suspected where a sign of progress is overdue, or where a probe fails; only a whole
probe ends a suspicion."""

import math

import pytest
from treadle_core.engine_queue.pace import (
    IDLE_PROBE_S,
    PASS_TOKENS,
    PATIENCE,
    SUSPECT_PROBE_S,
    EngineProgress,
)
from treadle_core.model import DecodeCurve

STALL_S = 30.0
CURVE = DecodeCurve(base_s=0.01, per_sequence_s=0.0, prefill_tokens_per_s=1000.0)


@pytest.fixture
def progress() -> EngineProgress:
    return EngineProgress(STALL_S)


def decode(progress: EngineProgress, now: float, request: str = "r") -> None:
    progress.begin(request, 10, now)
    progress.note_tokens(request, now)


def test_an_idle_engine_owes_no_sign_and_is_probed_now_and_then(progress: EngineProgress) -> None:
    assert progress.is_probe_due(0.0), "nobody has seen it generate yet"
    decode(progress, 100.0)
    assert not progress.is_probe_due(1000.0), "it has work"
    progress.end("r", 200.0)
    assert progress.due_s(CURVE) == math.inf
    assert not progress.is_probe_due(200.0 + IDLE_PROBE_S - 0.1)
    assert progress.is_probe_due(200.0 + IDLE_PROBE_S)


def test_silence_makes_an_engine_suspected_once_and_only_a_whole_probe_clears_it(
    progress: EngineProgress,
) -> None:
    decode(progress, 0.0)
    progress.note_tokens("r", 50.0)
    due_s = progress.due_s(CURVE)
    assert due_s == pytest.approx(50.0 + STALL_S + PATIENCE * 0.01)
    assert not progress.judge(CURVE, due_s - 0.1)
    assert progress.judge(CURVE, due_s)
    assert not progress.judge(CURVE, due_s + 1.0), "it is suspected already"
    progress.note_unread(5, due_s + 1.0)
    progress.note_unread(0, due_s + 1.0)
    progress.end("r", due_s + 2.0)
    assert progress.suspected
    assert progress.is_probe_due(due_s + 2.0 + SUSPECT_PROBE_S)
    progress.begin("probe", 1, due_s + 5.0)
    progress.note_tokens("probe", due_s + 6.0)
    progress.end("probe", due_s + 7.0)
    assert progress.suspected, "its first token is not all that a step needs"
    progress.trust()
    assert not progress.suspected


def test_a_request_after_a_long_rest_is_not_overdue(progress: EngineProgress) -> None:
    decode(progress, 0.0)
    progress.end("r", 1.0)
    progress.begin("s", 10, 10_000.0)
    assert not progress.judge(CURVE, 10_001.0)


@pytest.mark.parametrize(
    ("contexts", "read_tokens"),
    [([100_000], 100_000), ([4000, 4000], 8000), ([50_000] * 8, 50_000 + PASS_TOKENS)],
)
def test_an_engine_may_be_silent_while_it_reads_the_prompts_before_its_next_token(
    progress: EngineProgress, contexts: list[int], read_tokens: int
) -> None:
    for index, context in enumerate(contexts):
        progress.begin(f"r{index}", context, 0.0)
    assert progress.due_s(CURVE) == pytest.approx(
        STALL_S + PATIENCE * (read_tokens / 1000.0 + 0.01)
    )
    quadratic = DecodeCurve(0.01, 0.0, 0.0, 1000.0, prefill_pair_s=1e-6)
    assert (
        progress.due_s(quadratic)
        > progress.due_s(CURVE) + PATIENCE * 1e-6 * max(contexts) ** 2 * 0.49
    )
    assert progress.due_s(None) > progress.due_s(CURVE), (
        "an engine without a curve is taken for a slow one"
    )


def test_an_engine_that_reads_a_prompt_in_chunks_shows_progress_with_each(
    progress: EngineProgress,
) -> None:
    """One that hangs reports the same number again; one whose requests are parked reports more as
    others come."""
    progress.begin("r", 10, 0.0)
    progress.note_unread(10, 10.0)
    assert progress.due_s(CURVE) < 10.0 + STALL_S
    progress.note_unread(6, 20.0)
    due_s = progress.due_s(CURVE)
    assert due_s > 20.0 + STALL_S
    for unread in (6, 9):
        progress.note_unread(unread, 30.0)
        assert progress.due_s(CURVE) == due_s


def test_an_engine_that_loads_weights_owes_nothing(progress: EngineProgress) -> None:
    decode(progress, 0.0)
    progress.begin_load()
    assert progress.due_s(CURVE) == math.inf
    progress.end_load(1000.0)
    assert 1000.0 + STALL_S < progress.due_s(CURVE) < math.inf
    progress.end("r", 1000.0)
    progress.begin_load()
    assert not progress.is_probe_due(5000.0)


def test_an_engine_that_sends_tokens_together_has_the_time_to_sample_them(
    progress: EngineProgress,
) -> None:
    decode(progress, 0.0)
    progress.tokens_a_chunk = 1000
    assert progress.due_s(CURVE) == pytest.approx(STALL_S + PATIENCE * 10.0)


def test_a_probe_that_fails_makes_the_engine_suspected(progress: EngineProgress) -> None:
    progress.suspect()
    assert progress.suspected
    assert progress.is_probe_due(SUSPECT_PROBE_S)


def test_an_engine_that_sends_tokens_of_steps_is_not_suspected_for_a_probe_that_fails(
    progress: EngineProgress,
) -> None:
    """It may be too busy for more, or refuse what is new; steps that run there go on."""
    progress.begin("waits", 10, 0.0)
    decode(progress, 0.0)
    progress.suspect()
    assert not progress.suspected
    progress.end("r", 1.0)
    progress.suspect()
    assert progress.suspected
