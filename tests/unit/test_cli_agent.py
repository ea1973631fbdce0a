"""What the demo's agent makes of a small model's words, and how it builds what the model reads."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from treadle_cli.demo.agents import PuzzleMove, last_line, parse_direction, parse_puzzle_move
from treadle_cli.demo.chatml import ChatML
from treadle_cli.demo.tasks import make_prompts
from treadle_cli.problems import UsageProblem


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("I move right.", "right"),
        ("DOWN! Not left, not up.", "down"),
        ("I move **Up**, since the goal is not to the right", "up"),
        ("Upwards is best", None),
        ("leftover rightly downtown", None),
        ("", None),
    ],
)
def test_the_first_direction_counts(said: str, meant: str | None) -> None:
    assert parse_direction(said) == meant


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("Answer: 42", PuzzleMove("answer", "42")),
        ("The answer is **7**.", PuzzleMove("answer", "7")),
        ("so \\boxed{-128} it is", PuzzleMove("answer", "-128")),
        ("Answer: 1\nor answer = 2", PuzzleMove("answer", "1")),
        ("```python\nprint(1 + 1)\n```", PuzzleMove("code", "print(1 + 1)")),
        ("```\nprint(3)\n```\nand so on", PuzzleMove("code", "print(3)")),
        ("```python\nfor x in range(3):\n    print(x", PuzzleMove("code", "for x in range(3):\n    print(x")),
        ("```python\nprint(6)\n```\nor\n```python\nprint(", PuzzleMove("code", "print(6)")),
        ("```python\nprint('answer: 5')\n```", PuzzleMove("code", "print('answer: 5')")),
        ("Answer: 6, from\n```python\nprint(6)\n```", PuzzleMove("answer", "6, from")),
        ("I have no idea", None),
        ("Answer:", None),
        ("```python\n```", None),
    ],
)
def test_a_puzzle_turn_is_code_or_an_answer_whichever_comes_first(said: str, meant: PuzzleMove | None) -> None:
    assert parse_puzzle_move(said) == meant


def test_the_last_words_are_scored_when_nothing_was_marked() -> None:
    assert last_line("Let me think\n\n  `17`  \n\n") == "17"
    assert last_line("   ") == ""


@pytest.fixture
def chat() -> ChatML:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index + 10 for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    return ChatML(tokenizer)


def test_an_end_token_that_the_model_said_is_not_said_again(chat: ChatML) -> None:
    ended, cut = chat.after_turn([50, chat.end_id], "go"), chat.after_turn([50], "go")
    assert cut == [chat.end_id, *ended]
    assert ended.count(chat.end_id) == 1  # of the user's message


def test_a_turn_can_be_opened_with_its_first_words(chat: ChatML) -> None:
    plain = chat.user("hello")
    led = chat.user("hello", "I move")
    assert led[: len(plain)] == plain
    assert chat.text(led[len(plain) :]) == "I move"


def test_pieces_of_a_conversation_put_together_are_the_conversation_at_once(chat: ChatML) -> None:
    together = chat.system("be brief") + chat.user("hello")
    assert together[0] == chat.user("x")[0]
    assert together.count(chat.end_id) == 2


def test_a_model_that_does_not_speak_chatml_is_refused() -> None:
    with pytest.raises(UsageProblem, match="needs ChatML"):
        ChatML(Tokenizer(models.BPE(vocab={}, merges=[])))


def test_prompts_and_seeds_depend_on_nothing_but_index_and_seed(chat: ChatML) -> None:
    once, again = make_prompts(chat, 8, 5), make_prompts(chat, 8, 5)
    assert once == again
    assert [prompt.data.kind for prompt in once] == ["lake"] * 4 + ["puzzle"] * 4
    assert len({prompt.id for prompt in once}) == 8
    assert make_prompts(chat, 8, 6) != once
    seeds = {p.data.sampling_seed(p.id, sample, turn) for p in once for sample in range(4) for turn in range(7)}
    assert len(seeds) == 8 * 4 * 7
