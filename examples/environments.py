"""Play an environment: `treadle up` in one terminal, `python examples/environments.py` in another.

gymnasium's FrozenLake in this process, played in words, without asyncio. A real program takes the
chat template of its model, `Chat.of(transformers.AutoTokenizer.from_pretrained(model))`; the
stand-in here needs no tokenizer, and finds a move in whatever was sampled.
"""

import sys

import treadle
import treadle.sync
from treadle.environments import Chat, EnvManager, Gym

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}

lake = Gym(
    "FrozenLake-v1",
    seeds=[1, 2],
    actions=MOVES,
    system="Reach field 15. Name a move.",
    is_slippery=False,
)
stand_in = Chat(
    render=lambda messages, _tools, _begins: "".join(
        f"{each['role']}: {each['content']}\n" for each in messages
    ),
    encode=lambda text: list(text.encode()),
    decode=lambda ids: list(MOVES)[sum(ids) % len(MOVES)],
)


def main(address: str) -> None:
    """Run the rollout and print its results."""
    sampling = treadle.Sampling(max_new_tokens=8, temperature=1.0)
    with treadle.sync.Client(address) as client:
        manager = EnvManager(
            client.asynchronous, lake, chat=stand_in, sampling=sampling, most_turns=4
        )
        result = client.run(manager.rollout(samples_per_prompt=2, progress=sys.stderr.isatty()))
    for t in result.trajectories:
        print(
            f"{t.prompt_id}/{t.sample} {t.outcome}: {len(t.steps)} turns, reward {t.reward} "
            f"{t.error}"
        )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "localhost:7401")
