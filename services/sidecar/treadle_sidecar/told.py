"""What the mesh is told of a step's tokens, for predictors that read: its first and last ones, and no more.

Invariant: at most `most` ids of the output and of the observation, four times as many of the prompt: about a kilobyte
a step, whatever the context's length.
"""

from array import array

from treadle.common.v1.tokens_pb2 import TokenIds
from treadle.telemetry.v1 import facts_pb2

from treadle_sidecar.convert import packed
from treadle_sidecar.step import StepOrder

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
