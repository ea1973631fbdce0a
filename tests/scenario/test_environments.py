"""Environments played as trajectories of a mesh: real gymnasium, reasoning-gym and functions as
tools, fake engines.

A script says what the policy's tokens mean, so that it acts as a test wants; the tokens are those
of the engine.
"""

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import gymnasium
import pytest
import reasoning_gym
import treadle
from support.conditions import until
from support.fake_rewards import SCORE, fake_rewards
from support.fake_sglang import VOCAB
from support.mesh_in_process import WAIT_S, FakeMesh
from support.mesh_of_processes import mesh as mesh_of_processes
from support.processes import StartService
from support.scripted_chat import LETTERS, read, render, scripted_chat
from treadle.environments import (
    Chat,
    Environment,
    EnvManager,
    Episode,
    Gym,
    Message,
    ReasoningGym,
    Reply,
    Sandboxed,
    Task,
    ToolCall,
    ToolUse,
    Turn,
    mesh_tool,
    user,
)

SAMPLING = treadle.Sampling(max_new_tokens=4, temperature=1.0)
MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
# of FrozenLake's map of four by four
TO_THE_GOAL = ["down", "I go down.", "right", "right!", "down", "RIGHT"]


def manager(
    client: treadle.Client, environment: Environment, replies: Sequence[str], **more: Any
) -> EnvManager:
    return EnvManager(
        client, environment, chat=scripted_chat(replies), **{"sampling": SAMPLING, **more}
    )


def lake(seeds: Sequence[int] = (1,), **more: Any) -> Gym:
    return Gym(
        "FrozenLake-v1",
        seeds=seeds,
        actions=MOVES,
        is_slippery=False,
        **{"system": "Play.", **more},
    )


def check(result: treadle.RolloutResult) -> None:
    """What was sampled is in the mask and has a logprob; what was written is not."""
    for t in result.trajectories:
        assert t.error == ""
        assert len(t.tokens) == len(t.loss_mask) == len(t.logprobs)
        sampled = [token for token, mask in zip(t.tokens, t.loss_mask, strict=True) if mask]
        assert sampled == [token for step in t.steps for token in step.token_ids]


async def test_gymnasium_is_played_to_its_goal(mesh: FakeMesh, client: treadle.Client) -> None:
    """Two seeds, two samples each, one after the other.

    Result: each walks to the goal in six turns, and reads where it is before each; the time of its
    environment is tool time.
    """
    result = await manager(client, lake([1, 2]), TO_THE_GOAL).rollout(
        samples_per_prompt=2, concurrency=1
    )
    check(result)
    assert [t.prompt_id for t in result.trajectories] == ["FrozenLake-v1-1"] * 2 + [
        "FrozenLake-v1-2"
    ] * 2
    for t in result.trajectories:
        assert (t.reward, t.outcome, len(t.steps)) == (1.0, "finished", 6)
        fields = "$assistant: ~$user: ".join(["0", "4", "8", "9", "10", "14"])
        assert read(t.tokens) == f"system: Play.$user: {fields}$assistant: ~"
        assert [span.kind for span in t.spans].count("tool") == 7
    assert not mesh.scheduler.open_trajectories


async def test_a_reply_without_an_action_is_told_so_and_turns_have_an_end(
    client: treadle.Client,
) -> None:
    """The policy hesitates, walks into a hole in its third turn, or has two turns only."""
    replies = ["Hm.", "right", "down"]
    [fell] = (await manager(client, lake(), replies).rollout(samples_per_prompt=1)).trajectories
    hint = "That names no action. Name one of: left, down, right, up."
    assert read(
        fell.tokens
    ) == f"system: Play.$user: 0$assistant: ~${'$'.join([f'user: {hint}', 'assistant: ~'])}" + (
        "$user: 1$assistant: ~"
    )
    assert (fell.reward, len(fell.steps)) == (0.0, 3)
    [short] = (
        await manager(client, lake(), replies, most_turns=2).rollout(samples_per_prompt=1)
    ).trajectories
    assert (len(short.steps), short.outcome, short.reward) == (2, "finished", 0.0)
    assert short.tokens[-1] < LETTERS  # what nobody replies to is not written


async def test_a_trajectory_that_has_spent_its_tokens_keeps_what_it_has_earned(
    client: treadle.Client,
) -> None:
    result = await manager(client, lake(), TO_THE_GOAL).rollout(
        samples_per_prompt=1, max_total_tokens=10
    )
    check(result)
    [t] = result.trajectories
    assert (t.outcome, t.reward, [len(step.token_ids) for step in t.steps]) == (
        "truncated",
        0.0,
        [4, 4, 2],
    )


class Breaking(gymnasium.Env[int, int]):
    """Breaks in its second step; counts how many are not closed."""

    open = 0

    def __init__(self) -> None:
        self.steps = 0
        Breaking.open += 1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("the floor gives way")
        return self.steps, 0.5, False, False, {}

    def close(self) -> None:
        Breaking.open -= 1


async def test_an_environment_that_raises_fails_its_trajectory_and_is_closed(
    client: treadle.Client,
) -> None:
    environment = Gym(Breaking, seeds=[0], actions=MOVES, system="Play.")
    [t] = (await manager(client, environment, ["up"]).rollout(samples_per_prompt=1)).trajectories
    assert (t.outcome, t.error, len(t.steps)) == ("failed", "RuntimeError: the floor gives way", 2)
    assert Breaking.open == 0


async def test_a_cancelled_rollout_closes_its_environments(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    mesh.engines["e0"].slot.close()
    mesh.engines["e1"].slot.close()
    playing = asyncio.create_task(
        manager(client, Gym(Breaking, seeds=[0], actions=MOVES, system="Play."), ["up"]).rollout(
            samples_per_prompt=2
        )
    )
    await until(lambda: sum(engine.slot.waiting for engine in mesh.engines.values()) == 2)
    assert Breaking.open == 2
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert Breaking.open == 0
    for engine in mesh.engines.values():
        engine.slot.open()


class Slow(gymnasium.Env[int, int]):
    """Is made, or takes its step, when the test says so, and notes what happens."""

    def __init__(self, waits_in: str) -> None:
        self.waits_in, self.log = waits_in, list[str]()
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> "Slow":
        self.wait("make")
        return self

    def wait(self, what: str) -> None:
        self.log.append(what)
        if what == self.waits_in:
            self.begun.set()
            self.may_end.wait(WAIT_S)
        self.log.append("done")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.wait("step")
        return 0, 0.0, False, False, {}

    def close(self) -> None:
        self.log.append("close")


@pytest.mark.parametrize(
    ("waits_in", "log"),
    [("make", ["make", "done", "close"]), ("step", ["make", "done", "step", "done", "close"])],
)
async def test_a_gymnasium_that_is_busy_is_closed_once_it_is_not(
    client: treadle.Client, waits_in: str, log: list[str]
) -> None:
    """The rollout is cancelled while a thread makes the environment, or takes its step.

    Result: the environment is closed afterwards, and not during the call.
    """
    slow = Slow(waits_in)
    environment = Gym(slow, seeds=[0], actions=MOVES, system="Play.")
    playing = asyncio.create_task(
        manager(client, environment, ["up"]).rollout(samples_per_prompt=1)
    )
    await until(slow.begun.is_set)
    playing.cancel()
    await asyncio.sleep(0.2)  # of which some would be enough to close it too early
    slow.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await until(lambda: slow.log[-1] == "close")
    assert slow.log == log


async def test_a_gymnasium_that_hangs_does_not_hold_up_the_end_of_its_rollout(
    client: treadle.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.environments.gym.CLOSE_S", 0.1)
    slow = Slow("step")
    environment = Gym(slow, seeds=[0], actions=MOVES, system="Play.")
    playing = asyncio.create_task(
        manager(client, environment, ["up"]).rollout(samples_per_prompt=1)
    )
    await until(slow.begun.is_set)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert slow.log == ["make", "done", "step"]
    slow.may_end.set()
    await until(lambda: slow.log[-1] == "close")


async def test_reasoning_gym_asks_and_scores(client: treadle.Client) -> None:
    """Three questions; the policy answers the first two as the dataset does, and the last one
    wrongly."""
    dataset = reasoning_gym.create_dataset("chain_sum", seed=3, size=3)
    answers = [f"<answer>{dataset[index]['answer']}</answer>" for index in range(2)]
    played = manager(
        client, ReasoningGym(dataset, system="Sums."), [*answers, "<answer>cats</answer>"]
    )
    result = await played.rollout(samples_per_prompt=1, concurrency=1)
    check(result)
    assert [t.reward for t in result.trajectories] == [1.0, 1.0, 0.0]
    for index, t in enumerate(result.trajectories):
        assert t.prompt_id == f"chain_sum-{index}"
        assert read(t.tokens) == f"system: Sums.$user: {dataset[index]['question']}$assistant: ~"


def test_a_rule_that_would_run_the_answer_is_refused() -> None:
    composite = reasoning_gym.create_dataset(
        "composite",
        size=8,
        seed=0,
        datasets=[
            reasoning_gym.composite.DatasetSpec("chain_sum", 1.0, {}),
            reasoning_gym.composite.DatasetSpec("countdown", 1.0, {}),
        ],
    )
    with pytest.raises(ValueError, match="countdown: its rule evaluates the answer"):
        ReasoningGym(composite).tasks()


async def test_an_environment_of_the_mesh_is_played_in_its_session(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    environment = Sandboxed("count", [{"from": 0}], actions={"more": {"by": 1}}, system="Count.")
    result = await manager(client, environment, ["more", "more of it", "stop", "more"]).rollout(
        samples_per_prompt=1
    )
    check(result)
    [t] = result.trajectories
    assert (t.prompt_id, t.reward, len(t.steps)) == ("count-0", 1.5, 4)
    assert read(t.tokens).startswith(
        'system: Count.$user: {"from": 0}$assistant: ~$user: 1$assistant: ~$user: 2$'
    )
    assert not mesh.tools.sessions


async def test_a_step_that_fails_says_why(client: treadle.Client) -> None:
    environment = Sandboxed("count", [{"from": 0}], actions={"more": {"fail": 1}}, system="Count.")
    [t] = (
        await manager(client, environment, ["more"], most_turns=2).rollout(samples_per_prompt=1)
    ).trajectories
    assert "user: error: ValueError: no\nso far$" in read(t.tokens)


async def test_an_episode_counts_where_its_session_cannot_be_closed(mesh: FakeMesh) -> None:
    """The tools service dies after the first step; the policy names no action any more.

    Result: the trajectory has finished, with what it has earned.
    """

    def die(event: treadle.RolloutEvent) -> None:
        if event.kind == "tool" and event.turns:
            dying.append(asyncio.create_task(mesh.lose_tools()))

    dying: list[asyncio.Task[None]] = []
    environment = Sandboxed("count", [{"from": 0}], actions={"more": {}}, system="Count.")
    async with mesh.client(timeouts=treadle.Timeouts(cleanup_s=0.5)) as client:
        played = manager(client, environment, ["more", "stop", "stop"], most_turns=3)
        [t] = (await played.rollout(samples_per_prompt=1, on_event=die)).trajectories
    assert (t.outcome, t.reward, t.error, len(t.steps)) == ("finished", 0.5, "", 3)


class Unclean(Environment):
    """Its episodes cannot be closed; those of the task `breaks` break before."""

    def tasks(self) -> list[Task]:
        return [Task("breaks", [user("?")]), Task("plays", [user("?")])]

    async def start(self, task: Task, trajectory: treadle.Trajectory) -> Episode:
        return UncleanEpisode(task.id)


class UncleanEpisode(Episode):
    def __init__(self, task_id: str) -> None:
        self.task_id = task_id

    async def step(self, reply: Reply) -> Turn:
        if self.task_id == "breaks":
            raise RuntimeError("the floor gives way")
        return Turn(done=True)

    async def close(self) -> None:
        raise OSError("the door is stuck")


async def test_what_went_wrong_first_is_what_a_trajectory_says(client: treadle.Client) -> None:
    result = await manager(client, Unclean(), ["x"]).rollout(samples_per_prompt=1)
    assert [t.error for t in result.trajectories] == [
        "RuntimeError: the floor gives way",
        "OSError: the door is stuck",
    ]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def divide(a: float, b: float) -> float:
    """Divide two numbers."""
    return a / b


ECHO = mesh_tool("echo", "Says it again.", {"type": "object", "properties": {}})


async def test_tools_are_called_until_a_reply_calls_none(client: treadle.Client) -> None:
    """Two calls at once, then four that go wrong, then the answer.

    Result: the policy reads each result, of functions and of the mesh; what goes wrong is a result;
    the score sees the whole conversation.
    """
    scored: list[Sequence[Message]] = []

    async def score(
        conversation: Sequence[Message], task: Task, trajectory: treadle.Trajectory
    ) -> float:
        scored.append(conversation)
        return float(task.data in conversation[-1]["content"])

    replies = [
        f"Both. {call('add', a=2, b=3)}{call('echo', word='hi')}",
        call("divide", a=1.0, b=0.0)
        + call("divide", a=1.0)
        + call("fly")
        + "<tool_call>{</tool_call>",
        "It is 5.",
    ]
    environment = ToolUse([Task("sum", [user("2 and 3?")], "5")], [add, divide, ECHO], score=score)
    result = await manager(client, environment, replies).rollout(samples_per_prompt=1)
    check(result)
    [t] = result.trajectories
    assert (t.reward, len(t.steps)) == (1.0, 3)
    text = read(t.tokens)
    assert text.startswith("['add', 'divide', 'echo']user: 2 and 3?$assistant: ~$")
    assert '~$tool: 5$tool: {"word": "hi"}$assistant: ~$' in text
    for wrong in (
        "ZeroDivisionError",
        "TypeError: missing a required argument: 'b'",
        "there is no tool 'fly'",
    ):
        assert f"tool: error: {wrong}" in text
    assert "tool: error: the call is no JSON" in text
    assert text.count("tool: error: ") == 4
    [conversation] = scored
    assert [message["role"] for message in conversation] == [
        "user",
        "assistant",
        *["tool"] * 2,
        "assistant",
    ] + (["tool"] * 4 + ["assistant"])
    assert [each["function"]["name"] for each in conversation[1]["tool_calls"]] == ["add", "echo"]


async def test_a_call_in_reasoning_is_not_run_and_an_answer_may_be_json(
    client: treadle.Client,
) -> None:
    """The policy considers one call and makes another, of which it is told where there is no such
    tool; its answer has a name.

    Result: the score reads replies without their reasoning.
    """
    scored: list[Message] = []

    def score(conversation: Sequence[Message], task: Task, trajectory: treadle.Trajectory) -> float:
        scored.extend(conversation)
        return 1.0

    answer = '{"name": "Ada Lovelace", "born": 1815}'
    replies = [
        f"<think>Perhaps {call('add', a=1, b=1)}? No.</think>{call('add', a=2, b=3)}{call('fly')}",
        answer,
    ]
    environment = ToolUse([Task("who", [user("Who?")])], [add], score=score)
    [t] = (await manager(client, environment, replies).rollout(samples_per_prompt=1)).trajectories
    assert (t.outcome, t.error, len(t.steps)) == ("finished", "", 2)
    assert "tool: 5$tool: error: there is no tool 'fly'; there are add$" in read(t.tokens)
    considered, last = scored[1], scored[-1]
    assert considered["reasoning_content"].startswith("Perhaps <tool_call>")
    assert [each["function"]["name"] for each in considered["tool_calls"]] == ["add", "fly"]
    assert last == {"role": "assistant", "content": answer}


async def test_a_reply_that_begins_within_reasoning_is_read_so(client: treadle.Client) -> None:
    """The template begins each reply with <think>, and the first reply is cut before the reasoning
    ends.

    Result: no call of it is run, and no move of it is made.
    """

    def thinking(replies: Sequence[str]) -> Chat:
        plain = scripted_chat(replies)
        return Chat(
            lambda *given: render(*given) + ("<think>" if given[2] else ""),
            plain.words,
            plain.decode,
        )

    calls = f"Perhaps {call('add', a=1, b=1)}"
    environment = ToolUse([Task("sum", [user("?")])], [add], score=lambda *_: 1.0)
    played = EnvManager(client, environment, chat=thinking([calls]), sampling=SAMPLING)
    [t] = (await played.rollout(samples_per_prompt=1)).trajectories
    assert (t.error, len(t.steps)) == ("", 1)
    walks = thinking(["right or down", "right?</think> down"])
    played = EnvManager(client, lake(), chat=walks, sampling=SAMPLING, most_turns=3)
    [t] = (await played.rollout(samples_per_prompt=1)).trajectories
    assert "user: 4$assistant: <think>~" in read(t.tokens)
    assert read(t.tokens).count("names no action") == 1


async def test_samples_of_a_group_have_seeds_of_their_own(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    """Result: the seed and the index of the sample, in each of its turns; near the largest seed,
    they begin again at 0."""
    for seed, expected in ((7, [7, 8, 9]), (2**63 - 2, [2**63 - 2, 2**63 - 1, 0])):
        sampling = treadle.Sampling(max_new_tokens=4, temperature=1.0, seed=seed)
        played = manager(client, lake(), ["up"], sampling=sampling, most_turns=2)
        result = await played.rollout(samples_per_prompt=3)
        check(result)
        asked = {
            (request.ticket.trajectory_id, request.sampling.seed)
            for engine in mesh.engines.values()
            for request in engine.requests("Generate")
        }
        of = dict(asked)
        assert [of[t.trajectory_id] for t in result.trajectories] == expected


async def reset(word: str) -> str:
    """Calls something that is away."""
    raise ConnectionResetError(f"no {word}")


async def test_a_function_that_cannot_connect_is_an_answer_and_a_mesh_that_refuses_is_not(
    client: treadle.Client,
) -> None:
    """Result: what a tool of the mesh is refused for is no fault of the policy, and nobody trains
    on it."""
    given = [Task("t", [user("?")])]
    missing = mesh_tool("fly", "There is none.", {"type": "object", "properties": {}})
    environment = ToolUse(given, [reset, missing], score=lambda *_: 1.0)
    replies = [call("reset", word="x"), "done"]
    [t] = (await manager(client, environment, replies).rollout(samples_per_prompt=1)).trajectories
    assert (t.outcome, t.reward) == ("finished", 1.0)
    assert "tool: error: ConnectionResetError: no x$" in read(t.tokens)
    [t] = (
        await manager(client, environment, [call("fly"), "done"]).rollout(samples_per_prompt=1)
    ).trajectories
    assert t.outcome == "failed"
    assert t.error.startswith("TreadleError: NOT_FOUND TOOL_NOT_FOUND")


async def test_long_output_is_cut_and_two_tools_need_two_names(
    client: treadle.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treadle.environments.tools.MOST_OUTPUT_CHARS", 5)
    given = [Task("t", [user("?")])]
    environment = ToolUse(given, [ECHO], score=lambda *_: 0.0)
    played = await manager(client, environment, [call("echo", x=1), "done"]).rollout(
        samples_per_prompt=1
    )
    assert 'tool: {"x":\n[3 more characters]$' in read(played.trajectories[0].tokens)
    with pytest.raises(ValueError, match="same name: add"):
        ToolUse(given, [add, add], score=lambda *_: 0.0)


async def test_the_mesh_can_score_an_episode(mesh: FakeMesh, client: treadle.Client) -> None:
    async def score(
        conversation: Sequence[Message], task: Task, trajectory: treadle.Trajectory
    ) -> treadle.PendingReward:
        return await trajectory.score(
            "exact_match", {"answer": conversation[-1]["content"], "expected": task.data}
        )

    async with fake_rewards(mesh) as rewards:
        environment = ToolUse([Task("sum", [user("2 and 3?")], "5")], [add], score=score)
        [t] = (await manager(client, environment, ["5"]).rollout(samples_per_prompt=1)).trajectories
        [asked] = rewards.requests("ScoreTrajectory")
    assert (t.reward, t.outcome, t.error) == (SCORE, "finished", "")
    assert json.loads(asked.arguments_json) == {"answer": "5", "expected": "5"}


class Riddle(Environment):
    """An environment that somebody wrote: one turn, with first words and a sampling of its own."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages

    def tasks(self) -> list[Task]:
        return [Task("a", self.messages), Task("b", self.messages)]

    async def start(self, task: Task, trajectory: treadle.Trajectory) -> Episode:
        return RiddleEpisode()


class RiddleEpisode(Episode):
    async def begin(self) -> Turn:
        return Turn(lead="It is", sampling=treadle.Sampling(max_new_tokens=2))

    async def step(self, reply: Reply) -> Turn:
        return Turn(reward=float(reply.text == "It is time"), done=True)

    async def finish(self, conversation: Sequence[Message]) -> float:
        return 10.0 * len(conversation)


async def test_first_words_and_a_sampling_of_a_turn_are_used(client: treadle.Client) -> None:
    result = await manager(client, Riddle([user("What flies?")]), [" time"]).rollout(
        samples_per_prompt=1
    )
    check(result)
    for t in result.trajectories:
        assert (t.reward, len(t.steps[0].token_ids)) == (21.0, 2)
        assert read(t.tokens) == "user: What flies?$assistant: It is~"


async def test_a_turn_ends_where_the_template_or_the_caller_ends_it(
    mesh: FakeMesh, client: treadle.Client
) -> None:
    """Result: each step stops at the tokens of both. Where there are no tools, nobody looks for
    calls."""

    def look(text: str) -> list[ToolCall]:
        raise AssertionError(text)

    chat = scripted_chat(["x"])
    chat.stop_token_ids = (7, 8)
    sampling = treadle.Sampling(max_new_tokens=4, stop_token_ids=(8, 9))
    played = EnvManager(client, lake(), chat=chat, sampling=sampling, most_turns=2, read_calls=look)
    check(await played.rollout(samples_per_prompt=1))
    asked = [request for engine in mesh.engines.values() for request in engine.requests("Generate")]
    assert [tuple(each.sampling.stop_token_ids) for each in asked] == [(8, 9, 7)] * 2


async def test_a_gymnasium_that_runs_out_of_time_is_over(client: treadle.Client) -> None:
    environment = lake(max_episode_steps=2)
    [t] = (await manager(client, environment, ["up"]).rollout(samples_per_prompt=1)).trajectories
    assert (len(t.steps), t.outcome, t.reward) == (2, "finished", 0.0)


async def test_tasks_can_be_chosen_and_must_have_ids_of_their_own(client: treadle.Client) -> None:
    played = manager(client, Riddle([user("?")]), ["x"])
    assert [prompt.id for prompt in played.prompts()] == ["a", "b"]
    with pytest.raises(ValueError, match="same id"):
        played.prompts([Task("a", [user("?")])] * 2)
    with pytest.raises(ValueError, match="most_turns"):
        manager(client, Riddle([]), ["x"], most_turns=0)
    result = await played.rollout([Task("c", [user("?")])], samples_per_prompt=1)
    assert [t.prompt_id for t in result.trajectories] == ["c"]


async def test_progress_is_one_line_that_ends_full(
    client: treadle.Client, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []
    played = manager(client, lake([1, 2]), TO_THE_GOAL)
    result = await played.rollout(
        samples_per_prompt=2,
        concurrency=1,
        progress=True,
        on_event=lambda event: seen.append(event.kind),
    )
    tokens = sum(len(step.token_ids) for t in result.trajectories for step in t.steps)
    last = capsys.readouterr().err.rstrip().rpartition("\r")[2]
    assert "100%" in last
    assert "4/4" in last
    assert f"running=0, tokens={tokens}" in last
    assert seen.count("closed") == 4
    await played.rollout(samples_per_prompt=1)
    assert capsys.readouterr().err == ""


async def test_an_environment_is_played_through_the_real_services(
    start_service: StartService,
) -> None:
    """The real scheduler, rollout service and sidecar, and a fake of SGLang.

    Result: the batch that a trainer takes has the tokens that the episodes had.
    """
    async with (
        mesh_of_processes(start_service, "treadle_rollout", slots=4) as processes,
        treadle.Client(processes.scheduler.address) as client,
    ):
        # this engine refuses tokens beyond its vocabulary
        chat = scripted_chat(TO_THE_GOAL, letters=VOCAB - 128)
        played = EnvManager(client, lake(), chat=chat, sampling=SAMPLING)
        result = await played.rollout(samples_per_prompt=2, concurrency=1)
        check(result)
        assert [t.reward for t in result.trajectories] == [1.0, 1.0]
        [group] = (await client.get_batch(result.rollout_id, max_groups=1)).groups
        taken = {t.trajectory_id: t.tokens for t in group.trajectories}
        assert taken == {t.trajectory_id: t.tokens for t in result.trajectories}
