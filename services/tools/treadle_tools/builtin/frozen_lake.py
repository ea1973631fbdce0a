"""Play gymnasium's FrozenLake-v1 as text: a random map that can be solved, the agent marked, one
move a step."""

from collections.abc import Mapping
from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from treadle_tools.tool import Outcome, Sandbox

ACTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}
AGENT = "A"
LEGEND = (
    "You are on a frozen lake. Reach the goal without falling into a hole.\n"
    "A you, S start, F frozen, H hole, G goal. Moves: left, down, right, up."
)
SLIPPERY = "The ice is slippery: a move may slide to a side."


def _make(rows: list[str], *, slippery: bool) -> Any:
    # The checker costs milliseconds a step, and this code is checked by tests.
    return gymnasium.make(
        "FrozenLake-v1", desc=rows, is_slippery=slippery, disable_env_checker=True
    )


# What gymnasium loads late, it loads once, here.
_make(generate_random_map(size=4, seed=0), slippery=False).reset(seed=0)


class FrozenLake:
    """One lake of the game. Arguments: seed (map and slips), size 4 or 8, slippery."""

    def __init__(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> None:
        seed, size = int(arguments.get("seed", 0)), int(arguments.get("size", 4))
        self._slippery = bool(arguments.get("slippery", False))
        self._map = generate_random_map(size=size, seed=seed)
        self._lake = _make(self._map, slippery=self._slippery)
        self._position = int(self._lake.reset(seed=seed)[0])
        self._done = False

    def first(self) -> Outcome:
        """Return the legend and the map."""
        legend = f"{LEGEND} {SLIPPERY}" if self._slippery else LEGEND
        return Outcome(output=f"{legend}\n\n{self._grid()}", reward=0.0, data=self._data())

    def step(self, arguments: Mapping[str, Any]) -> Outcome:
        """Move the agent: reward 1 at the goal, else 0.

        The episode ends at the goal, in a hole, or after gymnasium's limit of moves.
        """
        position, reward, ended, out_of_time, _ = self._lake.step(ACTIONS[str(arguments["action"])])
        self._position = int(position)
        self._done = bool(ended or out_of_time)
        return Outcome(
            output=f"{self._grid()}\n{self._news(ended=bool(ended))}".rstrip(),
            reward=float(reward),
            done=self._done,
            data=self._data(),
        )

    def _grid(self) -> str:
        rows = [list(row) for row in self._map]
        row, column = divmod(self._position, len(self._map))
        rows[row][column] = AGENT
        return "\n".join("".join(row) for row in rows)

    def _news(self, *, ended: bool) -> str:
        row, column = divmod(self._position, len(self._map))
        if self._map[row][column] == "G":
            return "You reached the goal."
        if self._map[row][column] == "H":
            return "You fell into a hole."
        return "" if ended or not self._done else "No moves are left."

    def _data(self) -> dict[str, Any]:
        row, column = divmod(self._position, len(self._map))
        return {"row": row, "column": column}
