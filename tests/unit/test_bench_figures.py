"""The arithmetic of the benches, and how they read an engine."""

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_bench.benches import BENCHES
from treadle_bench.control_plane.measure import figures
from treadle_bench.control_plane.schedule_steps import ScheduleTimes
from treadle_bench.control_plane.sidecar_steps import OUTPUT_TOKENS, StepTime, engine_alone, summary
from treadle_bench.samples import Samples

KEYS = {
    "schedule_step_p50_ms",
    "schedule_step_p99_ms",
    "schedule_steps_per_s",
    "sidecar_first_token_added_ms",
    "sidecar_step_added_pct",
}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_quantiles_rise_from_the_least_to_the_greatest_sample(values: list[float]) -> None:
    samples = Samples(values)
    found = [samples.quantile(tenth / 10) for tenth in range(11)]
    assert (found[0], found[-1]) == (min(values), max(values))
    assert all(a <= b or a == pytest.approx(b) for a, b in pairwise(found))


def test_the_median_of_an_even_count_lies_between_the_two_in_the_middle() -> None:
    assert Samples([4.0, 1.0, 2.0, 3.0]).median == 2.5
    with pytest.raises(ValueError, match="no samples"):
        Samples().quantile(0.5)


def test_the_figures_are_medians_of_differences_within_pairs() -> None:
    pairs = [
        (StepTime(0.10, 1.0), StepTime(0.102, 1.02)),
        (StepTime(0.50, 2.0), StepTime(0.503, 2.02)),  # a slow moment of the machine: both sides of the pair see it
        (StepTime(0.10, 1.0), StepTime(0.101, 1.03)),
    ]
    found = figures(ScheduleTimes(Samples([0.001, 0.002, 0.003]), Samples([0.01]), 1234.56), summary(pairs))
    assert found.keys() >= KEYS
    assert found["schedule_step_p50_ms"] == 2.0
    assert found["schedule_steps_per_s"] == 1234.6
    assert found["sidecar_first_token_added_ms"] == 2.0
    assert found["sidecar_step_added_pct"] == pytest.approx(2.0)
    json.dumps(found)


def test_every_bench_is_listed_under_its_own_name() -> None:
    assert [bench.name for bench in BENCHES.values()] == list(BENCHES)
    assert "control-plane" in BENCHES


async def serve(tokens: int) -> asyncio.Server:
    """An engine that streams so many chunks of one token, as SGLang does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for count in range(1, tokens + 1):
            line = b"data: " + json.dumps({"meta_info": {"completion_tokens": count}}).encode() + b"\n\n"
            writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


async def test_the_engine_alone_is_timed_to_its_first_and_last_token_and_must_give_all_of_them() -> None:
    for tokens in (OUTPUT_TOKENS, OUTPUT_TOKENS - 1):
        async with await serve(tokens) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            if tokens == OUTPUT_TOKENS:
                times = await engine_alone(url, [1, 2, 3])
                assert 0 < times.first_token_s <= times.whole_s
            else:
                with pytest.raises(ValueError, match="31 of 32"):
                    await engine_alone(url, [1, 2, 3])
