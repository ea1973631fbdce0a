"""The predictor as a process: it learns from facts on NATS, and a SIGKILL costs it nothing."""

from collections.abc import Sequence
from typing import Any

import grpc.aio
from support.conditions import until_said
from support.processes import ServiceProcess, StartService
from treadle.predictor.v1 import predictor_pb2, predictor_pb2_grpc
from treadle.scheduler.v1 import scheduler_pb2
from treadle.telemetry.v1 import facts_pb2
from treadle_runtime.bus import Bus
from treadle_runtime.facts import STREAM, make_fact

CALL_S = 10.0

QUESTIONS = [
    predictor_pb2.Query(trajectory_id="g0-3", prompt_id="p0", turn=1, gen_tokens=200),
    predictor_pb2.Query(
        trajectory_id="g1-3", prompt_id="p1", turn=2, gen_tokens=900, max_total_tokens=5_000
    ),
    predictor_pb2.Query(trajectory_id="new", prompt_id="never-seen"),
]


async def ask(service: ServiceProcess, rpc: str, request: Any) -> Any:
    async with grpc.aio.insecure_channel(service.address) as channel:
        return await getattr(predictor_pb2_grpc.PredictorServiceStub(channel), rpc)(
            request, timeout=CALL_S
        )


async def predictions(service: ServiceProcess) -> Any:
    return await ask(
        service,
        "BatchPredictRemaining",
        predictor_pb2.BatchPredictRemainingRequest(queries=QUESTIONS),
    )


async def model_info(service: ServiceProcess) -> Any:
    return await ask(service, "GetModelInfo", predictor_pb2.GetModelInfoRequest())


async def learned(service: ServiceProcess, finished: int) -> Any:
    """Once the service has heard of that many closed trajectories."""
    return await until_said(
        lambda: model_info(service), lambda info: info.finished_trajectories >= finished
    )


def opened(group: int, sample: int) -> facts_pb2.Fact:
    return make_fact(
        "scheduler",
        trajectory_opened=facts_pb2.TrajectoryOpened(
            trajectory_id=f"g{group}-{sample}", rollout_id="r", prompt_id=f"p{group}", sample=sample
        ),
    )


def stepped(group: int, sample: int, turn: int, tokens: int) -> facts_pb2.Fact:
    ref = facts_pb2.StepRef(trajectory_id=f"g{group}-{sample}", turn=turn)
    return make_fact(
        "sidecar/e0", step_finished=facts_pb2.StepFinished(step=ref, output_tokens=tokens)
    )


def closed(
    group: int,
    sample: int,
    tokens: int,
    outcome: "scheduler_pb2.Outcome.ValueType" = scheduler_pb2.OUTCOME_FINISHED,
) -> facts_pb2.Fact:
    return make_fact(
        "scheduler",
        trajectory_closed=facts_pb2.TrajectoryClosed(
            trajectory_id=f"g{group}-{sample}",
            rollout_id="r",
            prompt_id=f"p{group}",
            sample=sample,
            outcome=outcome,
            gen_tokens=tokens,
            turns=3,
        ),
    )


def a_rollout() -> list[facts_pb2.Fact]:
    """Two groups of four. Of the first three end short, of the second one is cut long and two run
    on, far."""
    facts = [opened(group, sample) for group in range(2) for sample in range(4)]
    facts += [stepped(0, sample, 0, 150 + sample) for sample in range(4)]
    facts += [stepped(1, sample, turn, 2_000) for turn in range(2) for sample in range(3)]
    facts += [closed(0, sample, 300 + 20 * sample) for sample in range(3)]
    facts.append(closed(1, 0, 9_000, scheduler_pb2.OUTCOME_TRUNCATED))
    return facts


async def publish(bus: Bus, facts: Sequence[facts_pb2.Fact]) -> None:
    for fact in facts:
        await bus.publish(fact)
    await bus.flush()


async def test_predictions_change_with_the_facts_and_a_killed_predictor_comes_back_with_the_same(
    start_service: StartService, bus: Bus
) -> None:
    """A rollout's facts are published, twice, the process is killed, another starts over the same
    NATS.

    Result: before the facts the prior answers for all; after them the siblings do, short for the
    one group, long for the other; the second process gives the same predictions to the last bit
    from its first call on, and hears what comes next.
    """
    service = await start_service("treadle_predictor")
    before = await predictions(service)
    assert {each.estimator for each in before.predictions} == {predictor_pb2.ESTIMATOR_PRIOR}
    assert (await model_info(service)).best_estimator == predictor_pb2.ESTIMATOR_PRIOR

    await publish(bus, [*a_rollout(), *a_rollout(), closed(9, 0, 400)])
    info = await learned(service, 5)
    assert (info.best_estimator, info.known_prompts) == (predictor_pb2.ESTIMATOR_SIBLINGS, 3)
    assert info.finished_trajectories == 5, "what is told again under other ids is not counted"
    assert info.HasField("updated_at")
    after = await predictions(service)
    short, long, unseen = after.predictions
    assert (short.estimator, short.model_version) == (
        predictor_pb2.ESTIMATOR_SIBLINGS,
        "siblings-3",
    )
    assert (unseen.estimator, unseen.model_version) == (
        predictor_pb2.ESTIMATOR_HISTORY,
        "history-all-5",
    )
    assert short.remaining_tokens.p50 < before.predictions[0].remaining_tokens.p50
    assert long.remaining_tokens.p50 > before.predictions[1].remaining_tokens.p50
    assert long.remaining_tokens.p90 == 5_000 - 900

    service.kill()
    service = await start_service("treadle_predictor")
    assert await predictions(service) == after
    assert await model_info(service) == info

    await publish(bus, [closed(0, 3, 320)])
    await learned(service, 6)
    assert await predictions(service) != after


async def test_histories_outlive_the_facts_they_came_from(
    start_service: StartService, bus: Bus
) -> None:
    """The stream keeps facts for an hour. Here it is emptied while the predictor is away.

    Result: what ended is still known; only what was running is forgotten.
    """
    service = await start_service("treadle_predictor")
    await publish(bus, a_rollout())
    await learned(service, 4)
    service.terminate()
    assert await service.wait() == 0
    await bus.jetstream.purge_stream(STREAM)
    service = await start_service("treadle_predictor")
    info = await model_info(service)
    assert (info.finished_trajectories, info.known_prompts) == (4, 2)
    short, _, unseen = (await predictions(service)).predictions
    assert (short.model_version, unseen.model_version) == ("siblings-3", "history-all-4")
    assert short.remaining_tokens.p50 < 400
