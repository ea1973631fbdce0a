"""Scenarios of the call that all adapters make, and of the sessions that find a request's
trajectory."""

import asyncio
import gc
import re
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import treadle
from support.conditions import until
from support.fake_engine import Script, logprob_at, token_at
from support.fake_servicer import Refusal
from support.mesh_in_process import FakeMesh, fake_mesh
from treadle.adapters import calls
from treadle.adapters.calls import Answer, Link, one_run, sampling_of
from treadle.adapters.sessions import FEWEST_PAUSES, OWN_TOKENS, Sessions
from treadle.scheduler.v1 import scheduler_pb2

PROMPT = [11, 12, 13]
FIVE = treadle.Sampling(max_new_tokens=5)


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with fake_mesh("e0") as mesh:
        yield mesh


@pytest.fixture
async def link(mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Link]:
    """As the adapters reach it: by the address in the environment."""
    monkeypatch.setenv("TREADLE_ADDRESS", mesh.address)
    yield await calls.link_to()
    await calls.leave()


def expected(prompt: list[int], count: int = 5) -> list[int]:
    return [token_at(prompt, index) for index in range(count)]


def asked_for_steps(mesh: FakeMesh) -> int:
    """Trajectories whose opening the client knows of."""
    return len({each.trajectory_id for each in mesh.scheduler.requests("ScheduleStep")})


def prompts_opened(mesh: FakeMesh) -> list[tuple[str, int]]:
    return [(each.prompt_id, each.sample) for each in mesh.scheduler.requests("OpenTrajectory")]


async def test_turns_of_a_session_are_one_trajectory_and_equal_to_a_direct_call(
    mesh: FakeMesh, link: Link
) -> None:
    """Three turns, each with the whole context and something that a tool said.

    Result: one trajectory with three turns; tokens, logprobs and version spans are those of the
    client itself.
    """
    context, found = list(PROMPT), list[Answer]()
    for _ in range(3):
        found.append(await link.generate(context, FIVE, "s"))
        context += [*found[-1].token_ids, 7, 8]
    async with mesh.client() as client:
        direct = await client.open(prompt_id="direct", sample=0, prompt=PROMPT)
        for _ in range(3):
            async for _ in direct.generate(FIVE):
                pass
            direct.observe([7, 8])
    assert [each.token_ids for each in found] == [step.token_ids for step in direct.steps]
    assert [each.logprobs for each in found] == [[logprob_at(index) for index in range(5)]] * 3
    assert [each.version_spans for each in found] == [step.version_spans for step in direct.steps]
    assert {each.finish_reason for each in found} == {"length"}
    assert len({each.trajectory_id for each in found}) == 1
    turns = [each.turn for each in mesh.scheduler.requests("ScheduleStep")]
    assert turns == [0, 1, 2, 0, 1, 2]


async def test_without_a_session_a_request_is_found_by_its_tokens_and_samples_are_counted(
    mesh: FakeMesh, link: Link
) -> None:
    """Two samples of one prompt, whose tokens are the same here, and another prompt; then a turn of
    one of them."""
    first, second = await asyncio.gather(link.generate(PROMPT, FIVE), link.generate(PROMPT, FIVE))
    other = await link.generate([9], FIVE)
    later = await link.generate([*PROMPT, *first.token_ids, 7], FIVE)
    assert first.trajectory_id != second.trajectory_id
    assert later.trajectory_id in (first.trajectory_id, second.trajectory_id)
    (one, sample), (same, next_sample), (another, _) = prompts_opened(mesh)
    assert one == same != another
    assert sorted((sample, next_sample)) == [0, 1]
    assert other.trajectory_id not in (first.trajectory_id, second.trajectory_id)


async def test_a_context_that_is_rewritten_begins_another_trajectory_and_the_longest_beginning_is_gone_on_with(
    link: Link,
) -> None:
    first = await link.generate(PROMPT, FIVE, "s")
    rewritten = await link.generate([*PROMPT, 999], FIVE, "s")
    again = await link.generate([*PROMPT, *first.token_ids], FIVE, "s")
    stranger = await link.generate([*PROMPT, *first.token_ids, *again.token_ids], FIVE, "t")
    assert rewritten.trajectory_id != first.trajectory_id == again.trajectory_id
    assert stranger.trajectory_id not in (first.trajectory_id, rewritten.trajectory_id)


async def test_a_turn_that_failed_is_tried_again_in_its_trajectory(
    mesh: FakeMesh, link: Link
) -> None:
    mesh.engines["e0"].refuse_next(
        "Generate", Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    )
    with pytest.raises(treadle.TreadleError, match="INVALID_ARGUMENT"):
        await link.generate(PROMPT, FIVE, "s")
    answer = await link.generate(PROMPT, FIVE, "s")
    assert answer.token_ids == expected(PROMPT)
    assert len(mesh.scheduler.trajectories) == 1


@pytest.mark.parametrize("forgotten", [False, True])
async def test_a_trajectory_that_the_scheduler_has_closed_is_followed_by_another_one(
    mesh: FakeMesh, link: Link, forgotten: bool
) -> None:
    """As after a lease that had run out: the request must not fail for it, and the next one must
    not meet it again. The scheduler has forgotten what it closed long ago."""
    first = await link.generate(PROMPT, FIVE, "s")
    if forgotten:
        known = mesh.scheduler.trajectories
        known["another"] = known.pop(first.trajectory_id)
    else:
        mesh.scheduler.outcomes[first.trajectory_id] = scheduler_pb2.OUTCOME_FAILED
    context = [*PROMPT, *first.token_ids, 7]
    second = await link.generate(context, FIVE, "s")
    assert second.token_ids == expected(context)
    assert second.trajectory_id != first.trajectory_id
    third = await link.generate([*context, *second.token_ids], FIVE, "s")
    assert third.trajectory_id == second.trajectory_id


async def test_no_trajectory_that_the_scheduler_has_closed_stands_in_the_way_of_a_request(
    mesh: FakeMesh, link: Link
) -> None:
    """All samples of a prompt are closed, and the prompt goes on with any of them. Result: the
    client forgets them."""
    answers = await asyncio.gather(*(link.generate(PROMPT, FIVE) for _ in range(3)))
    mesh.scheduler.outcomes |= {
        each.trajectory_id: scheduler_pb2.OUTCOME_FAILED for each in answers
    }
    context = [*PROMPT, *answers[0].token_ids]
    again = await link.generate(context, FIVE)
    assert again.token_ids == expected(context)
    assert mesh.scheduler.open_trajectories == {again.trajectory_id}
    assert link.sessions.idle == len(link.client._open) == 1


async def test_a_request_under_way_when_its_link_is_left_gets_no_answer_of_an_earlier_turn(
    mesh: FakeMesh, link: Link
) -> None:
    first = await link.generate(PROMPT, FIVE, "s")
    mesh.scheduler.engines.clear()  # the next turn waits
    asking = asyncio.create_task(link.generate([*PROMPT, *first.token_ids], FIVE, "s"))
    await until(lambda: len(mesh.scheduler.requests("ScheduleStep")) > 1)
    await calls.leave()
    with pytest.raises(treadle.TreadleError, match="TRAJECTORY_CLOSED"):
        await asking


async def test_a_request_that_is_cancelled_leaves_its_trajectory_to_the_next(
    mesh: FakeMesh, link: Link
) -> None:
    engine = mesh.engines["e0"]
    engine.script = Script(hold_at=4)
    asking = asyncio.create_task(link.generate(PROMPT, FIVE, "s"))
    await asyncio.wait_for(engine.holding.wait(), 20.0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert len(engine.aborted) == 1
    [tokens] = link.sessions.known("s")
    assert tokens[:3] == PROMPT
    assert (await link.generate(tokens, FIVE, "s")).trajectory_id == "t-0"


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, scheduler_pb2.OUTCOME_FINISHED),
        (ValueError(), scheduler_pb2.OUTCOME_FAILED),
        (asyncio.CancelledError(), scheduler_pb2.OUTCOME_CANCELLED),
    ],
)
async def test_what_an_agent_has_open_ends_with_its_run(
    mesh: FakeMesh, link: Link, error: BaseException | None, outcome: int
) -> None:
    """Two requests without a session and one with, in one run, from tasks of its own; another run
    goes on."""

    async def agent() -> None:
        async with one_run():
            first = await link.generate(PROMPT, FIVE)
            context = [*PROMPT, *first.token_ids]
            await asyncio.create_task(link.generate(context, FIVE))
            await link.generate(PROMPT, FIVE, "named")
            if error is not None:
                raise error

    kept = await link.generate(PROMPT, FIVE, "another")
    [result] = await asyncio.gather(agent(), return_exceptions=True)
    assert type(result) is type(error)
    ended = {
        name: each for name, each in mesh.scheduler.outcomes.items() if name != kept.trajectory_id
    }
    assert list(ended.values()) == [outcome, outcome]
    assert mesh.scheduler.open_trajectories == {kept.trajectory_id}


async def test_a_request_that_outlives_its_run_ends_as_the_run_has(
    mesh: FakeMesh, link: Link
) -> None:
    mesh.engines["e0"].script = Script(hold_at=4)
    left: list[asyncio.Task[Answer]] = []
    with pytest.raises(LookupError):
        async with one_run():
            left.append(asyncio.create_task(link.generate(PROMPT, FIVE)))
            await asyncio.wait_for(mesh.engines["e0"].holding.wait(), 20.0)
            raise LookupError
    left[0].cancel()
    await asyncio.wait(left)
    assert list(mesh.scheduler.outcomes.values()) == [scheduler_pb2.OUTCOME_FAILED]


async def test_a_request_that_is_cancelled_while_others_of_its_session_close_leaves_no_trajectory_open(
    mesh: FakeMesh, link: Link
) -> None:
    await link.generate(PROMPT, FIVE, "env", alone=True)
    mesh.scheduler.refuse_next(
        "CloseTrajectory", Refusal(grpc.StatusCode.UNAVAILABLE, "AWAY", retry_after_s=0.5)
    )
    asking = asyncio.create_task(link.generate([99], FIVE, "env", alone=True))
    await until(lambda: len(mesh.scheduler.requests("CloseTrajectory")) == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await link.sessions.close("env")
    assert not mesh.scheduler.open_trajectories


async def test_a_session_with_one_trajectory_at_a_time_ends_the_one_before(
    mesh: FakeMesh, link: Link
) -> None:
    first = await link.generate(PROMPT, FIVE, "env", alone=True)
    turn = await link.generate([*PROMPT, *first.token_ids], FIVE, "env", alone=True)
    await link.generate([99], FIVE, "env", alone=True)
    assert first.trajectory_id == turn.trajectory_id
    assert mesh.scheduler.outcomes == {first.trajectory_id: scheduler_pb2.OUTCOME_FINISHED}


async def test_idle_trajectories_are_closed_by_their_age_and_the_newer_ones_of_the_same_tokens_stay(
    mesh: FakeMesh,
) -> None:
    """Two trajectories with equal tokens, ten seconds apart, in a session and without one."""
    now = 0.0
    async with mesh.client() as client:
        sessions = Sessions(client, idle_s=100.0, unnamed_idle_s=5.0, now=lambda: now)
        for session in ("s", ""):
            now = 0.0
            oldest = await sessions.generate(session, PROMPT, FIVE)
            now = 10.0
            await sessions.generate(session, PROMPT, FIVE)
        now = 12.0
        assert (await sessions.sweep(), sessions.idle) == (1, 3)
        assert list(mesh.scheduler.outcomes) == [oldest.trajectory_id]
        now = 105.0
        assert (await sessions.sweep(), sessions.idle) == (2, 1)
        newer = await sessions.generate("s", oldest.tokens, FIVE)
        assert newer.trajectory_id in mesh.scheduler.open_trajectories
        assert (await sessions.close("s"), sessions.idle) == (1, 0)


async def test_a_sweep_ends_with_its_client(mesh: FakeMesh) -> None:
    """The scheduler goes away while the sweep closes a trajectory, and the client closes then."""
    now_s = 0.0
    client = mesh.client(timeouts=treadle.Timeouts(cleanup_s=0.3))
    await client.__aenter__()
    sessions = Sessions(client, 1.0, 1.0, now=lambda: now_s)
    await sessions.generate("s", PROMPT, FIVE)
    await mesh.scheduler_port.stop()
    now_s = 2.0
    sweeping = asyncio.create_task(sessions.sweep())
    await asyncio.sleep(0.1)
    await client.__aexit__(None, None, None)
    assert (await sweeping, await sessions.sweep()) == (1, 0)


async def test_a_link_that_cannot_be_opened_is_tried_again(
    mesh: FakeMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TREADLE_TLS_FOLDER", str(tmp_path))  # without certificates
    with pytest.raises(ValueError, match="treadle certs"):
        await calls.link_to(mesh.address)
    monkeypatch.delenv("TREADLE_TLS_FOLDER")
    link = await calls.link_to(mesh.address)
    assert (await link.generate(PROMPT, FIVE)).token_ids == expected(PROMPT)
    await calls.leave()


async def test_idle_trajectories_have_a_most_number_of_tokens(mesh: FakeMesh) -> None:
    """Of any sessions. Result: beyond it, those that are idle for longest are closed."""
    now = 0.0
    async with mesh.client() as client:
        most = 3 * (OWN_TOKENS + len(PROMPT) + 6)
        sessions = Sessions(client, 1800.0, 1800.0, lambda: now, idle_tokens=most)
        opened = []
        for number in range(5):
            opened.append(await sessions.generate(f"s{number}", [number, *PROMPT], FIVE))
            now += 1.0
        assert (await sessions.sweep(), sessions.idle) == (2, 3)
        assert list(mesh.scheduler.outcomes) == [each.trajectory_id for each in opened[:2]]
        again = await sessions.generate("s0", [*opened[0].tokens, 7], FIVE)
        assert again.tokens[: len(opened[0].tokens)] == opened[0].tokens


async def test_idle_trajectories_make_room_for_a_first_step_that_waits(mesh: FakeMesh) -> None:
    """Room for twenty trajectories, and twenty requests without a session, none of which goes on.

    Result: nothing is closed while the last request waits for a moment only; then the two longest
    idle are, and it is answered.
    """
    now = 0.0
    mesh.scheduler.room = 20
    async with mesh.client() as client:
        sessions = Sessions(client, idle_s=1800.0, unnamed_idle_s=1800.0, now=lambda: now)
        opened = []
        for number in range(20):
            opened.append(await sessions.generate("", [number, *PROMPT], FIVE))
            now += 0.1
        waiting = asyncio.create_task(sessions.generate("", [20, *PROMPT], FIVE))
        await until(lambda: asked_for_steps(mesh) == 21)
        assert await sessions.sweep() == 0
        now += 1.0
        assert await sessions.sweep() == 2
        await waiting
        assert list(mesh.scheduler.outcomes) == [each.trajectory_id for each in opened[:2]]


async def test_trajectories_that_go_on_are_not_closed_to_make_room(mesh: FakeMesh) -> None:
    """A conversation whose tools take ten seconds, and room for it alone.

    Result: a first step closes it only once it is idle for four times as long as it ever was
    before, and what comes back after that opens anew and makes the next ones wait longer.
    """
    now = 0.0
    mesh.scheduler.room = 1
    async with mesh.client() as client:
        sessions = Sessions(client, idle_s=1800.0, unnamed_idle_s=1800.0, now=lambda: now)
        talk = await sessions.generate("", PROMPT, FIVE)
        for _ in range(FEWEST_PAUSES):
            now += 10.0
            talk = await sessions.generate("", [*talk.tokens, 7], FIVE)
        waiting = asyncio.create_task(sessions.generate("", [99], FIVE))
        await until(lambda: asked_for_steps(mesh) == 2)
        now += 39.0
        assert await sessions.sweep() == 0
        now += 2.0
        assert await sessions.sweep() == 1
        other = await waiting
        back = asyncio.create_task(sessions.generate("", [*talk.tokens, 7], FIVE))
        await until(lambda: asked_for_steps(mesh) == 3)
        now += 163.0
        assert await sessions.sweep() == 0  # it has come back after 41 s
        now += 2.0
        assert await sessions.sweep() == 1
        assert (await back).trajectory_id != talk.trajectory_id
        assert list(mesh.scheduler.outcomes) == [talk.trajectory_id, other.trajectory_id]


def test_links_of_event_loops_that_have_ended_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a trainer that calls asyncio.run for each batch and never `leave`."""
    monkeypatch.setenv("TREADLE_ADDRESS", "127.0.0.1:1")

    async def use() -> weakref.ref[Link]:
        return weakref.ref(await calls.link_to())

    links = [asyncio.run(use()) for _ in range(3)]
    gc.collect()
    assert [link() is not None for link in links] == [False, False, True]


async def test_a_call_about_the_whole_mesh_works_where_an_event_loop_runs(mesh: FakeMesh) -> None:
    """As in a notebook. The mesh is in the loop of the test, so that the call is in another one."""

    async def ask(client: treadle.Client) -> dict[str, str]:
        opened = await client.open(prompt_id="p", sample=0, prompt=PROMPT)
        return {"e0": opened.trajectory_id}

    async def notebook() -> None:
        calls.call_mesh(mesh.address, ask)

    with pytest.raises(RuntimeError, match="engines of the mesh have failed: e0: t-0"):
        await asyncio.to_thread(asyncio.run, notebook())


def test_sampling_parameters_come_by_the_names_of_sglang_vllm_and_transformers() -> None:
    params = {
        "temperature": 0.5,
        "top_k": 0,
        "stop": "x",
        "eos_token_id": 2,
        "repetition_penalty": 1.0,
        "logprobs": 1,
    }
    sampling = sampling_of({**params, "seed": None, "n": 1, "max_tokens": 99}, 7)
    assert sampling == treadle.Sampling(
        7, temperature=0.5, top_k=-1, stop=("x",), stop_token_ids=(2,)
    )
    assert sampling_of({"stop_strings": ["a", "b"], "stop_token_ids": [3, 4]}, 1).stop == ("a", "b")


def test_what_ends_a_generation_may_come_by_two_names() -> None:
    sampling = sampling_of(
        {"stop_token_ids": [5], "eos_token_id": 2, "stop": None, "stop_strings": ["x"]}, 7
    )
    assert (sampling.stop, sampling.stop_token_ids) == (("x",), (5, 2))


def test_a_greedy_generation_by_transformers_name_has_temperature_0() -> None:
    assert sampling_of({"temperature": 0.7, "do_sample": False}, 7).temperature == 0.0
    assert sampling_of({"do_sample": True, "temperature": 0.7}, 7).temperature == 0.7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("n", 1), ("best_of", 1), ("min_new_tokens", 0), ("frequency_penalty", 0.0)),
        *(("skip_special_tokens", False), ("return_logprob", False), ("logprobs", True)),
        *(("extra_body", {}), ("bad_words", []), ("regex", ""), ("lora_path", None)),
        *(("max_completion_tokens", 9), ("seed", None), ("stop", None), ("stop_token_ids", [])),
        *(("logprobs", 1), ("early_stopping", False), ("ignore_eos", None), ("top_k", None)),
    ],
)
def test_a_parameter_that_changes_no_token_is_passed_over(name: str, value: object) -> None:
    assert sampling_of({name: value}, 7) == treadle.Sampling(7)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"seed": 1, "sampling_seed": 2}, "sampling_seed=2: seed is 1 already"),
        ({"max_length": 9}, "max_length=9"),
        (object(), "must be a mapping from names to values, are a object"),
    ],
)
def test_parameters_that_contradict_or_are_none_are_refused(params: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sampling_of(params, 7)
    assert sampling_of({"max_length": 9, "max_new_tokens": 5, "seed": 1, "sampling_seed": 1}, 5)


@pytest.mark.parametrize(("held_at", "spans"), [(0, [(0, 5)]), (2, [(0, 2), (2, 4), (4, 5)])])
async def test_a_turn_that_a_pause_ends_is_generated_to_its_end(
    mesh: FakeMesh, link: Link, held_at: int, spans: list[tuple[int, int]]
) -> None:
    """The engine ends two calls early, as for a pause of the mesh: without a token, or after two.

    Result: one answer with all tokens, of one trajectory.
    """
    engine = mesh.engines["e0"]
    engine.script = Script(hold_at=held_at, times=2)
    asking = asyncio.create_task(link.generate_whole(PROMPT, FIVE, "s"))
    for _ in range(2):
        await asyncio.wait_for(engine.holding.wait(), 20.0)
        engine.holding.clear()
        for abort in engine._aborts.values():
            abort.set()
    whole = await asking
    tokens: list[int] = []
    for start, end in spans:  # an engine's tokens depend on its prompt
        tokens += expected([*PROMPT, *tokens], end - start)
    assert (whole.token_ids, whole.finish_reason) == (tokens, "length")
    assert len(whole.logprobs) == 5
    assert [(each.start_token, each.end_token) for each in whole.version_spans] == spans
    assert len(mesh.scheduler.trajectories) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("repetition_penalty", 1.1), ("min_tokens", 3), ("n", 2), ("typo", 1), ("best_of", 4)),
        *(("min_new_tokens", 1), ("presence_penalty", 0.5), ("logit_bias", {"5": 1}), ("n", 0)),
        *(("lora_path", "a"), ("extra_body", {"a": 1}), ("timeout", 5), ("prompt_logprobs", 0)),
        *(("regex", "a+"), ("stop_regex", "a"), ("top_logprobs_num", 3), ("custom_params", {1: 2})),
        *(("logprobs", 5), ("priority", 0), ("tools", ["t"]), ("add_bos", False)),
    ],
)
def test_a_parameter_that_the_mesh_does_not_carry_is_refused_by_name(
    name: str, value: object
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}")):
        sampling_of({"temperature": 1.0, name: value}, 7)


def test_each_token_has_the_version_that_sampled_it() -> None:
    spans = (
        treadle.VersionSpan("4", 0, 2),
        treadle.VersionSpan("default", 2, 3),
        treadle.VersionSpan("5", 3, 5),
    )
    answer = Answer([1, 2, 3, 4, 5], [0.0] * 5, "stop", spans, "t", 0, 0, 0.0, 0.0, 0.0)
    assert answer.versions(otherwise=9) == [4, 4, 9, 5, 5]
    assert answer.numbered_versions == [4, 5]
