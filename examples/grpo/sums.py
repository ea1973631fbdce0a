"""Make and read the task: sums of one-digit numbers (reasoning-gym's chain_sum), calculated line by
line, and the length of such answers.

The base model has learned from demonstrations of several authors, who sign first, then calculate,
one line for each operator, and then check: they write CHECK and calculate again with probability
CHECK_AGAIN. So the number of passes is geometric, five in the mean, and the longest of a hundred
trajectories is four times as long as the mean one, as in rollouts of large models. Three in five
demonstrations are by a careless author, so that a quarter of all lines are wrong: the base model
samples wrong lines too, which rewards can teach it to leave.
"""

import random
from dataclasses import dataclass, field

import reasoning_gym
import treadle
from tokenizers import Tokenizer

TERMS = (3, 4)
CHECK = "?"
CHECK_AGAIN = 0.8
# Signature of an author: part of the demonstrations, part of the lines that are wrong. No author's
# demonstrations are longer than another's.
AUTHORS = {"A": (0.6, 0.4), "B": (0.4, 0.03)}
END = "<|im_end|>"


@dataclass(frozen=True)
class Demonstration:
    """A trajectory that no policy sampled, as treadle.training.pack reads it."""

    trajectory_id: str
    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float] = field(default_factory=list)


class Sums:
    """Task in the tokens of a model. end_id: the token that ends an answer."""

    def __init__(self, tokenizer_file: str) -> None:
        self._tokenizer = Tokenizer.from_file(tokenizer_file)
        self.end_id = int(self._tokenizer.token_to_id(END))

    def make_prompts(self, name: str, count: int, seed: int) -> list[treadle.Prompt]:
        """Make prompts NAME-0, NAME-1, …; `data` is the expected answer."""
        questions = reasoning_gym.create_dataset(
            "chain_sum",
            min_terms=TERMS[0],
            max_terms=TERMS[1],
            min_digits=1,
            max_digits=1,
            seed=seed,
            size=count,
        )
        return [
            treadle.Prompt(
                f"{name}-{index}",
                self._encode_question(each["metadata"]["expression"]),
                each["answer"],
            )
            for index, each in enumerate(questions)
        ]

    def read_answer(self, token_ids: list[int]) -> str:
        """Return the text after the last equals sign; empty where the text does not end as it
        should."""
        if not token_ids or token_ids[-1] != self.end_id:
            return ""
        return (
            str(self._tokenizer.decode(token_ids, skip_special_tokens=True))
            .rpartition("=")[2]
            .strip()
        )

    def demonstrate(self, draw: random.Random) -> Demonstration:
        """Write a question with an answer that may be wrong."""
        terms = [draw.randrange(10) for _ in range(draw.randint(*TERMS))]
        signs = [draw.choice("+-") for _ in terms[1:]]
        question = self._encode_question(
            f"{terms[0]}" + "".join(f"{s}{t}" for s, t in zip(signs, terms[1:], strict=True))
        )
        [author] = draw.choices(list(AUTHORS), [share for share, _ in AUTHORS.values()])
        mistakes = AUTHORS[author][1]
        text = author + calculate(terms, signs, mistakes, draw)
        while draw.random() < CHECK_AGAIN:
            text += CHECK + calculate(terms, signs, mistakes, draw)
        answer = [*self._encode(text), self.end_id]
        tokens = question + answer
        return Demonstration(
            "", tokens, [0] * len(question) + [1] * len(answer), [0.0] * len(tokens)
        )

    def _encode_question(self, expression: str) -> list[int]:
        return self._encode(expression.replace(" ", "") + "\n")

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def calculate(terms: list[int], signs: list[str], mistakes: float, draw: random.Random) -> str:
    """Write one pass: a line for each operator, each wrong with probability `mistakes`; later lines
    continue from there."""
    total, lines = terms[0], ""
    for sign, term in zip(signs, terms[1:], strict=True):
        result = total + term if sign == "+" else total - term
        if draw.random() < mistakes:
            result += draw.choice((-3, -2, -1, 1, 2, 3))
        lines += f"{total}{sign}{term}={result}\n"
        total = result
    return lines
