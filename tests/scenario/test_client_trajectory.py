"""Scenarios of one trajectory through treadle.Client, against fakes behind real servers."""

import asyncio
from typing import Any

import grpc
import pytest
import treadle
from support.fake_engine import logprob_at, token_at
from support.fake_servicer import Refusal
from support.mesh_in_process import fake_mesh, generate, one_trajectory
from treadle.scheduler.v1 import scheduler_pb2

PROMPT = [11, 12, 13]


def expected(prompt: list[int], count: int) -> list[int]:
    return [token_at(prompt, index) for index in range(count)]


async def test_a_trajectory_of_two_turns_with_a_tool_and_an_environment_comes_out_whole() -> None:
    """Two generations with a tool, an environment and an observation between them.

    Result: tokens, mask, logprobs and spans line up, and the scheduler hears of the end and the
    reward.
    """
    async with fake_mesh("e0") as mesh, mesh.client() as client:
        t = await client.open(prompt_id="p0", sample=2, prompt=PROMPT)
        chunks = [chunk async for chunk in t.generate(treadle.Sampling(max_new_tokens=5))]
        first = expected(PROMPT, 5)
        assert [c.offset for c in chunks] == [0, 2, 4]
        assert [i for c in chunks for i in c.token_ids] == first
        result = await t.tool("echo", {"x": [1, 2]})
        assert (result.ok, result.data, result.queue_s, result.execution_s) == (
            True,
            {"x": [1, 2]},
            0.25,
            1.0,
        )
        async with await t.open_session("count", {"seed": 3}) as environment:
            assert environment.first.output == '{"seed": 3}'
            answers = [await environment.step({"action": n}) for n in range(3)]
            assert [(a.output, a.reward, a.done) for a in answers] == [
                ("1", 0.5, False),
                ("2", 0.5, False),
                ("3", 0.5, True),
            ]
        assert not mesh.tools.sessions
        t.observe([7, 8])
        context = list(t.tokens)
        await generate(t, 4)
        await t.close(reward=1.0)
        second = expected(context, 4)

        assert t.tokens == [*PROMPT, *first, 7, 8, *second]
        assert t.loss_mask == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1]
        assert t.logprobs == [0.0] * 3 + [logprob_at(i) for i in range(5)] + [0.0] * 2 + [
            logprob_at(i) for i in range(4)
        ]
        assert t.version_spans == [treadle.VersionSpan("0", 3, 8), treadle.VersionSpan("0", 10, 14)]
        assert [step.turn for step in t.steps] == [0, 1]
        assert [step.finish_reason for step in t.steps] == ["length", "length"]
        kinds = [span.kind for span in t.spans]
        assert kinds == ["queue", "prefill", "decode", *["tool"] * 5, "queue", "prefill", "decode"]
        assert all(span.start_s <= span.end_s for span in t.spans)
        assert all(a.end_s <= b.start_s for a, b in zip(t.spans, t.spans[1:], strict=False))
        assert mesh.scheduler.outcomes == {t.trajectory_id: scheduler_pb2.OUTCOME_FINISHED}
        [close] = mesh.scheduler.requests("CloseTrajectory")
        assert close.reward == 1.0
        steps = mesh.scheduler.requests("ScheduleStep")
        assert [(s.turn, s.context_tokens) for s in steps] == [(0, 3), (1, 10)]
        assert steps[0].tool_time.ToNanoseconds() == 0
        assert steps[1].tool_time.ToNanoseconds() > 0


async def test_a_failing_tool_is_a_result_and_an_unknown_tool_is_an_error() -> None:
    async with one_trajectory(prompt=PROMPT) as (_, t):
        result = await t.tool("echo", {"fail": 1})
        assert (result.status, result.error, result.ok) == ("tool_error", "ValueError: no", False)
        with pytest.raises(treadle.TreadleError) as refused:
            await t.tool("nothing", {})
        assert refused.value.reason == "TOOL_NOT_FOUND"


@pytest.mark.parametrize(
    ("reward", "outcome", "names"),
    [
        ("failed", "finished", "reward must be a finite number"),
        (float("nan"), "finished", "reward must be a finite number"),
        ([1.0], "finished", "reward must be a finite number"),
        (None, "done", "outcome must be one of finished"),
    ],
)
async def test_a_trajectory_that_was_closed_with_wrong_arguments_can_be_closed_with_right_ones(
    reward: Any, outcome: Any, names: str
) -> None:
    """Result: the error names the argument, and the trajectory goes on until it is closed."""
    async with one_trajectory("e0", prompt=PROMPT) as (mesh, t):
        with pytest.raises(ValueError, match=names):
            await t.close(reward, outcome)
        await generate(t, 4)
        await t.close(1, "failed")
        assert mesh.scheduler.outcomes == {t.trajectory_id: scheduler_pb2.OUTCOME_FAILED}
        assert mesh.scheduler.requests("CloseTrajectory")[0].reward == 1.0
        await t.close("again")  # type: ignore[arg-type]  # does nothing once closed


async def test_a_closing_that_the_scheduler_finds_wrong_can_be_made_right() -> None:
    async with one_trajectory("e0", prompt=PROMPT) as (mesh, t):
        wrong = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", fields=("reward",))
        mesh.scheduler.refuse_next("CloseTrajectory", wrong)
        with pytest.raises(treadle.TreadleError, match="reward"):
            await t.close(0.5)
        await t.close(0.25)
        assert [each.reward for each in mesh.scheduler.requests("CloseTrajectory")] == [0.5, 0.25]


@pytest.mark.parametrize("ids", [["x"], [1.5], [2**31], [-1], "text"])
async def test_what_are_no_token_ids_is_refused_before_anything_changes(ids: Any) -> None:
    """Neither an observation nor a prompt. Result: the next turn runs."""
    async with fake_mesh("e0") as mesh, mesh.client() as client:
        with pytest.raises(ValueError, match="prompt must be token ids"):
            await client.open(prompt_id="p0", sample=0, prompt=ids)
        assert not mesh.scheduler.requests("OpenTrajectory")
        t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
        with pytest.raises(ValueError, match="token_ids must be token ids"):
            t.observe(ids)
        t.observe(each for each in (7, 8))  # type: ignore[arg-type]
        assert (t.tokens, len(t.loss_mask), len(t.logprobs)) == ([*PROMPT, 7, 8], 5, 5)
        await generate(t, 4)


async def test_the_cap_of_a_trajectory_cuts_a_step_and_then_refuses_the_next() -> None:
    async with one_trajectory(prompt=PROMPT, max_total_tokens=5) as (mesh, t):
        await generate(t, 64)
        assert (len(t.steps[0].token_ids), t.tokens_left) == (5, 0)
        with pytest.raises(treadle.TokensSpent):
            await generate(t, 64)
        assert len(mesh.scheduler.requests("ScheduleStep")) == 1


async def test_leaving_the_client_closes_what_is_left_open() -> None:
    async with fake_mesh() as mesh:
        async with mesh.client() as client:
            t = await client.open(prompt_id="p0", sample=0, prompt=PROMPT)
            await t.open_session("count", {})
        assert mesh.scheduler.outcomes == {t.trajectory_id: scheduler_pb2.OUTCOME_CANCELLED}
        assert not mesh.tools.sessions
        with pytest.raises(treadle.TreadleError, match="TRAJECTORY_CLOSED"):
            t.observe([1])


async def test_a_caller_that_is_cancelled_while_it_closes_leaves_no_trajectory_open() -> None:
    """Cancelled once the call has begun and before the scheduler has it."""
    async with fake_mesh() as mesh, mesh.client() as client:
        t = await client.open(prompt_id="p0", sample=0, prompt=[1])
        closing = asyncio.create_task(t.close(reward=1.0))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert mesh.scheduler.outcomes == {t.trajectory_id: scheduler_pb2.OUTCOME_FINISHED}
        assert not mesh.scheduler.open_trajectories


async def test_an_empty_prompt_is_refused_with_its_field() -> None:
    async with fake_mesh() as mesh, mesh.client() as client:
        with pytest.raises(treadle.TreadleError) as refused:
            await client.open(prompt_id="p0", sample=0, prompt=[])
        assert [violation.field for violation in refused.value.field_violations] == [
            "prompt_tokens"
        ]


async def test_a_closed_trajectory_takes_nothing_more() -> None:
    async with one_trajectory(prompt=PROMPT) as (mesh, t):
        await t.close(reward=1.0)
        await t.close(reward=2.0, outcome="failed")
        assert (t.reward, t.outcome, len(mesh.scheduler.requests("CloseTrajectory"))) == (
            1.0,
            "finished",
            1,
        )
        for work in (
            t.tool("echo", {}),
            t.open_session("count", {}),
            anext(t.generate(treadle.Sampling(1))),
        ):
            with pytest.raises(treadle.TreadleError, match="TRAJECTORY_CLOSED"):
                await work


async def test_a_client_that_was_not_entered_says_how_it_is_used() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await treadle.Client("127.0.0.1:1").open(prompt_id="p0", sample=0, prompt=[1])


async def test_arguments_that_are_not_json_are_refused_before_any_call() -> None:
    async with one_trajectory(prompt=PROMPT) as (mesh, t):
        with pytest.raises(TypeError):
            await t.tool("echo", {"x": object()})
        assert not mesh.tools.calls
