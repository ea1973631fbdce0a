"""The decode curve of a real SGLang engine: measured by a probe, and near to what the next steps
take."""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import pytest
from support.conditions import until_said
from support.engine_steps import Step, step_request, ticket
from support.real_engines import RealEngine
from support.sidecar_in_process import sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

# A wide one: the machine may run something else in one of the two measurements.
FACTOR = 4.0
CONTEXT, TOKENS = 120, 40


async def test_a_probe_measures_a_real_engine_and_predicts_its_next_steps(
    nats_url: str, engine: RealEngine
) -> None:
    """Result: no figure is negative or out of the range of any engine; the median token of two
    steps takes what the curve says of a batch of two, by a wide factor; the probe was no step."""
    async with sidecar(nats_url, engine.url, probe_s=60.0, slots=2) as side:

        async def info() -> engine_pb2.EngineInfo:
            return (
                await side.stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=20.0)
            ).info

        curve = (
            await until_said(info, lambda said: said.HasField("decode_curve"), within_s=90.0)
        ).decode_curve
        assert curve.base_s + curve.per_sequence_s > 1e-3
        assert min(curve.per_kv_token_s, curve.prefill_pair_s) >= 0.0
        assert 1.0 < curve.prefill_tokens_per_s < 1e6
        assert (await side.load()).running_steps == 0

        sampling = SamplingParams(max_new_tokens=TOKENS, temperature=1.0, seed=1, ignore_eos=True)
        steps = [
            Step(
                side.stub,
                step_request(
                    ticket("e0"),
                    [3 + (7919 * at + number) % 40_000 for at in range(CONTEXT)],
                    sampling,
                ),
            )
            for number in range(2)
        ]
        came_s: list[float] = []
        for count in range(1, TOKENS + 1):
            await steps[0].until_tokens(count)
            came_s.append(time.monotonic())
        for step in steps:
            (await step).require_whole()
        took_s = median(after - before for before, after in pairwise(came_s))
        predicted_s = (
            curve.base_s
            + 2 * curve.per_sequence_s
            + 2 * (CONTEXT + TOKENS / 2) * curve.per_kv_token_s
        )
        assert took_s / FACTOR < predicted_s < took_s * FACTOR
