"""Scenarios of trainers that change weights under running requests, each in its framework's way: a
scheduler and two sidecars as processes, two fakes of SGLang. No request fails, no token is lost,
and versions tell what sampled what."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.conditions import until
from support.fake_sglang import expected
from support.frameworks import areal_1_0_4 as areal
from support.frameworks import trl_1_16_0 as trl
from support.frameworks import verl_0_9_1 as verl
from support.frameworks.stand_ins import standing_in
from support.mesh_of_processes import PROMPT, Fleet
from support.mesh_of_processes import fleet as start_fleet
from support.processes import StartService
from treadle import Sampling
from treadle.adapters import calls
from treadle.scheduler.v1 import scheduler_pb2
from treadle_sidecar.engine.watch import read_name

TOKENS = 200  # ten seconds, unless a test lets them come quickly
QUICK_S = 0.002  # a token


@pytest.fixture
async def fleet(
    start_service: StartService, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Fleet]:
    async with start_fleet(start_service, token_s=0.05) as made:
        monkeypatch.setenv("TREADLE_ADDRESS", made.scheduler.address)
        yield made
        await calls.leave()


async def until_sampled(fleet: Fleet, tokens: int) -> None:
    """By all engines together, from now on."""
    before = sum(engine.sampled for engine in fleet.engines)
    await until(lambda: sum(engine.sampled for engine in fleet.engines) >= before + tokens)


def running(fleet: Fleet) -> int:
    return sum(engine.running for engine in fleet.engines)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# verl


@pytest.fixture
def verl_adapters() -> Iterator[tuple[Any, Any]]:
    with standing_in(verl.contents(), "verl_engines", "verl") as (engines, adapter):
        yield engines, adapter


class Replicas:
    """verl's replicas of the fleet's engines, as the trainer's process has them."""

    def __init__(self, engines: Any, fleet: Fleet) -> None:
        loaded = verl.RolloutReplicaRegistry.get("sglang")
        self.all = [loaded(rank, None, None) for rank in range(2)]
        self.servers = [
            replica.server_class.__ray_metadata__.modified_class() for replica in self.all
        ]
        for server, engine in zip(self.servers, fleet.engines, strict=True):
            server.address = ("127.0.0.1", engine.port)

    async def do(self, what: str) -> None:
        """At all of them at once, as verl's checkpoint manager does."""
        await asyncio.gather(*(getattr(replica, what)() for replica in self.all))

    async def name(self, global_steps: int) -> None:
        """As verl's workers do once an engine has taken weights."""
        await asyncio.gather(*(server.set_global_steps(global_steps) for server in self.servers))


@pytest.fixture
async def replicas(fleet: Fleet, verl_adapters: tuple[Any, Any]) -> Replicas:
    """With weights of step 6."""
    made = Replicas(verl_adapters[0], fleet)
    await made.do("abort_all_requests")
    await made.name(6)
    await made.do("resume_generation")
    return made


async def test_verls_pause_shows_as_an_abort_and_its_asynchronous_client_goes_on_from_the_same_trajectory(
    fleet: Fleet, replicas: Replicas, verl_adapters: tuple[Any, Any]
) -> None:
    """A request of either client runs when the trainer aborts, sends weights and resumes.

    Result: the plain client has what was sampled until then, and says so; its next request goes on
    in the same trajectory. verl's own loop in the other one gives all tokens, from both versions.
    """
    _, adapter = verl_adapters
    plain = adapter.client_of(verl.LLMServerClient(verl.config()))
    patient = adapter.client_of(verl.FullyAsyncLLMServerClient(verl.config()))
    params = {"temperature": 0.0, "max_tokens": TOKENS, "logprobs": True}
    asking = [
        asyncio.create_task(client.generate("r", prompt_ids=list(PROMPT), sampling_params=params))
        for client in (plain, patient)
    ]
    await until(lambda: running(fleet) == 2)
    await until_sampled(fleet, 40)
    await replicas.do("abort_all_requests")
    assert running(fleet) == 0
    cut = await asking[0]
    assert not asking[1].done()
    fleet.pace(QUICK_S)
    await replicas.name(7)
    await replicas.do("resume_generation")
    whole = await asking[1]

    assert (cut.stop_reason, whole.stop_reason) == ("abort", "length")
    assert 0 < len(cut.token_ids) < TOKENS
    assert cut.token_ids == expected(PROMPT, TOKENS)[: len(cut.token_ids)]
    assert whole.token_ids == expected(PROMPT, TOKENS)
    assert len(whole.log_probs) == TOKENS
    assert (cut.extra_fields["min_global_steps"], cut.extra_fields["max_global_steps"]) == (6, 6)
    assert (whole.extra_fields["min_global_steps"], whole.extra_fields["max_global_steps"]) == (
        6,
        7,
    )
    rest = {**params, "max_tokens": 10}
    again = await plain.generate("r", prompt_ids=[*PROMPT, *cut.token_ids], sampling_params=rest)
    assert [*cut.token_ids, *again.token_ids] == expected(PROMPT, len(cut.token_ids) + 10)
    listed = await fleet.control.call("ListTrajectories", scheduler_pb2.ListTrajectoriesRequest())
    assert len(listed.trajectories) == 2


async def test_while_verls_engines_sleep_nothing_reaches_them_and_the_next_batch_wakes_the_mesh(
    fleet: Fleet,
    replicas: Replicas,
    verl_adapters: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The synchronous trainer lets its replicas sleep, and says nothing when they wake with new
    weights."""
    _, adapter = verl_adapters
    found: list[list[int]] = []

    async def play(client: Any, params: Any) -> None:
        sampling = {"temperature": 0.0, "max_tokens": 8}
        found.append(
            (
                await client.generate("b", prompt_ids=list(PROMPT), sampling_params=sampling)
            ).token_ids
        )

    async def generate(batch: Any) -> None:
        await verl.AgentLoopWorker.generate_sequences(manager.worker, batch)
        await calls.leave()  # a worker's event loop does not end in verl

    monkeypatch.setitem(verl.AgentLoopWorker.loops, "one turn", play)
    config = verl.config(in_queue=True)
    manager = adapter.AgentLoopManager.create(config, verl.LLMServerClient(config))
    monkeypatch.setattr(manager.worker, "generate_sequences", generate)
    await replicas.do("sleep")
    link = await calls.link_to()
    waiting = asyncio.create_task(link.generate(PROMPT, Sampling(8, temperature=0.0)))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    assert running(fleet) == 0
    await asyncio.to_thread(manager.generate_sequences, [{"agent_name": "one turn"}])
    assert found == [expected(PROMPT, 8)]
    assert (await waiting).token_ids == expected(PROMPT, 8)


async def test_the_mesh_stays_paused_until_the_last_of_verls_replicas_lets_go(
    fleet: Fleet, replicas: Replicas
) -> None:
    await replicas.do("abort_all_requests")
    await replicas.all[0].resume_generation()
    waiting = asyncio.create_task(
        (await calls.link_to()).generate(PROMPT, Sampling(8, temperature=0.0))
    )
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await replicas.all[1].resume_generation()
    assert (await waiting).token_ids == expected(PROMPT, 8)


async def test_the_name_of_an_engines_weights_says_which_memory_verl_has_taken(
    fleet: Fleet, replicas: Replicas
) -> None:
    """The server gives memory away, and workers take it back by SGLang's HTTP, weights first.
    Result: the name of the weights says what sleeps, as sidecars read it, and at last the new step.
    """
    server, engine = replicas.servers[0], fleet.engines[0]
    await server.launch_server()
    manager = server.tokenizer_manager
    await server.sleep()
    assert read_name(engine.weight_version) == ("6", frozenset({"kv_cache", "weights"}))
    await manager.resume_memory_occupation(SimpleNamespace(tags=["weights"]), None)
    await server.set_global_steps(7)
    assert read_name(engine.weight_version) == ("7", frozenset({"kv_cache"}))
    await manager.resume_memory_occupation(SimpleNamespace(tags=["kv_cache"]), None)
    assert engine.weight_version == "7"


async def test_verls_reward_models_and_teachers_are_none_of_the_meshs_engines(
    verl_adapters: tuple[Any, Any],
) -> None:
    """Their replicas sleep and wake while no mesh is there at all."""
    engines, _ = verl_adapters
    made = engines.replica_in_mesh(verl.SGLangReplica, verl.remote, "127.0.0.1:1")
    for role in ("is_reward_model", "is_teacher_model"):
        replica = made(0, None, None, **{role: True})
        for what in ("sleep", "wake_up", "abort_all_requests", "resume_generation"):
            await getattr(replica, what)()
        assert replica.done == ["sleep", "wake_up", "abort_all_requests", "resume_generation"]
        assert replica.server_class.__ray_metadata__.modified_class is verl.SGLangHttpServer


# AReaL


async def test_areals_requests_go_on_through_an_update_and_tell_the_version_of_each_token(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Weights from disk in the middle of a request, then a broadcast one. Result: the request never
    hears of it; a checkpoint is removed when the next one is loaded, and not before."""
    with standing_in(areal.contents(), "areal") as (adapter,):
        engine = adapter.MeshEngine(areal.config())
        engine.set_version(4)
        gconfig = areal.GenerationHyperparameters(max_new_tokens=TOKENS, greedy=True)
        asking = asyncio.create_task(
            engine.agenerate(areal.ModelRequest(input_ids=list(PROMPT), gconfig=gconfig))
        )
        await until_sampled(fleet, 20)

        saved = tmp_path / "checkpoints"

        def update(version: int) -> None:
            path = saved / f"v{version}"
            path.mkdir(parents=True)
            engine.pause_generation()
            assert running(fleet) == 0
            engine.update_weights_from_disk(
                areal.WeightUpdateMeta("disk", str(path), version=version)
            ).result()
            engine.continue_generation()
            engine.set_version(version)

        await asyncio.to_thread(update, 5)
        fleet.pace(QUICK_S)
        response = await asking
        assert response.output_tokens == expected(PROMPT, TOKENS)
        assert (response.stop_reason, len(response.output_logprobs)) == ("length", TOKENS)
        old = response.output_versions.count(4)
        assert response.output_versions == [4] * old + [5] * (TOKENS - old)
        assert 20 <= old < TOKENS
        assert names(saved) == ["v5"]
        await asyncio.to_thread(update, 6)
        assert names(saved) == ["v6"]

        def broadcast() -> None:
            engine.pause_generation()
            engine._engine.update_weights_from_distributed(
                areal.WeightUpdateMeta("xccl", version=7), []
            ).result()
            engine.continue_generation()

        del engine._engine.asked[:]
        await asyncio.to_thread(broadcast)
        assert [endpoint for endpoint, _ in engine._engine.asked] == [
            "/pause_generation",
            "/update_weights_from_distributed",
            "/update_weight_version",
            "/continue_generation",
        ]
        assert engine._engine.asked[2][1]["new_version"] == "7"


# TRL


async def test_trls_weights_are_loaded_by_all_engines_and_requests_go_on(
    fleet: Fleet, tmp_path: Path
) -> None:
    """The trainer sends its weights three times under running requests. Result: the engines serve
    each; the model's own files go with them; two versions stay on disk."""
    model = tmp_path / "model"
    model.mkdir()
    for name in (
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ):
        (model / name).write_text(name)
    with standing_in(trl.contents(), "trl") as (adapter,):
        transfer = adapter.WeightTransfer(tmp_path / "weights", model)
        loop = adapter.RolloutWorker(dataset=[], max_tokens=TOKENS, temperature=0.0).make_loop()
        transfer.init_weight_transfer()
        asking = asyncio.create_task(loop._generate_one_turn(list(PROMPT)))
        await until_sampled(fleet, 20)
        versions = set[str]()

        def send() -> None:
            transfer.pause()
            assert running(fleet) == 0
            transfer.send_weights(iter([("a", torch.ones(2, 3)), ("b", torch.zeros(4))]))
            transfer.resume()

        for _ in range(3):
            await asyncio.to_thread(send)
            [version] = {engine.weight_version for engine in fleet.engines}
            versions.add(version)
        fleet.pace(QUICK_S)
        tokens, logprobs = await asking
        transfer.destroy()
    assert tokens == expected(PROMPT, TOKENS)
    assert len(logprobs) == TOKENS
    assert len(versions) == 3
    kept = names(tmp_path / "weights")
    assert [each.rpartition("-")[2] for each in kept] == ["2", "3"]
    newest = tmp_path / "weights" / kept[1]
    assert names(newest) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert load_file(newest / "model.safetensors")["a"].tolist() == [[1.0] * 3] * 2


async def test_weights_that_trl_could_not_send_are_sent_again_and_a_trainer_that_ends_resumes_the_mesh(
    fleet: Fleet, tmp_path: Path
) -> None:
    """One engine refuses a version. Result: the error names it, the next version is served, and a
    request that waited goes on although the trainer has ended in its pause."""
    (tmp_path / "config.json").touch()
    with standing_in(trl.contents(), "trl") as (adapter,):
        transfer = adapter.WeightTransfer(tmp_path / "weights", tmp_path)
        transfer.init_weight_transfer()
        await asyncio.to_thread(transfer.pause)
        waiting = asyncio.create_task(
            (await calls.link_to()).generate(PROMPT, Sampling(8, temperature=0.0))
        )
        fleet.engines[1].refuse_weights = True
        with pytest.raises(RuntimeError, match="engines of the mesh have failed: e1: "):
            await asyncio.to_thread(transfer.send_weights, iter([("a", torch.ones(1))]))
        fleet.engines[1].refuse_weights = False
        await asyncio.to_thread(transfer.send_weights, iter([("a", torch.ones(1))]))
        assert not waiting.done()
        await asyncio.to_thread(transfer.destroy)
        assert (await waiting).token_ids == expected(PROMPT, 8)


def test_trls_weights_need_the_models_own_files(tmp_path: Path) -> None:
    with (
        standing_in(trl.contents(), "trl") as (adapter,),
        pytest.raises(ValueError, match="there is no config"),
    ):
        adapter.WeightTransfer(tmp_path, tmp_path).init_weight_transfer()
