"""A real SGLang engine without --incremental-streaming-output: its steps, its spans, and how it
hangs."""

from __future__ import annotations

from collections.abc import Iterator

import grpc.aio
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from support.collector import collecting
from support.conditions import until, until_said
from support.engine_steps import Step, run_step, step_request, ticket
from support.processes import StartService, free_port
from support.real_engines import RealEngine
from support.rpc import refused
from support.scheduler import scheduler_client
from support.sidecar_in_process import sidecar
from treadle.common.v1.tokens_pb2 import SamplingParams
from treadle.engine.v1 import engine_pb2_grpc

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

COLLECTOR_PORT = free_port()  # of the engine's spans


@pytest.fixture(scope="module")
def cumulative(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    """One running engine; each chunk of its streams has all tokens so far."""
    folder = tmp_path_factory.mktemp("cumulative")
    endpoint = f"http://127.0.0.1:{COLLECTOR_PORT}"
    engine = RealEngine(
        3, folder, weights="float", without="--incremental-streaming-output", otlp_endpoint=endpoint
    )
    engine.start()
    engine.wait_ready()
    yield engine
    engine.kill()


async def test_a_step_on_cumulative_streams_has_the_engines_own_tokens(
    nats_url: str, cumulative: RealEngine
) -> None:
    """One slot; a higher step evicts the lower one. Result: the lower one's tokens and logprobs are
    those that the engine gives in a single answer, and a stop string across the cut ends it where
    it ends there."""
    # Counting: never two tokens that are about as likely, of which another batch may take the other
    # one.
    counting = ", ".join(str(number) for number in range(1, 61)) + ","
    ids = cumulative.ask("/tokenize", {"prompt": counting})["tokens"]
    params = {"max_new_tokens": 60, "temperature": 0.0, "ignore_eos": True}
    whole = cumulative.ask(
        "/generate", {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    )
    output = whole["output_ids"]
    text = cumulative.ask("/detokenize", {"tokens": output[20:58], "skip_special_tokens": False})[
        "text"
    ]

    async with sidecar(nats_url, cumulative.url, slots=1) as side:
        sampling = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True, stop=[text])
        low = Step(side.stub, step_request(ticket("e0"), ids, sampling))
        await low.until_tokens(20)  # SGLang holds back what may be the stop string
        short = SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
        await run_step(side.stub, step_request(ticket("e0", priority=9.0), ids[:40], short))
        result = await low
    assert result.require_whole().preemptions == 1
    assert result.tokens.tolist() == output[:58]
    logprobs = [entry[0] for entry in whole["meta_info"]["output_token_logprobs"]]
    # as in test_sidecar_steps
    assert result.logprobs.tolist() == pytest.approx(logprobs[:58], abs=0.8)


async def test_the_engines_own_spans_belong_to_the_trace_of_the_caller(
    nats_url: str, cumulative: RealEngine
) -> None:
    """GIVEN   a collector, to which the engine sends its spans, and a sidecar
    WHEN    a caller's step runs, with a W3C trace context in its metadata
    Result: SGLang's spans are in that trace, the uppermost of them under the sidecar's span of the
    call, and its
            prefill and decode among them"""
    trace_id, caller = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    async with collecting(COLLECTOR_PORT) as (collector, endpoint):
        async with sidecar(nats_url, cumulative.url, otlp_endpoint=endpoint) as side:
            request = step_request(
                ticket("e0"), list(range(10, 40)), SamplingParams(max_new_tokens=4)
            )
            metadata = (("traceparent", f"00-{trace_id}-{caller}-01"),)
            async for _ in side.stub.Generate(request, timeout=60.0, metadata=metadata):
                pass

        def spans(service: str) -> list[Span]:
            return [
                span
                for name, span in collector.spans
                if name == service and span.trace_id.hex() == trace_id
            ]

        def uppermost() -> list[Span]:
            ids = {span.span_id for span in spans("treadle-engine")}
            return [span for span in spans("treadle-engine") if span.parent_span_id not in ids]

        def complete() -> bool:
            """Its processes send one by one what they have."""
            whole = {span.name for span in spans("treadle-engine")} >= {
                "prefill_forward",
                "decode_forward",
            }
            return whole and all(span.name.startswith(" Req") for span in uppermost())

        await until(complete, within_s=60.0)
    [served] = spans("treadle-sidecar")
    assert served.parent_span_id.hex() == caller
    assert [span.parent_span_id for span in uppermost()] == [served.span_id]
    names = {span.name for span in spans("treadle-engine")}
    assert {"prefill_forward", "decode_forward"} <= names
    assert "decode_loop" not in names, "one for each token"


async def test_an_engine_whose_scheduler_process_is_stopped_is_lost_until_it_is_continued(
    cumulative: RealEngine, start_service: StartService
) -> None:
    """Scheduler and sidecar as processes. SIGSTOP to SGLang's scheduler process while a step runs:
    its HTTP server answers all polls. Result: the step ends with ENGINE_LOST and the engine is
    deregistered; SIGCONT brings it back."""
    scheduler = await start_service("treadle_scheduler")
    own = {
        "ENGINE_ID": "e0",
        "ENGINE_URL": cumulative.url,
        "SCHEDULER": scheduler.address,
        "ENGINE_STALL_S": "10",
        "PROBE_S": "0",
    }
    side = await start_service(
        "treadle_sidecar", {f"TREADLE_SIDECAR_{name}": value for name, value in own.items()}
    )
    async with (
        scheduler_client(scheduler.address) as control,
        grpc.aio.insecure_channel(side.address) as channel,
    ):
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        await until_said(control.engines, lambda engines: len(engines) == 1, within_s=120.0)
        generating = cumulative.scheduler_process()
        sampling = SamplingParams(max_new_tokens=2000, temperature=0.0, ignore_eos=True)
        step = Step(stub, step_request(ticket("e0"), list(range(100, 160)), sampling))
        await step.until_tokens(5)
        generating.suspend()
        try:
            with refused("ENGINE_LOST", says="no progress"):
                await step
            await until_said(control.engines, lambda engines: not engines, within_s=60.0)
        finally:
            generating.resume()
        await until_said(control.engines, lambda engines: len(engines) == 1, within_s=60.0)
        sampling.max_new_tokens = 5
        (
            await run_step(stub, step_request(ticket("e0"), list(range(100, 160)), sampling))
        ).require_whole()
