"""The settings that the pages of the Python adapters show do what the pages say. Those of
frameworks that speak HTTP: test_gateway_frameworks.py."""

import importlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
from support.frameworks import areal_1_0_4 as areal
from support.frameworks import rllm_0_3 as rllm
from support.frameworks import roll_0_3_0 as roll
from support.frameworks import trl_1_16_0 as trl
from support.frameworks import verl_0_9_1 as verl
from support.frameworks.settings import shown_settings
from support.frameworks.stand_ins import standing_in

MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"


def named(path: str) -> Any:
    """The class that a framework imports by its name."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_verl_finds_the_manager_and_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_settings("verl")
    monkeypatch.setenv("TREADLE_ADDRESS", shown["TREADLE_ADDRESS"])
    with standing_in(verl.contents(), "verl_engines", "verl"):
        manager = named(shown[MANAGER]).create(
            verl.config(), verl.LLMServerClient(verl.config(), "balancer")
        )
        assert isinstance(manager, verl.AgentLoopManager)
        assert manager.llm_client.address == shown["TREADLE_ADDRESS"] == "ray"


def test_areals_trainer_makes_the_meshs_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_ADDRESS", "elsewhere:1")
    with standing_in(areal.contents(), "areal"):
        exec(shown_settings("areal")["code"], {})
        assert os.environ["TREADLE_ADDRESS"] == "mesh:7401"
        assert named("areal.trainer.rl_trainer").RemoteSGLangEngine is named(
            "treadle.adapters.areal.MeshEngine"
        )


def test_rllm_takes_the_engine() -> None:
    with standing_in(rllm.contents(), "rllm"):
        known: dict[str, Any] = {"tokenizer": SimpleNamespace(eos_token_id=2)}
        exec(shown_settings("rllm")["code"], known)
        assert isinstance(known["engine"], rllm.RolloutEngine)


def test_roll_finds_the_proxy_and_the_manager() -> None:
    shown = shown_settings("roll")
    with standing_in(roll.contents(), "roll"):
        assert issubclass(named(shown["env_manager_cls"]), roll.TrajEnvManager)
        proxy = roll.create_llm_proxy(
            shown["llm_proxy"]["proxy_type"], shown["llm_proxy"]["proxy_config"]
        )
        assert type(proxy).__module__ == "treadle.adapters.roll"


def test_trls_trainer_gets_the_worker_and_the_transfer() -> None:
    def trainer(*_: Any, **given: Any) -> dict[str, Any]:
        return given

    with standing_in(trl.contents(), "trl") as (adapter,):
        known: dict[str, Any] = {
            "AsyncGRPOTrainer": trainer,
            "args": trl.config(),
            "m": "m",
            "d": [],
            "r": [len],
        }
        exec(shown_settings("trl")["code"], known | {"t": SimpleNamespace(eos_token_id=2)}, known)
        assert isinstance(known["trainer"]["rollout_worker"], adapter.RolloutWorker)
        assert isinstance(known["trainer"]["weight_transfer"], adapter.WeightTransfer)
