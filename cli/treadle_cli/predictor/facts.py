"""Make the facts that a mesh publishes of a trajectory from its transcript, with its texts as token
ids.

Whoever plays recorded transcripts to a predictor service needs them: its figures and its tests.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from treadle.common.v1.tokens_pb2 import TokenIds
from treadle.scheduler.v1 import scheduler_pb2
from treadle.telemetry.v1 import facts_pb2
from treadle_learned.transcript import Transcript
from treadle_runtime.facts import make_fact
from treadle_sidecar.convert import PROMPT_SHARE, ends

Tokenize = Callable[[str], Sequence[int]]


def facts_of(
    transcript: Transcript, tokenize: Tokenize, *, close: bool = True, most: int = 1 << 20
) -> Iterator[facts_pb2.Fact]:
    """Yield the facts of a transcript: opened, one fact for each step, closed. most: ids of each
    output and observation; the prompt may have PROMPT_SHARE times as many."""
    known: dict[str, Any] = {
        key: getattr(transcript, key)
        for key in ("trajectory_id", "rollout_id", "prompt_id", "prompt_tokens")
    }
    yield make_fact("scheduler", trajectory_opened=facts_pb2.TrajectoryOpened(**known))
    context_tokens = transcript.prompt_tokens
    for number, turn in enumerate(transcript.turns):
        tokens = facts_pb2.StepTokens(output=_ids(tokenize(turn.text), most))
        if number:
            before = transcript.turns[number - 1]
            tokens.observation.CopyFrom(_ids(tokenize(before.obs_text), most))
            tokens.observation_tokens = before.obs_tokens
        else:
            tokens.prompt.CopyFrom(_ids(tokenize(transcript.prompt), PROMPT_SHARE * most))
        context_tokens += tokens.observation_tokens
        finished = facts_pb2.StepFinished(
            step=_step(transcript, number),
            context_tokens=context_tokens,
            output_tokens=turn.gen_tokens,
            tokens=tokens,
        )
        yield make_fact("sidecar/e0", step_finished=finished)
        context_tokens += turn.gen_tokens
    if close:
        outcome = (
            scheduler_pb2.OUTCOME_TRUNCATED
            if transcript.censored
            else scheduler_pb2.OUTCOME_FINISHED
        )
        known |= {"gen_tokens": transcript.gen_tokens, "turns": len(transcript.turns)}
        closed = facts_pb2.TrajectoryClosed(**known, outcome=outcome)
        yield make_fact("scheduler", trajectory_closed=closed)


def prompt_started(
    transcript: Transcript, tokenize: Tokenize, *, most: int = 1 << 20
) -> facts_pb2.Fact:
    """Return the fact that the first step has started, with the prompt. most: as in `facts_of`."""
    prompt = _ids(tokenize(transcript.prompt), PROMPT_SHARE * most)
    started = facts_pb2.StepStarted(step=_step(transcript, 0), attempt=1, prompt=prompt)
    return make_fact("sidecar/e0", step_started=started)


def _step(transcript: Transcript, turn: int) -> facts_pb2.StepRef:
    name = transcript.trajectory_id
    return facts_pb2.StepRef(trajectory_id=name, turn=turn, ticket_id=f"{name}-{turn}")


def _ids(ids: Sequence[int], most: int) -> TokenIds:
    return TokenIds(int32_le=ends(array("i", ids), most).tobytes())
