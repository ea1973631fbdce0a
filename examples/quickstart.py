"""Run the smallest agent loop against a running mesh: `treadle up` in one terminal, `python
examples/quickstart.py` in another.

Two prompts, two samples each; every trajectory plays FrozenLake for up to four turns, on token ids.
A real agent would render a chat template and parse the model's answer; here the choice is made from
the last token, so that no tokenizer is needed.
"""

import asyncio
import sys

import treadle

PROMPTS = [
    treadle.Prompt(f"lake-{seed}", [504, 2365, 354, 314, 253 + seed], data={"seed": seed})
    for seed in (1, 2)
]
ACTIONS = ("left", "down", "right", "up")


async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
    """Generate, act and observe; return the reward."""
    reward = 0.0
    async with await trajectory.open_session("frozen_lake", prompt.data) as lake:
        for _ in range(4):
            async for _chunk in trajectory.generate(
                treadle.Sampling(max_new_tokens=16, temperature=1.0)
            ):
                pass  # chunks come as they are sampled; the finished step is trajectory.steps[-1]
            action = ACTIONS[trajectory.tokens[-1] % len(ACTIONS)]
            result = await lake.step({"action": action})
            reward += result.reward or 0.0
            if result.done:
                break
            # what the policy did not sample: masked out of the loss
            trajectory.observe([198, 504, 2365])
    return reward


async def main(address: str) -> None:
    """Run the rollout and print its results."""
    async with treadle.Client(address) as client:
        result = await client.rollout(PROMPTS, agent, samples_per_prompt=2)
    for t in result.trajectories:
        waited_s = sum(step.queue_s for step in t.steps)
        print(
            f"{t.prompt_id}/{t.sample} {t.outcome}: {sum(t.loss_mask)} tokens in {len(t.steps)} "
            f"turns, reward {t.reward}, waited {waited_s:.2f} s {t.error}"
        )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:7401"))
