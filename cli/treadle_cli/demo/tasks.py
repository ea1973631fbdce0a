"""Make the demo's prompts: FrozenLake maps and reasoning-gym puzzles for a model of 135 million
parameters.

A prompt depends on its index and the run's seed alone, so both arms, and a later run with the same
seed, get the same maps and puzzles; an epoch has sampling seeds of its own.

Real agents' work has a tail, so prompts differ in how many turns, and how many tokens a turn, they
allow: both are quantiles of log-normal distributions, with the longest turns where most turns are
allowed. TURNS_SIGMA is that of 11,255 tool-using runs of 74 tasks (mcpmark: half of them end within
12 turns, nine tenths within 32, the longest at 100; 0.82, of which the prompt decides at least a
quarter), and lies between the turns of coding agents (SWE-bench 0.42, sessions of Claude Code
1.19). The medians are as small as a CPU needs. Samples of a prompt differ too: walks end early and
programs fail.
"""

import math
import random
import zlib
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal

from treadle import Prompt
from treadle.environments import Chat
from treadle.environments import Task as AnyTask

# Tasks of reasoning-gym with short questions that a small model can try.
PUZZLES = ("chain_sum", "letter_counting", "leg_counting", "simple_equations")
LAKE_SYSTEM = (
    "You play a game on a map. Each turn, name one move and say why: left, down, right or up."
)
PUZZLE_SYSTEM = (
    "You solve puzzles with short Python programs that print the result, then give the answer."
)
LAKE_SIZES = (4, 8)
TURNS_MEDIAN, TURNS_SIGMA = 2.5, 0.82  # sigma of the natural logarithm
TURN_TOKENS_MEDIAN, TURN_TOKENS_SIGMA = 10.0, 0.3
LEAST_TURNS = 2  # a program and an answer


@dataclass(frozen=True, kw_only=True)
class Task(AnyTask):
    """What an agent needs to play a prompt.

    environment, arguments: of the session. turn_tokens: most new tokens a turn. turns: most turns.
    sampling: what all sampling seeds are made from.
    """

    kind: Literal["lake", "puzzle"]
    environment: str
    arguments: dict[str, Any]
    turn_tokens: int
    turns: int
    sampling: str

    def sampling_seed(self, prompt_id: str, sample: int, turn: int) -> int:
        """Return the sampling seed of one step, the same in every arm."""
        return zlib.crc32(f"{self.sampling}/{prompt_id}/{sample}/{turn}".encode())


def make_prompts(chat: Chat, count: int, seed: int, epoch: int = 0) -> list[Prompt]:
    """Return `count` prompts, at least one, lakes and puzzles in turn. Another epoch samples the
    same prompts with other seeds."""
    ranks = list(range(count))
    # where a long prompt stands must not follow from its length
    random.Random(f"ranks {seed}").shuffle(ranks)
    return [_make(chat, index, rank, count, seed, epoch) for index, rank in enumerate(ranks)]


def _make(chat: Chat, index: int, rank: int, count: int, seed: int, epoch: int) -> Prompt:
    """Return one prompt. rank: of its length among `count`, 0 for the shortest."""
    deviations = NormalDist().inv_cdf((rank + 0.5) / count)
    turns = max(LEAST_TURNS, round(TURNS_MEDIAN * math.exp(TURNS_SIGMA * deviations)))
    turn_tokens = round(TURN_TOKENS_MEDIAN * math.exp(TURN_TOKENS_SIGMA * deviations))
    # The longest prompt is a lake: a program that prints anything ends a puzzle, whatever its limit
    # is.
    if (count - rank) % 2:
        lake = {
            "seed": 1000 * seed + index,
            "size": LAKE_SIZES[rank // 2 % 2],
            "slippery": rank % 4 == 1,
        }
        name, system = "lake", LAKE_SYSTEM
        played: dict[str, Any] = {"kind": "lake", "environment": "frozen_lake", "arguments": lake}
    else:
        puzzle = {"task": PUZZLES[rank // 2 % len(PUZZLES)], "seed": 1000 * seed + index}
        name, system = str(puzzle["task"]), PUZZLE_SYSTEM
        played = {"kind": "puzzle", "environment": "reasoning_gym", "arguments": puzzle}
    task = Task(
        f"{name}-{index}",
        [{"role": "system", "content": system}],
        turn_tokens=turn_tokens,
        turns=turns,
        sampling=f"{seed}/{epoch}",
        **played,
    )
    return Prompt(task.id, chat.head(task.messages), task)
