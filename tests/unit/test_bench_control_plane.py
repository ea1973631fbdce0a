"""`treadle bench control-plane` without a mesh: its arithmetic, and how it reads an engine."""

import asyncio
import json

import pytest

from treadle_bench.control_plane.measure import OUTPUT_TOKENS, ScheduleTimes, StepTime, summarize, time_engine


def test_the_figures_are_medians_of_differences_within_pairs() -> None:
    pairs = [
        (StepTime(0.10, 1.0), StepTime(0.102, 1.02)),
        (StepTime(0.50, 2.0), StepTime(0.503, 2.02)),  # a slow moment of the machine: both sides of the pair see it
        (StepTime(0.10, 1.0), StepTime(0.101, 1.03)),
    ]
    found = summarize(ScheduleTimes([0.001, 0.002, 0.003], [0.01], [1234.56]), pairs)
    assert found["schedule_step_p50_ms"] == 2.0
    assert found["schedule_steps_per_s"] == 1234.6
    assert found["sidecar_first_token_added_ms"] == 2.0
    assert found["sidecar_step_added_pct"] == pytest.approx(2.0)
    json.dumps(found)


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
                times = await time_engine(url, [1, 2, 3])
                assert 0 < times.first_token_s <= times.whole_s
            else:
                with pytest.raises(ValueError, match="31 of 32"):
                    await time_engine(url, [1, 2, 3])
