"""The adapters on top of the frameworks' own classes: `make test-frameworks`, which has the
packages on its path.

Elsewhere these are skipped; `test_adapters_signatures.py` and the stand-ins hold the adapters to
the same classes.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import pickle
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jinja2 import TemplateError
from support.fake_engine import logprob_at, token_at
from support.frameworks.trl_1_16_0 import score_by_length
from support.mesh_in_process import FakeMesh, fake_mesh
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from treadle.adapters import calls
from treadle.environments import Chat, user

# Warnings are of the frameworks and of what they import, which takes minutes on a busy machine.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
PROMPT = [11, 12, 13]
CHILD_S = 90.0  # a child process that imports torch


@pytest.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeMesh]:
    async with fake_mesh("e0") as mesh:
        monkeypatch.setenv("TREADLE_ADDRESS", mesh.address)
        yield mesh
        await calls.leave()


def expected(count: int) -> list[int]:
    return [token_at(PROMPT, index) for index in range(count)]


def adapter_of(name: str, needs: str) -> Any:
    """The adapter, where the module of its framework that it builds on can be imported."""
    try:
        importlib.import_module(needs)
    except Exception as error:
        if "TREADLE_TEST_OWN_CLASSES" in os.environ:
            raise
        pytest.skip(f"{needs} cannot be imported: {type(error).__name__}: {error}")
    return importlib.import_module(f"treadle.adapters.{name}")


async def test_verls_own_classes(mesh: FakeMesh) -> None:
    """Both clients, after the pickle that brings them to a worker, and the actor class of a
    worker."""
    adapter = adapter_of("verl", "verl.workers.rollout.llm_server")
    omegaconf, servers = (
        importlib.import_module("omegaconf"),
        importlib.import_module("verl.workers.rollout.llm_server"),
    )
    rollout = {"name": "sglang", "response_length": 8, "prompt_length": 8, "max_model_len": None}
    config = omegaconf.OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    params = {
        "max_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }
    for kind in (servers.LLMServerClient, servers.FullyAsyncLLMServerClient):
        client = pickle.loads(pickle.dumps(adapter.client_of(kind(config))))
        output = await client.generate(
            kind.__name__, prompt_ids=list(PROMPT), sampling_params=params, priority=1
        )
        assert isinstance(client, kind)
        assert output.token_ids == expected(6)
        assert output.log_probs == [logprob_at(index) for index in range(6)]
        assert (output.stop_reason, output.extra_fields["max_global_steps"]) == ("length", 0)
    ray, loops = (
        importlib.import_module("ray"),
        importlib.import_module("verl.experimental.agent_loop"),
    )
    worker = adapter.ending_trajectories(
        ray.remote(loops.AgentLoopWorker)
    ).__ray_metadata__.modified_class
    assert issubclass(worker, loops.AgentLoopWorker)
    assert issubclass(adapter.through_mesh(loops.AgentLoopManager), loops.AgentLoopManager)


async def test_areals_own_classes(mesh: FakeMesh) -> None:
    adapter = adapter_of("areal", "areal.engine.sglang_remote")
    arguments, requests = (
        importlib.import_module("areal.api.cli_args"),
        importlib.import_module("areal.api.io_struct"),
    )
    engine = adapter.MeshEngine(arguments.InferenceEngineConfig(backend="sglang:d1"))
    engine._engine._workflow_executor = SimpleNamespace(is_paused=lambda: False)
    gconfig = arguments.GenerationHyperparameters(max_new_tokens=6)
    response = await engine.agenerate(
        requests.ModelRequest(input_ids=list(PROMPT), gconfig=gconfig)
    )
    assert isinstance(response, requests.ModelResponse)
    assert (response.output_tokens, response.output_versions) == (expected(6), [0] * 6)


def test_areals_own_trainer_takes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of("areal", "areal.trainer.rl_trainer")
    monkeypatch.setenv("TREADLE_ADDRESS", "")
    adapter.use("mesh:7401")
    assert (
        importlib.import_module("areal.trainer.rl_trainer").RemoteSGLangEngine is adapter.MeshEngine
    )


async def test_trls_own_worker_plays_in_its_child_process(mesh: FakeMesh) -> None:
    """Two conversations of one prompt. Result: two samples with the tokens of the mesh, and no
    trajectory is left."""
    adapter = adapter_of("trl", "trl.experimental.async_grpo.async_rollout_worker")
    tokenizers, transformers = (
        importlib.import_module("tokenizers"),
        importlib.import_module("transformers"),
    )
    importlib.import_module("accelerate").PartialState()  # which the trainer has
    words = {f"w{index}": index for index in range(50_000)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="w2", pad_token="w3"
    )
    tokenizer.chat_template = importlib.import_module("trl.chat_template_utils").qwen3_chat_template
    message = {"role": "user", "content": "w11"}
    worker = adapter.RolloutWorker(
        model_name="m",
        dataset=importlib.import_module("datasets").Dataset.from_list([{"prompt": [message]}]),
        reward_funcs=[score_by_length],
        processing_class=tokenizer,
        eos_token_ids=[2],
        num_generations=2,
        max_inflight_tasks=2,
        max_tokens=4,
    )
    await asyncio.to_thread(worker.start)
    try:
        samples = [
            await asyncio.to_thread(worker.rollout_buffer.get, timeout=CHILD_S) for _ in range(2)
        ]
        worker.check_health(CHILD_S)
    finally:
        await asyncio.to_thread(worker.stop)
    for sample in samples:
        context = sample.input_ids[sample.completion_mask == 0].tolist()
        assert sample.input_ids[sample.completion_mask == 1].tolist() == [
            token_at(context, index) for index in range(4)
        ]
        assert sample.old_log_probs[-4:].tolist() == [logprob_at(index) for index in range(4)]
    assert not mesh.scheduler.open_trajectories


# Templates of trl that show no result of a tool, or no tools, and those that take no text.
NO_RESULTS = {"cohere", "cohere2", "gemma", "gemma3", "phi3", "phi3_5"}
NO_TOOLS = {"deepseek_r1_distill", "deepseekv3", "llama3", "qwen2_5_vl"}
NO_TEXT = {"idefics3", "llava_next", "smolvlm"}
SPECIAL = re.compile(
    r"<\|[^<>|\s]*\|?>|<[a-z_]+\|>|<｜[^｜]*｜>|<(?:start|end)_of_turn>|</?(?:think|tool_call)>"
)
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def trls_templates() -> list[Path]:
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))


def test_a_result_is_in_the_prompt_or_the_template_is_refused_at_the_start() -> None:
    """The templates of models that trl has, each with a tokenizer that knows their special tokens.

    Result: after a reply, with the token that ends its turn or without it, the tokens that are
    appended are those of the whole conversation; other templates are refused before that.
    """
    adapter_of("trl", "trl.experimental.async_grpo.async_rollout_worker")
    made = {path.stem: tokenizer_with_special_tokens(path.read_text()) for path in trls_templates()}
    assert len(made) > 2 * len(NO_RESULTS | NO_TOOLS | NO_TEXT)
    refused = dict[str, str]()
    for name, tokenizer in made.items():
        try:
            chat = Chat.of(tokenizer)
            chat.begin([user("What is there?")], [LOOK])
        except ValueError as error:
            refused[name.removesuffix("_training")] = str(error)
            continue
        for seen in ([], ["a wall"], ["a wall", "a door"]):
            check_continuation(tokenizer, chat, seen)
    assert refused.keys() == NO_RESULTS | NO_TOOLS | NO_TEXT
    assert all("tool" in refused[name] for name in NO_RESULTS | NO_TOOLS)


def tokenizer_with_special_tokens(template: str) -> Any:
    """Bytes, and the special tokens that are named in a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_alone = Tokenizer(
        models.BPE(vocab={each: at for at, each in enumerate(alphabet)}, merges=[])
    )
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    special = sorted({*SPECIAL.findall(template), "<|im_start|>", "<|im_end|>", "<|eot_id|>"})
    bytes_alone.add_special_tokens([AddedToken(each, special=True) for each in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone, eos_token="<|eos|>", bos_token="<bos>", chat_template=template
    )


def check_continuation(tokenizer: Any, chat: Chat, seen: list[str]) -> None:
    ids = [f"call0000{at}" for at in range(len(seen))]
    calls = [
        {"id": each, "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
        for each in ids
    ]
    reply = {"role": "assistant", "content": "", "tool_calls": calls} if seen else said("A reply.")
    more: list[Any] = [
        {"role": "tool", "tool_call_id": each, "name": "look", "content": content}
        for each, content in zip(ids, seen, strict=True)
    ] or [user("And now?")]
    appended = str(tokenizer.decode(chat.go_on([], more, [LOOK])))
    assert all(message["content"] in appended for message in more)
    first = tokenizer.encode(appended, add_special_tokens=False)[0]
    if first in chat.stop_token_ids:
        rest = tokenizer.decode(chat.go_on([first], more, [LOOK]))
        assert appended == tokenizer.decode([first]) + rest
    try:
        whole = tokenizer.apply_chat_template(
            [user("?"), reply, *more], tools=[LOOK], add_generation_prompt=True, tokenize=False
        )
    except TemplateError as error:
        assert "single tool-call" in str(error)
    else:
        assert whole.endswith(appended)


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}
