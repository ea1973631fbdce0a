"""Declare what agents need: `treadle up` in one terminal, `python examples/declared.py` in another.

Decorators declare what an agent needs; `rollout` requests it from the mesh. Each trajectory gets a
lake of its own with a limit of memory, which is closed after it. Three samples of each prompt are
begun for two that are kept. An agent that returns nothing is scored by the reward function that it
names.
"""

import asyncio
import sys
from typing import Any

import treadle

PROMPTS = [
    treadle.Prompt(
        f"p{n}", [504, 2365, 354, 253 + n], data={"task": task, "seed": n, "expected": str(n)}
    )
    for n, task in enumerate(("explore", "think"))
]
ACTIONS = ("left", "down", "right", "up")


@treadle.environment("frozen_lake", limits=treadle.Limits(memory_bytes=256 << 20, wall_s=5.0))
def lake(prompt: treadle.Prompt) -> dict[str, Any]:
    """Return the arguments of the lake of a prompt."""
    return {"seed": prompt.data["seed"], "size": 4}


@treadle.reward("exact_match")
def exact(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> dict[str, Any]:
    """Return the arguments of the reward of a trajectory; a real one would decode its text."""
    return {"answer": str(trajectory.tokens[-1] % 2), "expected": prompt.data["expected"]}


@treadle.agent(
    environment=lake,
    reward=exact,
    hardware={"explore": ["compute"], "": ["bandwidth"]},  # many short turns are mostly prefill
    task=lambda prompt: str(prompt.data["task"]),
    keep_per_prompt=2,
    redundancy=1.5,
)
async def play(
    trajectory: treadle.Trajectory, prompt: treadle.Prompt, session: treadle.Session
) -> None:
    """Generate and act, at most twice."""
    for _ in range(2):
        async for _chunk in trajectory.generate(
            treadle.Sampling(max_new_tokens=16, temperature=1.0)
        ):
            pass
        if (await session.step({"action": ACTIONS[trajectory.tokens[-1] % len(ACTIONS)]})).done:
            break


async def main(address: str, *, any_engine: bool) -> None:
    """Run the rollout and print its results."""
    async with treadle.Client(address, job="example") as client:
        # An argument of the call takes precedence over what is declared. Engines of `treadle up`
        # carry no tags.
        result = await client.rollout(PROMPTS, play, hardware_tags=() if any_engine else None)
    for t in result.trajectories:
        print(
            f"{t.prompt_id}/{t.sample} {t.outcome}: reward {t.reward}, "
            f"{'kept' if t.kept else 'not kept'} {t.error}"
        )


if __name__ == "__main__":
    others = [argument for argument in sys.argv[1:] if argument != "--hardware"]
    asyncio.run(
        main(others[0] if others else "localhost:7401", any_engine="--hardware" not in sys.argv)
    )
