"""Make the demo's prompts: FrozenLake maps and reasoning-gym puzzles for a model of 135 million parameters.

A prompt depends on its index and the run's seed alone, so both arms, and a later run with the same seed, get the same
maps, puzzles and sampling seeds.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Literal

from treadle import Prompt

from treadle_cli.demo.chatml import ChatML

# Tasks of reasoning-gym with short questions that a small model can try.
PUZZLES = ("chain_sum", "letter_counting", "leg_counting", "simple_equations")
LAKE_SYSTEM = "You play a game on a map. Each turn, name one move and say why: left, down, right or up."
PUZZLE_SYSTEM = "You solve puzzles with short Python programs that print the result, then give the answer."
# Limits differ between prompts, as real tasks do: with walks that end early and programs that need another try, they
# make the lengths uneven.
LAKE_SIZES = (4, 4, 8, 4)
LAKE_TURN_TOKENS = (40, 12, 20, 12)


@dataclass(frozen=True)
class Task:
    """What an agent needs to play a prompt.

    environment, arguments: of the session. turn_tokens: most new tokens a turn. turns: most turns. base_seed: of all
    sampling.
    """

    kind: Literal["lake", "puzzle"]
    environment: str
    arguments: dict[str, Any]
    turn_tokens: int
    turns: int
    base_seed: int

    def sampling_seed(self, prompt_id: str, sample: int, turn: int) -> int:
        """The sampling seed of one step, the same in every arm."""
        return zlib.crc32(f"{self.base_seed}/{prompt_id}/{sample}/{turn}".encode())


def make_prompts(chat: ChatML, count: int, seed: int) -> list[Prompt]:
    """The first half FrozenLake, the rest puzzles; `count` at least one."""
    lakes = (count + 1) // 2
    prompts = [_lake(chat, index, seed) for index in range(lakes)]
    return prompts + [_puzzle(chat, index, seed) for index in range(count - lakes)]


def _lake(chat: ChatML, index: int, seed: int) -> Prompt:
    kind = index % len(LAKE_SIZES)
    arguments = {"seed": 1000 * seed + index, "size": LAKE_SIZES[kind], "slippery": index % 2 == 1}
    task = Task("lake", "frozen_lake", arguments, turn_tokens=LAKE_TURN_TOKENS[kind], turns=7, base_seed=seed)
    return Prompt(f"lake-{index}", chat.system(LAKE_SYSTEM), task)


def _puzzle(chat: ChatML, index: int, seed: int) -> Prompt:
    arguments = {"task": PUZZLES[index % len(PUZZLES)], "seed": 1000 * seed + index}
    task = Task("puzzle", "reasoning_gym", arguments, turn_tokens=64, turns=6, base_seed=seed)
    return Prompt(f"{arguments['task']}-{index}", chat.system(PUZZLE_SYSTEM), task)
