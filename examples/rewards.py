"""Have the mesh compute rewards: `treadle up` in one terminal, `python examples/rewards.py` in
another.

An agent sends its answer to a reward function of the tools service and returns the pending reward:
its trajectory is closed at once, another one takes its place, and it is submitted when the score is
there. `exact_match` compares two texts; `math_equal`, `python_tests`, functions of your own and LLM
judges are requested in the same way.
"""

import asyncio
import sys

import treadle

PROMPTS = [
    treadle.Prompt(f"sum-{n}", [504, 2365, 354, 253 + n], data={"expected": str(n % 2)})
    for n in (1, 2)
]


async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> treadle.PendingReward:
    """Generate one turn and request its score."""
    async for _chunk in trajectory.generate(treadle.Sampling(max_new_tokens=16, temperature=1.0)):
        pass
    answer = str(trajectory.tokens[-1] % 2)  # a real agent would decode its text
    return await trajectory.score(
        "exact_match", {"answer": answer, "expected": prompt.data["expected"]}
    )


async def main(address: str) -> None:
    """Run the rollout and print its results."""
    async with treadle.Client(address, job="example") as client:
        result = await client.rollout(PROMPTS, agent, samples_per_prompt=2)
    for t in result.trajectories:
        print(f"{t.prompt_id}/{t.sample} {t.outcome}: reward {t.reward} {t.error}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:7401"))
