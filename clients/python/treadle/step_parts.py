"""What a step is asked for, and the calls that it is cut into.

Purpose: a long turn is generated in several calls, each with a ticket of its own, so that its trajectory is ranked anew
and may move in the middle of it (ADR 0011). For the scheduler each call is a turn without a tool behind it; for the
caller there is one step. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from treadle.assembly import StepAssembly
from treadle.common.v1 import tokens_pb2
from treadle.scheduler.v1 import scheduler_pb2
from treadle.tokens import pack_ids
from treadle.types import FinishReason, Sampling


@dataclass(frozen=True)
class StepPlan:
    """What a step runs with.

    turn: the caller's; call: what the scheduler counts as a turn, of which a long step takes several. tool_s: the time
    since the turn before. lost_ticket_id: of this call, its stream never ended. unanswered: a ScheduleStep of this call
    that was cancelled before its answer, so that a ticket may be out that nobody has seen.
    """

    trajectory_id: str
    turn: int
    call: int
    prompt: list[int]
    sampling: Sampling
    tool_s: float
    lost_ticket_id: str
    unanswered: scheduler_pb2.ScheduleStepRequest | None

    def part(self, number: int, output: list[int], call_tokens: int) -> Part:
        """The call that goes on after `output`, which belongs to its prompt.

        A step that stops at a string is one call: the string could lie across two of them.
        """
        left = self.sampling.max_new_tokens - len(output)
        most = min(left, call_tokens) if call_tokens and not self.sampling.stop else left
        return Part(
            call=self.call + number,
            prompt=tokens_pb2.TokenIds(int32_le=pack_ids(self.prompt + output)),
            prompt_tokens=len(self.prompt) + len(output),
            sampling=replace(self.sampling, max_new_tokens=most),
            tool_s=self.tool_s if number == 0 else 0.0,
        )


@dataclass(frozen=True)
class Part:
    """One call of a step: what the scheduler gives a ticket for, and an engine runs."""

    call: int
    prompt: tokens_pb2.TokenIds
    prompt_tokens: int
    sampling: Sampling
    tool_s: float


def goes_on(reason: FinishReason, assembly: StepAssembly, plan: StepPlan, part: Part) -> bool:
    """Whether a call ended at its own limit and not at the step's, nor at the engine's context."""
    count = len(assembly.token_ids)
    at_limit = reason == "length" and count - assembly.called == part.sampling.max_new_tokens
    return at_limit and count < plan.sampling.max_new_tokens


def complete(output: list[int], sampling: Sampling) -> FinishReason | None:
    """Why the call was over although its last event was lost with the engine; None where more tokens are due."""
    if output and output[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(output) >= sampling.max_new_tokens else None


def sampling_message(sampling: Sampling) -> tokens_pb2.SamplingParams:
    return tokens_pb2.SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )
