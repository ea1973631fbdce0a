"""The demo: what its agent makes of a small model's words and builds for it to read, a play, and a
run's forecasts."""

import io
import statistics
from typing import Any

import pytest
from rich.console import Console
from support.mesh_in_process import fake_mesh
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from treadle import Prompt
from treadle.environments import Chat
from treadle.telemetry.v1 import facts_pb2
from treadle_cli.demo.agents import LEAST_TURNS, Task, chat_of, make_prompts, read_action
from treadle_cli.demo.collect import CollectedFacts
from treadle_cli.demo.rollout import LiveBoard, Work, play
from treadle_cli.exits import UsageProblem

LAKE = Task(
    "l",
    kind="lake",
    environment="frozen_lake",
    arguments={},
    turn_tokens=12,
    turns=7,
    sampling="0/0",
)
PUZZLE = Task(
    "p",
    kind="puzzle",
    environment="reasoning_gym",
    arguments={},
    turn_tokens=64,
    turns=6,
    sampling="0/0",
)


@pytest.mark.parametrize(
    ("said", "direction"),
    [
        ("I move right.", "right"),
        ("DOWN! Not left, not up.", "down"),
        ("I move **Up**, since the goal is not to the right", "up"),
        ("Upwards is best", None),
        ("leftover rightly downtown", None),
        ("", None),
    ],
)
def test_the_first_direction_counts(said: str, direction: str | None) -> None:
    assert read_action(LAKE, said) == (direction and {"action": direction})


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("Answer: 42", {"answer": "42"}),
        ("The answer is **7**.", {"answer": "7"}),
        ("so \\boxed{-128} it is", {"answer": "-128"}),
        ("Answer: 1\nor answer = 2", {"answer": "1"}),
        ("```python\nprint(1 + 1)\n```", {"code": "print(1 + 1)"}),
        ("```\nprint(3)\n```\nand so on", {"code": "print(3)"}),
        ("```python\nfor x in range(3):\n    print(x", {"code": "for x in range(3):\n    print(x"}),
        ("```python\nprint(6)\n```\nor\n```python\nprint(", {"code": "print(6)"}),
        ("```python\nprint('answer: 5')\n```", {"code": "print('answer: 5')"}),
        ("Answer: 6, from\n```python\nprint(6)\n```", {"answer": "6, from"}),
        ("I have no idea", None),
        ("```python\n```", None),
        ("Answer:\n\n  `17`  \n\n", {"answer": "17"}),  # nothing is marked: the last line
        ("Answer:", {"answer": "Answer:"}),
    ],
)
def test_a_puzzle_turn_is_code_or_an_answer_whichever_comes_first(
    said: str, action: dict[str, str] | None
) -> None:
    assert read_action(PUZZLE, said) == action


@pytest.fixture
def chat() -> Chat:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: index + 10 for index, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    return chat_of(tokenizer)


def test_a_model_that_does_not_speak_chatml_is_refused() -> None:
    with pytest.raises(UsageProblem, match="needs ChatML"):
        chat_of(Tokenizer(models.BPE(vocab={}, merges=[])))


def test_prompts_and_seeds_depend_on_index_seed_and_epoch_alone(chat: Chat) -> None:
    once, again = make_prompts(chat, 8, 5), make_prompts(chat, 8, 5)
    assert once == again
    assert [prompt.data.kind for prompt in once].count("lake") == 4
    assert len({prompt.id for prompt in once}) == 8
    assert make_prompts(chat, 8, 6) != once
    later = make_prompts(chat, 8, 5, epoch=1)
    assert [(p.id, p.tokens, p.data.arguments) for p in later] == [
        (p.id, p.tokens, p.data.arguments) for p in once
    ]
    both = [*once, *later]
    seeds = {
        p.data.sampling_seed(p.id, sample, turn)
        for p in both
        for sample in range(4)
        for turn in range(9)
    }
    assert len(seeds) == 2 * 8 * 4 * 9


@pytest.mark.parametrize("seed", range(3))
def test_few_prompts_are_much_longer_than_most(chat: Chat, seed: int) -> None:
    turns = sorted(prompt.data.turns for prompt in make_prompts(chat, 8, seed))
    assert turns[-1] >= 3 * statistics.median(turns)
    assert turns[0] == LEAST_TURNS
    tokens = [
        task.turns * task.turn_tokens
        for task in (prompt.data for prompt in make_prompts(chat, 8, seed))
    ]
    assert max(tokens) >= 4 * statistics.median(tokens)


@pytest.mark.parametrize("terminal", [True, False])
async def test_the_demos_work_is_played_on_a_mesh_and_shown(chat: Chat, terminal: bool) -> None:
    system = [{"role": "system", "content": "Count."}]
    shape: dict[str, Any] = {"arguments": {}, "turn_tokens": 4, "turns": 2, "sampling": "0/0"}
    tasks = [
        Task(f"count-{index}", system, kind="lake", environment="count", **shape)
        for index in range(2)
    ]
    prompts = [Prompt(task.id, chat.head(system), task) for task in tasks]
    screen = io.StringIO()
    console = Console(file=screen, width=200, force_terminal=terminal)
    async with fake_mesh("e0") as mesh:
        board = LiveBoard(console, "Both", prompts, 2, {"e0": mesh.engine_ports["e0"].address})
        played = await play(mesh.address, "", "arm", Work(2, 2, 0, 0.0), chat, prompts, board)
    assert [(record.arm, record.outcome, record.turns) for record in played.records] == [
        ("arm", "finished", 2)
    ] * 4
    assert played.makespan_s == max(record.finished_s for record in played.records) > 0
    tokens = sum(record.gen_tokens for record in played.records)
    assert f"{tokens} tokens" in screen.getvalue()
    assert ("4/4" if terminal else "Both: 4/4 trajectories after") in screen.getvalue()


START_S = 1_000.0
LEARNED, SIBLINGS = "20261122-101500", "siblings-3"


def fact(time_s: float, **body: Any) -> facts_pb2.Fact:
    made = facts_pb2.Fact(fact_id=f"f{time_s}", **body)
    made.time.FromMicroseconds(round(1e6 * time_s))
    return made


@pytest.fixture
def facts() -> CollectedFacts:
    """Opened, forecast, a step that is put back after a preemption, its forecast after the next
    step is queued."""
    steps = [facts_pb2.StepRef(trajectory_id="t", turn=turn) for turn in (0, 1)]
    first = facts_pb2.TrajectoryPredicted(trajectory_id="t", turn=0, model_version=SIBLINGS)
    second = facts_pb2.TrajectoryPredicted(
        trajectory_id="t", turn=1, model_version=LEARNED, learned=True
    )
    collected = CollectedFacts()
    for each in (
        fact(START_S + 0.5, trajectory_predicted=first),
        fact(START_S + 1.0, step_queued=facts_pb2.StepQueued(step=steps[0])),
        fact(START_S + 1.5, step_queued=facts_pb2.StepQueued(step=steps[0])),
        fact(START_S + 3.0, step_finished=facts_pb2.StepFinished(step=steps[0])),
        fact(START_S + 3.2, step_queued=facts_pb2.StepQueued(step=steps[1])),
        fact(START_S + 3.4, trajectory_predicted=second),
        fact(START_S + 3.4, trajectory_predicted=second),
    ):
        collected.add(each)
    return collected


def test_each_forecast_stands_beside_the_step_that_it_followed_and_the_next(
    facts: CollectedFacts,
) -> None:
    first, second = facts.forecast_records({"t": START_S}, START_S)["t"]
    assert (first.turn, first.model_version, first.learned) == (0, SIBLINGS, False)
    assert (second.turn, second.model_version, second.learned) == (1, LEARNED, True)
    assert (first.asked_s, first.came_s, first.next_queued_s) == pytest.approx((0.0, 0.5, 1.0))
    assert (second.asked_s, second.came_s, second.next_queued_s) == pytest.approx((3.0, 3.4, 3.2))


def test_a_forecast_of_an_unknown_step_is_left_out(facts: CollectedFacts) -> None:
    assert facts.forecast_records({}, START_S)["t"][0].turn == 1  # nobody saw it open
    facts.finished_s.clear()
    assert facts.forecast_records({}, START_S) == {}
