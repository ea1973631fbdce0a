"""Scenarios of each adapter as its framework calls it, before a mesh of fakes.

The turns of a sample are one trajectory, equal to a direct call, and end when the framework is done
with them. Stand-ins take the frameworks' places.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_engine import Script, logprob_at, token_at
from support.frameworks import areal_1_0_4 as areal
from support.frameworks import rllm_0_3 as rllm
from support.frameworks import roll_0_3_0 as roll
from support.frameworks import trl_1_16_0 as trl
from support.frameworks import verl_0_9_1 as verl
from support.frameworks.stand_ins import standing_in
from support.mesh_in_process import FakeMesh, fake_mesh
from treadle.adapters import calls
from treadle.adapters.calls import background
from treadle.scheduler.v1 import scheduler_pb2

PROMPT = [11, 12, 13]
FINISHED = scheduler_pb2.OUTCOME_FINISHED


@pytest.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeMesh]:
    """Of one engine, where TREADLE_ADDRESS says."""
    async with fake_mesh("e0") as mesh:
        monkeypatch.setenv("TREADLE_ADDRESS", mesh.address)
        yield mesh
        await calls.leave()


def expected(prompt: list[int], count: int) -> list[int]:
    return [token_at(prompt, index) for index in range(count)]


def logprobs(count: int) -> list[float]:
    return [logprob_at(index) for index in range(count)]


# verl


@pytest.fixture
def verl_adapter() -> Iterator[Any]:
    with standing_in(verl.contents(), "verl_engines", "verl") as (_, adapter):
        yield adapter


def verl_client(adapter: Any, kind: type = verl.LLMServerClient, **rollout: Any) -> Any:
    return adapter.client_of(kind(verl.config(**rollout), "balancer"))


async def test_verl_turns_of_a_request_are_one_trajectory_with_verls_fields(
    mesh: FakeMesh, verl_adapter: Any
) -> None:
    """The weights change in the middle of the second turn. Result: what verl trains on tells of
    both versions."""
    client = verl_client(verl_adapter)
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }
    first = await client.generate(
        "r", prompt_ids=PROMPT, sampling_params={**params, "max_tokens": 6}, priority=3
    )
    context = [*PROMPT, *first.token_ids, 7]
    mesh.engines["e0"].script = Script(version_from={0: "4", 2: "5"})
    second = await client.generate(
        "r", prompt_ids=context, sampling_params={**params, "max_tokens": 6}
    )
    assert (first.token_ids, first.log_probs, first.stop_reason) == (
        expected(PROMPT, 6),
        logprobs(6),
        "length",
    )
    assert second.token_ids == expected(context, 6)
    assert [each.turn for each in mesh.scheduler.requests("ScheduleStep")] == [0, 1]
    steps = ("global_steps", "min_global_steps", "max_global_steps")
    assert [first.extra_fields[name] for name in steps] == [0, 0, 0]
    assert [second.extra_fields[name] for name in steps] == [5, 4, 5]


async def test_verl_limits_tokens_as_its_servers_do(mesh: FakeMesh, verl_adapter: Any) -> None:
    """Without max_tokens by the lengths of the config, and by the model's context; nothing is asked
    where none fits."""
    client = verl_client(verl_adapter, response_length=8, prompt_length=4, max_model_len=9)
    sampled = [
        len((await client.generate(i, prompt_ids=[1] * i, sampling_params={})).token_ids)
        for i in (1, 4, 6, 8)
    ]
    assert sampled == [7, 4, 2, 0]
    short = {"max_tokens": 5, "max_completion_tokens": 3}
    assert len((await client.generate("s", prompt_ids=[1], sampling_params=short)).token_ids) == 3
    assert len(mesh.scheduler.trajectories) == 4
    nothing = await client.generate("n", prompt_ids=[1] * 8, sampling_params={"logprobs": True})
    assert (nothing.log_probs, nothing.stop_reason) == ([], "length"), "a list, as of other turns"
    assert nothing.extra_fields["global_steps"] is None
    with pytest.raises(ValueError, match=r"prompt_ids: 9 tokens do not fit .* \(9\)"):
        await client.generate("l", prompt_ids=[1] * 9, sampling_params={})
    with pytest.raises(ValueError, match="n=2"):
        await client.generate("n", prompt_ids=[1] * 8, sampling_params={"n": 2})


async def test_verl_asks_for_images_in_vain(verl_adapter: Any) -> None:
    with pytest.raises(ValueError, match="image_data: the mesh carries token ids alone"):
        await verl_client(verl_adapter).generate(
            "r", prompt_ids=[1], sampling_params={}, image_data=[b"i"]
        )


@pytest.mark.parametrize(
    ("rollout", "model", "says"),
    [
        ({"enable_rollout_routing_replay": True}, {}, "rollout.enable_rollout_routing_replay"),
        ({"disaggregation": SimpleNamespace(enabled=True)}, {}, "rollout.disaggregation.enabled"),
        ({}, {"lora_rank": 8}, "model.lora_rank"),
        ({}, {"lora": {"rank": 8}}, "model.lora_rank"),
    ],
)
def test_verls_settings_that_change_what_servers_answer_are_refused(
    verl_adapter: Any, rollout: dict[str, Any], model: dict[str, Any], says: str
) -> None:
    config = verl.config(**rollout)
    config.actor_rollout_ref.model = SimpleNamespace(**model)
    with pytest.raises(ValueError, match=f"{says}=.*: leave it out of actor_rollout_ref"):
        verl_adapter.client_of(verl.LLMServerClient(config))


def test_verls_adapters_that_are_merged_into_the_weights_are_carried(verl_adapter: Any) -> None:
    config = verl.config()
    config.actor_rollout_ref.model = SimpleNamespace(lora_rank=8, lora={"merge": True})
    assert verl_adapter.client_of(verl.LLMServerClient(config)).config is config


@pytest.mark.parametrize("in_queue", [False, True])
async def test_verls_manager_of_either_trainer_ends_a_trajectory_with_its_agent_loop(
    mesh: FakeMesh, verl_adapter: Any, monkeypatch: pytest.MonkeyPatch, in_queue: bool
) -> None:
    """As the trainer names it in its config: two samples of two turns, of which one fails after its
    first.

    Result: three trajectories' worth of turns, two trajectories; each is closed when its agent loop
    is over.
    """
    turns: list[list[int]] = []

    async def play(client: Any, params: Any, *, fail: bool) -> list[int]:
        context = list(PROMPT)
        for _ in range(2):
            turn = await client.generate(
                f"sample-{fail}", prompt_ids=context, sampling_params={"max_tokens": 4}
            )
            turns.append(turn.token_ids)
            context += [*turn.token_ids, 7]
            if fail:
                raise LookupError
        return context

    monkeypatch.setitem(verl.AgentLoopWorker.loops, "two turns", play)
    config = verl.config(in_queue=in_queue)
    manager = verl_adapter.AgentLoopManager.create(
        config=config, llm_client=verl.LLMServerClient(config, "balancer")
    )
    assert isinstance(manager, verl.AgentLoopManagerTQ) is in_queue
    worker = manager.worker
    assert isinstance(worker, verl.AgentLoopWorker)
    [context] = await worker.generate_sequences([{"agent_name": "two turns", "fail": False}])
    with pytest.raises(LookupError):
        await worker.generate_sequences([{"agent_name": "two turns", "fail": True}])
    assert context[:7] == [*PROMPT, *expected(PROMPT, 4)]
    assert len(turns) == 3
    assert list(mesh.scheduler.outcomes.values()) == [FINISHED, scheduler_pb2.OUTCOME_FAILED]
    assert not mesh.scheduler.open_trajectories


def test_verls_manager_refuses_engines_that_the_mesh_cannot_know(
    verl_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of another kind; and verl's own, where verl did not load the plugin, as without an
    address."""
    vllm = verl.config(name="vllm")
    with pytest.raises(ValueError, match=r"rollout\.name must be sglang for the mesh, is vllm"):
        verl_adapter.AgentLoopManager.create(vllm, verl.LLMServerClient(vllm))
    monkeypatch.delenv("TREADLE_ADDRESS", raising=False)
    config = verl.config()
    with (
        standing_in(verl.contents(), "verl_engines", "verl") as (_, adapter),
        pytest.raises(RuntimeError, match="set TREADLE_ADDRESS"),
    ):
        adapter.AgentLoopManager.create(config, verl.LLMServerClient(config))


# AReaL


@pytest.fixture
def areal_adapter() -> Iterator[Any]:
    with standing_in(areal.contents(), "areal") as (adapter,):
        yield adapter


async def test_areal_workflows_get_responses_with_a_version_for_each_token(
    mesh: FakeMesh, areal_adapter: Any
) -> None:
    """A group of two episodes of two turns, with a new request id for each turn, as AReaL's own
    workflow makes them; the weights change in the middle of the first turn.

    Result: two trajectories, which end with their episodes.
    """
    areal_adapter.use()
    from areal.trainer import rl_trainer

    engine = rl_trainer.RemoteSGLangEngine(areal.config())
    engine.set_version(3)
    found: list[areal.ModelResponse] = []

    class TwoTurns(areal.RolloutWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> list[int]:
            context = list(data["prompt"])
            for turn in range(2):
                gconfig = areal.GenerationHyperparameters(max_new_tokens=6, greedy=True)
                request = areal.ModelRequest(
                    rid=f"{id(self)}-{turn}", input_ids=list(context), gconfig=gconfig
                )
                found.append(await engine.agenerate(request))
                context += [*found[-1].output_tokens, 7]
            return context

    mesh.engines["e0"].script = Script(version_from={0: "launch", 2: "4"})
    run = engine._engine._resolve_workflow(TwoTurns(), None, 2)
    contexts = await run.arun_episode(engine._engine, {"prompt": PROMPT})
    assert contexts[0] == contexts[1]
    assert contexts[0][:9] == [*PROMPT, *expected(PROMPT, 6)]
    assert {tuple(each.output_logprobs) for each in found} == {tuple(logprobs(6))}
    assert {each.stop_reason for each in found} == {"length"}
    assert sorted(tuple(each.output_versions) for each in found) == [(0,) * 6] * 3 + [
        (3, 3, 4, 4, 4, 4)
    ]
    assert len(mesh.scheduler.trajectories) == 2
    assert list(mesh.scheduler.outcomes.values()) == [FINISHED] * 2
    assert {each.sampling.temperature for each in mesh.engines["e0"].requests("Generate")} == {0.0}


async def test_areal_limits_and_refuses_as_its_own_engine(
    mesh: FakeMesh, areal_adapter: Any
) -> None:
    engine = areal_adapter.MeshEngine(areal.config())
    short = areal.GenerationHyperparameters(max_new_tokens=99, max_tokens=7)
    response = await engine.agenerate(areal.ModelRequest(input_ids=PROMPT, gconfig=short))
    assert response.output_tokens == expected(PROMPT, 4)
    full = areal.ModelRequest(
        input_ids=PROMPT, gconfig=areal.GenerationHyperparameters(max_tokens=3)
    )
    with pytest.raises(RuntimeError, match=r"max_new_tokens \(0\) is not positive"):
        await engine.agenerate(full)
    with pytest.raises(ValueError, match=r"frequency_penalty=0\.5"):
        penalty = areal.GenerationHyperparameters(frequency_penalty=0.5)
        await engine.agenerate(areal.ModelRequest(input_ids=PROMPT, gconfig=penalty))
    with pytest.raises(ValueError, match="min_new_tokens=3"):
        least = areal.GenerationHyperparameters(min_new_tokens=3)
        await engine.agenerate(areal.ModelRequest(input_ids=PROMPT, gconfig=least))
    with pytest.raises(ValueError, match="image_data"):
        await engine.agenerate(areal.ModelRequest(input_ids=PROMPT, image_data=["i"]))
    with pytest.raises(ValueError, match="vision_msg_vllm"):
        await engine.agenerate(areal.ModelRequest(input_ids=PROMPT, vision_msg_vllm=[["i"]]))
    with pytest.raises(ValueError, match="return_routed_experts"):
        experts = areal.ModelRequest(input_ids=PROMPT, metadata={"return_routed_experts": True})
        await engine.agenerate(experts)


# rLLM


async def test_rllm_turns_are_one_trajectory_and_tell_the_oldest_version(mesh: FakeMesh) -> None:
    """A workflow of two turns with its own id, and one in `trajectory()`; the trainer takes over
    after both."""
    with standing_in(rllm.contents(), "rllm") as (adapter,):
        engine = adapter.MeshEngine(rllm.Tokenizer(), max_prompt_length=16, max_response_length=6)
        messages = [{"role": "user", "content": "11 12 13"}]
        mesh.engines["e0"].script = Script(version_from={0: "8", 4: "9"})
        first = await engine.get_model_response(messages, application_id="a", temperature=0.7)
        messages += [
            {"role": "assistant", "content": first.content},
            {"role": "tool", "content": "7"},
        ]
        second = await engine.get_model_response(messages, application_id="a", max_tokens=3)
        async with engine.trajectory():
            await engine.get_model_response(messages)
        assert mesh.scheduler.open_trajectories == {"t-0"}
        await engine.sleep()
        with pytest.raises(rllm.TerminationEvent):
            await engine.get_model_response([{"role": "user", "content": "1 " * 17}])
    assert (first.prompt_ids, first.completion_ids, first.logprobs) == (
        PROMPT,
        expected(PROMPT, 6),
        logprobs(6),
    )
    assert (first.weight_version, first.finish_reason) == (8, "length")
    assert first.metrics["version_spans"] == [("8", 0, 4), ("9", 4, 6)]
    assert second.completion_ids == expected([*PROMPT, *expected(PROMPT, 6), 7], 3)
    assert second.metrics["trajectory_id"] == first.metrics["trajectory_id"] == "t-0"
    assert list(mesh.scheduler.outcomes) == ["t-1", "t-0"]
    assert [each.sampling.temperature for each in mesh.engines["e0"].requests("Generate")] == [
        0.7,
        1.0,
        1.0,
    ]


async def test_rllm_samples_of_a_prompt_have_seeds_of_their_own(mesh: FakeMesh) -> None:
    """The engine's own sampling has one seed for all, and a request may bring another one."""
    with standing_in(rllm.contents(), "rllm") as (adapter,):
        engine = adapter.MeshEngine(
            rllm.Tokenizer(), max_prompt_length=16, max_response_length=6, sampling={"seed": 7}
        )
        messages = [{"role": "user", "content": "11 12 13"}]
        for sample in "abc":
            await engine.get_model_response(messages, application_id=sample)
        await engine.get_model_response(messages, application_id="d", seed=7)
        await engine.sleep()
    seeds = [each.sampling.seed for each in mesh.engines["e0"].requests("Generate")]
    assert seeds == [7, 8, 9, 7]


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"images": ["i"]}, "images"),
        ({"content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "image_url"),
    ],
)
async def test_rllm_asks_for_images_in_vain(message: dict[str, Any], says: str) -> None:
    with standing_in(rllm.contents(), "rllm") as (adapter,):
        engine = adapter.MeshEngine(rllm.Tokenizer(), max_prompt_length=16, max_response_length=6)
        with pytest.raises(ValueError, match=f"{says}: the mesh carries token ids alone"):
            await engine.get_model_response([{"role": "user", "content": "1", **message}])


async def test_rllm_calls_without_a_name_are_not_one_session(mesh: FakeMesh) -> None:
    """An id that is None names no workflow: each answer belongs to the one that it continues."""
    with standing_in(rllm.contents(), "rllm") as (adapter,):
        engine = adapter.MeshEngine(rllm.Tokenizer(), max_prompt_length=16, max_response_length=6)
        await engine.get_model_response([{"role": "user", "content": "1"}], application_id=None)
        link = await calls.link_to()
        assert link.sessions.known("")
        await engine.sleep()


async def test_rllms_limits_of_a_call_come_before_those_of_the_engine(mesh: FakeMesh) -> None:
    with standing_in(rllm.contents(), "rllm") as (adapter,):
        engine = adapter.MeshEngine(
            rllm.Tokenizer(),
            max_prompt_length=16,
            max_response_length=6,
            sampling={"max_tokens": 5, "temperature": 0.7, "do_sample": False},
        )
        messages = [{"role": "user", "content": "11 12 13"}]
        usual = await engine.get_model_response(messages)
        short = await engine.get_model_response(messages, max_completion_tokens=2)
        with pytest.raises(ValueError, match="top_logprobs=3"):
            await engine.get_model_response(messages, top_logprobs=3)
    assert (len(usual.completion_ids), len(short.completion_ids)) == (5, 2)
    assert {each.sampling.temperature for each in mesh.engines["e0"].requests("Generate")} == {0.0}


# ROLL


async def test_roll_asks_for_images_in_vain() -> None:
    with standing_in(roll.contents(), "roll"):
        proxy = roll.create_llm_proxy("treadle", {"address": "localhost:1"})
        images = roll.lm_input(PROMPT)
        images.non_tensor_batch["multi_modal_data"] = [{"image": ["i"]}]
        with pytest.raises(ValueError, match="multi_modal_data: the mesh carries token ids alone"):
            proxy.generate([], images, {"max_new_tokens": 4})
        message = {"role": "user", "content": [{"type": "image"}]}
        with pytest.raises(ValueError, match="image: the mesh carries token ids alone"):
            proxy.generate([message], roll.lm_input(PROMPT), {"max_new_tokens": 4})


async def test_roll_environments_reach_the_mesh_from_threads_and_an_episode_ends_with_the_next(
    mesh: FakeMesh,
) -> None:
    """Two environments in threads: an episode of two turns and the beginning of the next one
    each."""
    with standing_in(roll.contents(), "roll"):
        config = {
            "max_new_tokens": 4,
            "temperature": 0.5,
            "top_k": 50,
            "num_beams": 1,
            "stop_strings": None,
        }
        found: dict[int, list[Any]] = {}

        def play(environment: int) -> None:
            proxy = roll.create_llm_proxy("treadle", {"address": mesh.address})
            context = [environment, *PROMPT]
            outputs = found[environment] = [proxy.generate([], roll.lm_input(context), config)]
            context += [*outputs[0].batch["responses"][0].tolist(), 7]
            outputs.append(proxy.generate([], roll.lm_input(context), config))
            outputs.append(proxy.generate([], roll.lm_input([environment, 99]), config))

        await asyncio.gather(*(asyncio.to_thread(play, environment) for environment in (1, 2)))
        for environment, outputs in found.items():
            tokens = expected([environment, *PROMPT], 4)
            assert outputs[0].batch["responses"].tolist() == [tokens]
            assert outputs[0].batch["infer_logprobs"][0, -4:].tolist() == logprobs(4)
            assert outputs[1].batch["responses"].tolist() == [
                expected([environment, *PROMPT, *tokens, 7], 4)
            ]
            assert outputs[0].meta_info["version_spans"] == [[("0", 0, 4)]]
            assert (outputs[0].meta_info["src_rank"], outputs[0].meta_info["finish_reasons"]) == (
                0,
                ["length"],
            )
        assert len(mesh.scheduler.trajectories) == 4
        assert list(mesh.scheduler.outcomes.values()) == [FINISHED] * 2
        assert {
            tuple(each.sampling.stop_token_ids) for each in mesh.engines["e0"].requests("Generate")
        } == {(2, 0)}
    await asyncio.to_thread(lambda: background().run(calls.leave()))


async def test_roll_samples_of_a_prompt_have_seeds_of_their_own(mesh: FakeMesh) -> None:
    with standing_in(roll.contents(), "roll"):

        def play(_: int) -> None:
            proxy = roll.create_llm_proxy("treadle", {"address": mesh.address})
            proxy.generate([], roll.lm_input(PROMPT), {"max_new_tokens": 4, "seed": 7})

        await asyncio.gather(*(asyncio.to_thread(play, sample) for sample in range(3)))
    await asyncio.to_thread(lambda: background().run(calls.leave()))
    seeds = [each.sampling.seed for each in mesh.engines["e0"].requests("Generate")]
    assert sorted(seeds) == [7, 8, 9]


async def test_roll_limits_an_answer_by_each_name(mesh: FakeMesh) -> None:
    with standing_in(roll.contents(), "roll"):
        proxy = roll.create_llm_proxy("treadle", {"address": mesh.address})
        ask = partial(proxy.generate, [], roll.lm_input(PROMPT))
        answer = await asyncio.to_thread(ask, {"max_tokens": 3, "early_stopping": False})
        with pytest.raises(ValueError, match="max_new_tokens is missing"):
            await asyncio.to_thread(ask, {"temperature": 1.0})
    await asyncio.to_thread(lambda: background().run(calls.leave()))
    assert answer.batch["responses"].tolist() == [expected(PROMPT, 3)]


# TRL


async def test_trl_conversations_are_trajectories_of_their_own_and_end_with_it(
    mesh: FakeMesh,
) -> None:
    """TRL's loop, two conversations of two turns with the same prompt, in a thread as in the child
    process."""
    with standing_in(trl.contents(), "trl") as (adapter,):
        worker = adapter.RolloutWorker(
            dataset=[PROMPT, PROMPT], max_tokens=4, top_k=0, temperature=0.5
        )
        loop = worker.make_loop()
        thread = threading.Thread(target=lambda: asyncio.run(loop._run_loops(asyncio.Event())))
        thread.start()
        await asyncio.to_thread(thread.join)
    first, second = loop.conversations
    assert first == second
    assert [turn.output_ids for turn in first] == [
        expected(PROMPT, 4),
        expected([*PROMPT, *expected(PROMPT, 4), 7, 8], 4),
    ]
    assert first[0].output_log_probs == logprobs(4)
    assert list(mesh.scheduler.outcomes.values()) == [FINISHED] * 2
    sampling = [each.sampling for each in mesh.engines["e0"].requests("Generate")]
    assert {(each.temperature, each.top_k, each.HasField("min_p")) for each in sampling} == {
        (0.5, -1, False)
    }


def test_trls_worker_takes_what_the_trainers_config_says() -> None:
    """Two samples a device and step, four devices, two steps of staleness: as many in flight as the
    trainer says."""
    with standing_in(trl.contents(), "trl") as (adapter,):
        worker = adapter.RolloutWorker.of(
            trl.config(),
            model_name="m",
            dataset=[],
            reward_funcs=[len],
            processing_class=SimpleNamespace(eos_token_id=2),
            address="mesh:7401",
            tools=["t"],
        )
    told = worker.loop_kwargs
    assert (told["max_inflight_tasks"], told["max_tokens"], told["eos_token_ids"]) == (16, 64, [2])
    assert (told["address"], told["tools"], told["num_generations"]) == ("mesh:7401", ["t"], 8)


@pytest.mark.parametrize(
    ("told", "says"),
    [({"lora_name": "policy"}, "lora_name"), ({"repetition_penalty": 1.1}, "repetition_penalty")],
)
def test_trls_worker_refuses_what_the_mesh_does_not_carry(told: Any, says: str) -> None:
    """Before its child process starts."""
    with standing_in(trl.contents(), "trl") as (adapter,), pytest.raises(ValueError, match=says):
        adapter.RolloutWorker(dataset=[PROMPT], **told)


async def test_an_address_is_the_argument_or_the_environment_or_the_default(
    monkeypatch: pytest.MonkeyPatch, verl_adapter: Any
) -> None:
    monkeypatch.delenv("TREADLE_ADDRESS", raising=False)
    assert calls.address_of() == "localhost:7401"
    monkeypatch.setenv("TREADLE_ADDRESS", "environment:1")
    assert (calls.address_of(), calls.address_of("given:2")) == ("environment:1", "given:2")
    assert verl_client(verl_adapter).address == "environment:1"
    assert isinstance(
        verl_client(verl_adapter, verl.FullyAsyncLLMServerClient), verl.FullyAsyncLLMServerClient
    )
