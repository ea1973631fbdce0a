"""What the sidecar tells the mesh: step.queued, step.started, step.preempted, step.finished, weights.updated.

What the mesh is told of a step's tokens, for predictors that read: its first and last ones, and no more.

Invariant: at most `most` ids of the output and of the observation, four times as many of the prompt: about a kilobyte
a step, whatever the context's length."""

from array import array

from treadle.common.v1.tokens_pb2 import TokenIds
from treadle.telemetry.v1 import facts_pb2
from treadle_runtime.bus import Bus
from treadle_runtime.facts import make_fact

from treadle_sidecar import convert
from treadle_sidecar.convert import packed
from treadle_sidecar.steps.step import Finished, Preempted, Started, StepOrder

PROMPT_SHARE = 4  # the prompt is told of the first step alone, and is what a trajectory's length depends on most


def step_tokens(
    order: StepOrder, output: "array[int]", before: "array[int] | None", most: int
) -> facts_pb2.StepTokens | None:
    """`before`: the trajectory's context after its last step here, None where there was none. None for `most` of 0."""
    if not most:
        return None
    told = facts_pb2.StepTokens(output=packed(ends(output, most)), prompt=told_prompt(order, most))
    if order.turn and before is not None and len(before) <= len(order.prompt):
        observation = order.prompt[len(before) :]
        told.observation.CopyFrom(packed(ends(observation, most)))
        told.observation_tokens = len(observation)
    return told


def told_prompt(order: StepOrder, most: int) -> TokenIds | None:
    """None after the first step, and for `most` of 0."""
    return packed(ends(order.prompt, PROMPT_SHARE * most)) if most and order.turn == 0 else None


def ends(ids: "array[int]", most: int) -> "array[int]":
    """The first and the last of them, where there are more than `most`."""
    if len(ids) <= most:
        return ids
    head = (most + 1) // 2
    return ids[:head] + ids[len(ids) - (most - head) :]


class StepFacts:
    """Publishes for one engine. The bus accepts a fact at once and sends it in the background. tell_tokens: most ids of
    a step's output to tell, 0 for none."""

    def __init__(self, bus: Bus, engine_id: str, tell_tokens: int = 0) -> None:
        self._bus = bus
        self._tell_tokens = tell_tokens
        self._engine_id = engine_id
        self._source = f"sidecar/{engine_id}"

    async def queued(self, order: StepOrder) -> None:
        """The step was accepted."""
        fact = facts_pb2.StepQueued(
            step=self._step(order), priority=order.priority, context_tokens=len(order.prompt) + len(order.resumed)
        )
        await self._bus.publish(make_fact(self._source, step_queued=fact))

    async def started(self, order: StepOrder, event: Started) -> None:
        """The step got a slot."""
        fact = facts_pb2.StepStarted(
            step=self._step(order),
            queue_time=convert.duration(event.queue_s),
            attempt=event.attempt,
            prompt=told_prompt(order, self._tell_tokens),
        )
        await self._bus.publish(make_fact(self._source, step_started=fact))

    async def preempted(self, order: StepOrder, event: Preempted) -> None:
        """The step gave its slot up."""
        fact = facts_pb2.StepPreempted(step=self._step(order), output_tokens=event.output_tokens, by_ticket_id=event.by)
        await self._bus.publish(make_fact(self._source, step_preempted=fact))

    async def finished(
        self, order: StepOrder, event: Finished, output: "array[int]", before: "array[int] | None"
    ) -> None:
        """The step is over, for whatever reason but the loss of the engine. before: the trajectory's context after its
        last step here."""
        fact = facts_pb2.StepFinished(
            step=self._step(order),
            reason=convert.finish_reason(event.reason),
            context_tokens=len(order.prompt),
            output_tokens=event.output_tokens,
            cached_tokens=event.cached_tokens,
            timing=convert.timing(event.timing),
            preemptions=event.preemptions,
            tokens=step_tokens(order, output, before, self._tell_tokens),
        )
        await self._bus.publish(make_fact(self._source, step_finished=fact))

    async def weights_updated(self, weight_version: str) -> None:
        """The engine serves other weights."""
        fact = facts_pb2.WeightsUpdated(engine_id=self._engine_id, weight_version=weight_version)
        await self._bus.publish(make_fact(self._source, weights_updated=fact))

    def _step(self, order: StepOrder) -> facts_pb2.StepRef:
        return facts_pb2.StepRef(
            ticket_id=order.ticket_id, trajectory_id=order.trajectory_id, turn=order.turn, engine_id=self._engine_id
        )
