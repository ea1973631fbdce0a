"""From rollouts to what a trainer sees: the sampled ids themselves, groups shared among ranks,
batches that repeat."""

import asyncio
from functools import partial
from itertools import islice

import pytest
import treadle
from support.fake_engine import leased_engines
from support.mesh_in_process import QUICK, FakeMesh, fake_mesh, generate
from support.processes import StartService
from treadle.training import IGNORED, pack
from treadle.training.dataset import RolloutDataset

PROMPTS = [treadle.Prompt(f"p{n}", [n + 1, n + 2]) for n in range(4)]


class LossyTokenizer:
    """Decodes all ids of equal remainder to one letter and encodes a letter as the least of them,
    as real tokenizers map several ids to one text and merge letters when they encode."""

    LETTERS = "abcdefghijklmnopqrstuvwxyz<>/"

    def encode(self, text: str) -> list[int]:
        return [self.LETTERS.index(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.LETTERS[token % len(self.LETTERS)] for token in ids)

    def turn(self, text: str) -> list[int]:
        """A chat template around a message, and the beginning of the next turn."""
        return self.encode(f"</a><u>{text}</u><a>")


async def one_turn(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
    await generate(trajectory, 3)
    return float(trajectory.sample)


async def test_ids_are_trained_on_as_they_were_sampled_where_decoding_and_encoding_changes_them() -> (
    None
):
    """Two turns with a tool between them; the agent decodes what was sampled and tokenizes tool
    output and template.

    Result: the labels are exactly the ids that the engine streamed, in order; template and tool
    tokens are no labels; the text of the conversation, encoded again, has other ids.
    """
    tokenizer, streamed = LossyTokenizer(), dict[str, list[int]]()

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        said: list[int] = []
        for _ in range(2):
            ids = await generate(trajectory, 5)
            said += ids
            answer = await trajectory.tool("echo", {"said": tokenizer.decode(ids)})
            trajectory.observe(tokenizer.turn(answer.data["said"]))
        streamed[trajectory.trajectory_id] = said
        return 1.0

    async with fake_mesh() as mesh, mesh.client() as client:
        result = await client.rollout(PROMPTS, agent, samples_per_prompt=2)
        batch = await client.get_batch(result.rollout_id, max_groups=len(PROMPTS))
    trajectories = [each for group in batch.groups for each in group.trajectories]
    assert len(trajectories) == len(streamed) == 8
    labels: dict[str, list[int]] = {}
    for row in pack(trajectories, 128):
        for member, start, end in zip(
            row.members, row.cu_seqlens[:-1], row.cu_seqlens[1:], strict=True
        ):
            own = row.labels[start:end]
            labels[trajectories[member].trajectory_id] = own[own != IGNORED].tolist()
    assert labels == streamed
    for each in trajectories:
        encoded = tokenizer.encode(tokenizer.decode(each.tokens))
        assert len(encoded) == len(each.tokens) and encoded != each.tokens


async def test_ranks_share_a_rollout_and_no_group_comes_twice() -> None:
    async with fake_mesh() as mesh, mesh.client() as client:
        result = await client.rollout(PROMPTS, one_turn, samples_per_prompt=2)
        connect = partial(treadle.Client, mesh.address, retry=QUICK)
        ranks = [RolloutDataset(connect, result.rollout_id, rank=rank) for rank in range(2)]
        taken = await asyncio.gather(*(asyncio.to_thread(list, rank) for rank in ranks))
    names = [group.prompt_id for groups in taken for group in groups]
    assert sorted(names) == [prompt.id for prompt in PROMPTS]
    assert all(len(group.trajectories) == 2 for groups in taken for group in groups)


def confirmed(mesh: FakeMesh) -> list[str]:
    return [request.batch_request_id for request in mesh.rollout.requests("ConfirmBatch")]


async def test_a_batch_is_confirmed_when_the_next_one_is_asked_for_and_comes_again_to_a_trainer_that_died() -> (
    None
):
    """A trainer saves the dataset's state, reads three of four groups in batches of two, and dies.

    Result: its successor gets the second batch again, whole, and the rest; the first one does not
    come again.
    """
    async with fake_mesh() as mesh, mesh.client() as client:
        result = await client.rollout(PROMPTS, one_turn, samples_per_prompt=1)
        connect = partial(treadle.Client, mesh.address, retry=QUICK)
        first = RolloutDataset(connect, result.rollout_id, groups_per_batch=2)
        seen = await asyncio.to_thread(lambda: [group.prompt_id for group in islice(first, 3)])
        # groups come in the order in which they settle
        [left] = {prompt.id for prompt in PROMPTS} - set(seen)
        assert confirmed(mesh) == [f"{result.rollout_id}.0.0.0"]
        second = RolloutDataset(connect, result.rollout_id, groups_per_batch=2)
        second.load_state_dict(first.state_dict())
        assert await asyncio.to_thread(lambda: [group.prompt_id for group in second]) == [
            seen[2],
            left,
        ]
        assert confirmed(mesh) == [f"{result.rollout_id}.0.0.{index}" for index in range(2)]
        with pytest.raises(ValueError, match="state: rank is 0 there and 1 here"):
            RolloutDataset(connect, result.rollout_id, rank=1).load_state_dict(first.state_dict())


async def test_a_dataset_ends_after_so_many_batches_and_asks_with_the_version_of_that_moment() -> (
    None
):
    versions = iter(range(10))
    async with fake_mesh() as mesh, mesh.client() as client:
        result = await client.rollout(PROMPTS, one_turn, samples_per_prompt=1)
        connect = partial(treadle.Client, mesh.address, retry=QUICK)
        dataset = RolloutDataset(
            connect, result.rollout_id, weight_version=lambda: next(versions), batches=2
        )
        assert len(await asyncio.to_thread(list, dataset)) == 2
        assert [request.weight_version for request in mesh.rollout.requests("StreamBatch")] == [
            0,
            1,
        ]
    with pytest.raises(ValueError, match="groups_per_batch must be at least 1"):
        RolloutDataset(connect, result.rollout_id, groups_per_batch=0)


async def test_a_named_batch_is_given_again_to_a_new_client_until_it_is_confirmed(
    start_service: StartService,
) -> None:
    """A trainer takes a batch from the real service and dies before it has trained.

    Result: its successor gets the same batch by the same name; after its confirmation the batch is
    gone for good.
    """
    rollout = await start_service("treadle_rollout")
    scheduler = await start_service(
        "treadle_scheduler", {"TREADLE_SCHEDULER_ROLLOUT": rollout.address}
    )
    async with leased_engines(None, scheduler.address, ["e0"]):
        async with treadle.Client(scheduler.address, retry=QUICK) as client:
            result = await client.rollout(PROMPTS, one_turn, samples_per_prompt=2)
            take = {"rollout_id": result.rollout_id, "max_groups": 2, "batch_id": "step-7"}
            first = await client.get_batch(**take)  # type: ignore[arg-type]
        async with treadle.Client(scheduler.address, retry=QUICK) as client:
            assert await client.get_batch(**take) == first  # type: ignore[arg-type]
            with pytest.raises(treadle.TreadleError, match="step-7 named another GetBatch before"):
                await client.get_batch(**{**take, "max_groups": 1})  # type: ignore[arg-type]
            for _ in range(2):
                await client.confirm_batch(result.rollout_id, "step-7")
            with pytest.raises(treadle.TreadleError) as refusal:
                await client.get_batch(**take)  # type: ignore[arg-type]
            assert refusal.value.reason == "BATCH_EXPIRED"
            rest = await client.get_batch(result.rollout_id, max_groups=4)
    names = [group.prompt_id for batch in (first, rest) for group in batch.groups]
    assert sorted(names) == [prompt.id for prompt in PROMPTS]
