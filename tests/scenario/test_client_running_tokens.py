"""Tokens of running trajectories from a client to a trainer, through a real rollout service;
engines and the scheduler are fakes behind real servers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import treadle
from support.conditions import until
from support.fake_engine import Script
from support.fake_servicer import Refusal
from support.finished_trajectories import RolloutCalls, rollout_service
from support.mesh_in_process import FakeMesh, fake_mesh, generate

PROMPT, OTHER = treadle.Prompt("p0", [1, 2, 3]), treadle.Prompt("p1", [4])


@pytest.fixture
async def service(nats_url: str) -> AsyncIterator[RolloutCalls]:
    async with rollout_service(nats_url) as calls:
        yield calls


@pytest.fixture
async def mesh(service: RolloutCalls, nats_url: str) -> AsyncIterator[FakeMesh]:
    async with fake_mesh("e0") as mesh:
        mesh.scheduler.directory.rollout_address = service.address
        yield mesh


async def two_turns(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
    await generate(trajectory, 4)
    await generate(trajectory, 4)
    return 1.0


class Trainer:
    """Puts together what it is streamed."""

    def __init__(self, client: treadle.Client, rollout_id: str, **how: Any) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.loss_mask: dict[str, list[int]] = {}
        self.pieces = 0
        self.taken_back = 0
        self.ended: dict[str, treadle.TrajectoryEnded] = {}
        self.task = asyncio.create_task(self._read(client, rollout_id, **how))

    async def _read(self, client: treadle.Client, rollout_id: str, **how: Any) -> None:
        async for event in client.stream_tokens(rollout_id, **how):
            if isinstance(event, treadle.TrajectoryEnded):
                self.ended[event.trajectory_id] = event
                continue
            self.pieces += 1
            known = self.tokens.setdefault(event.trajectory_id, [])
            self.taken_back += len(known) - event.start_token
            known[event.start_token :] = event.tokens
            self.logprobs.setdefault(event.trajectory_id, [])[event.start_token :] = event.logprobs
            self.loss_mask.setdefault(event.trajectory_id, [])[event.start_token :] = (
                event.loss_mask
            )


async def test_a_trainer_has_the_tokens_before_the_trajectory_ends_and_they_are_those_of_the_batch(
    mesh: FakeMesh,
) -> None:
    """Two turns with an observation between; the second hangs after six tokens, which the trainer
    has by then."""
    async with mesh.client() as client:
        opened, reading = asyncio.Event(), asyncio.Event()

        async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
            opened.set()
            await reading.wait()
            await generate(trajectory, 4)
            trajectory.observe([91, 92])
            mesh.engines["e0"].script = Script(hold_at=6)
            stream, count = trajectory.generate(treadle.Sampling(max_new_tokens=8)), 0
            async for chunk in stream:
                count += len(chunk.token_ids)
                if count == 6:
                    await until(
                        lambda: (
                            len(trainer.tokens.get(trajectory.trajectory_id, [])) == 3 + 4 + 2 + 6
                        )
                    )
                    break
            await stream.aclose()
            await generate(trajectory, 1)
            return 1.0

        running = asyncio.create_task(
            client.rollout([PROMPT], agent, 1, rollout_id="r", stream_tokens=2)
        )
        await opened.wait()
        trainer = Trainer(client, "r")
        reading.set()
        result = (await running).trajectories[0]
        await trainer.task
        batch = await client.get_batch("r", 1)
    trained, name = batch.groups[0].trajectories[0], result.trajectory_id
    assert len(result.tokens) == 16 and trained.tokens == result.tokens
    assert trainer.tokens[name] == trained.tokens[:15], "the last token alone is fewer than two"
    assert (
        trainer.loss_mask[name] == trained.loss_mask[:15] == [0] * 3 + [1] * 4 + [0] * 2 + [1] * 6
    )
    assert trainer.logprobs[name] == pytest.approx(trained.logprobs[:15])
    assert (trainer.pieces > 2, trainer.taken_back) == (True, 0)
    assert trainer.ended[name].kept


async def test_ranks_have_prompts_of_their_own_and_an_unknown_rollout_is_refused(
    mesh: FakeMesh,
) -> None:
    prompts = [treadle.Prompt(f"p{place}", [place + 1]) for place in range(4)]

    async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
        await reading.wait()
        await generate(trajectory, 4)
        return 1.0

    async with mesh.client() as client:
        reading = asyncio.Event()
        running = asyncio.create_task(
            client.rollout(prompts, agent, 1, rollout_id="r", stream_tokens=1)
        )
        await until(lambda: len(mesh.scheduler.open_trajectories) == 4)
        ranks = [Trainer(client, "r", part=(place, 2)) for place in range(2)]
        reading.set()
        result = await running
        await asyncio.gather(*(rank.task for rank in ranks))
        for place, rank in enumerate(ranks):
            assert set(rank.ended) == {each.trajectory_id for each in result.trajectories[place::2]}
        with pytest.raises(treadle.TreadleError, match="ROLLOUT_NOT_FOUND"):
            await Trainer(client, "other").task
        with pytest.raises(ValueError, match=r"part must be \(i, n\)"):
            await Trainer(client, "r", part=(2, 2)).task
        with pytest.raises(treadle.TreadleError, match="min_tokens"):
            await Trainer(client, "r", min_tokens=-1).task
        with pytest.raises(ValueError, match="stream_tokens must be >= 0, is -1"):
            await client.rollout(prompts, agent, stream_tokens=-1)


async def test_what_a_service_has_forgotten_is_pushed_again_and_one_without_the_call_is_no_harm() -> (
    None
):
    async with fake_mesh("e0") as mesh, mesh.client() as client:
        pushed = mesh.rollout.pushed

        async def agent(trajectory: treadle.Trajectory, prompt: treadle.Prompt) -> float:
            await generate(trajectory, 4)
            await until(lambda: len(pushed.get(trajectory.trajectory_id, [])) == 3 + 4)
            pushed.clear()
            await generate(trajectory, 4)
            await until(lambda: pushed.get(trajectory.trajectory_id) == trajectory.tokens)
            return 1.0

        (result,) = (await client.rollout([PROMPT], agent, 1, stream_tokens=1)).trajectories
        assert result.kept and pushed == {result.trajectory_id: result.tokens}
        mesh.rollout.refuse_next("PushTokens", Refusal(grpc.StatusCode.UNIMPLEMENTED, ""))
        assert (await client.rollout([OTHER], two_turns, 1, stream_tokens=1)).trajectories[0].kept
        assert len(pushed) == 1 and mesh.rollout.calls[-1].method == "SubmitTrajectory"


async def test_nothing_is_pushed_unless_it_is_asked_for() -> None:
    async with fake_mesh("e0") as mesh, mesh.client() as client:
        await client.rollout([PROMPT], two_turns, 1)
        assert not mesh.rollout.requests("PushTokens")
