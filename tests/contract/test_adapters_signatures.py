"""The adapters have the signatures of the frameworks, and the stand-ins of the tests are what the
packages hold.

The second half reads the packages' source, which `make frameworks` fetches. Nothing of them is
imported.
"""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.frameworks import areal_1_0_4, rllm_0_3, roll_0_3_0, trl_1_16_0, verl_0_9_1
from support.frameworks.packages import folder_of
from support.frameworks.stand_ins import fields, parameters, standing_in, written_parameters

PACKAGED = (verl_0_9_1, areal_1_0_4, trl_1_16_0)  # in a registry
# Stand-in, adapter, and which class of ours has the methods of which of theirs.
PAIRS: list[tuple[Any, str, str, Any, tuple[str, ...]]] = [
    (verl_0_9_1, "verl", "LLMClient", verl_0_9_1.LLMServerClient, ("generate",)),
    (
        verl_0_9_1,
        "verl",
        "FullyAsyncLLMClient",
        verl_0_9_1.FullyAsyncLLMServerClient,
        ("__init__", "generate"),
    ),
    (areal_1_0_4, "areal", "MeshEngine", areal_1_0_4.RemoteSGLangEngine, ("__init__", "agenerate")),
    (
        *(areal_1_0_4, "areal", "MeshClient", areal_1_0_4.RemoteInfEngine),
        (
            *(
                "__init__",
                "agenerate",
                "pause_generation",
                "continue_generation",
                "update_weights_from_disk",
            ),
            *("update_weights_from_distributed", "_resolve_workflow"),
        ),
    ),
    (
        *(rllm_0_3, "rllm", "MeshEngine", rllm_0_3.RolloutEngine),
        (
            *("get_model_response", "_get_model_response", "get_token_output_from_token_input"),
            *("assemble_model_output", "wake_up", "sleep"),
        ),
    ),
    (roll_0_3_0, "roll", "MeshProxy", roll_0_3_0.BaseLLMProxy, ("generate",)),
    (
        *(trl_1_16_0, "trl", "RolloutWorker", trl_1_16_0.RolloutWorkerProtocol),
        ("start", "stop", "update_model_version", "check_health"),
    ),
    (
        trl_1_16_0,
        "trl",
        "RolloutLoop",
        trl_1_16_0._AsyncRolloutLoop,
        ("_run_loops", "_generate_one_turn"),
    ),
    (
        *(trl_1_16_0, "trl", "WeightTransfer", trl_1_16_0.WeightTransferProtocol),
        ("init_weight_transfer", "pause", "send_weights", "resume", "destroy"),
    ),
]


@pytest.mark.parametrize(
    ("stand_in", "adapter", "ours", "theirs", "methods"),
    PAIRS,
    ids=[f"{pair[1]}.{pair[2]}" for pair in PAIRS],
)
def test_an_adapter_has_the_parameters_of_its_framework(
    stand_in: Any, adapter: str, ours: str, theirs: Any, methods: tuple[str, ...]
) -> None:
    with standing_in(stand_in.contents(), adapter) as (module,):
        found = {name: parameters(getattr(getattr(module, ours), name)) for name in methods}
    assert found == {name: parameters(getattr(theirs, name)) for name in methods}


def test_an_engine_replica_has_the_parameters_of_verls() -> None:
    with standing_in(verl_0_9_1.contents(), "verl_engines") as (module,):
        made = module.replica_in_mesh(verl_0_9_1.SGLangReplica, verl_0_9_1.remote, "localhost:1")
    for name in ("abort_all_requests", "resume_generation", "sleep", "wake_up"):
        assert parameters(getattr(made, name)) == parameters(
            getattr(verl_0_9_1.SGLangReplica, name)
        )


def test_two_ray_clusters_of_a_machine_keep_their_certificates_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one user, at the same time: a process of either has the files of its own mesh."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    meshes = {}
    for port in (1, 2):
        told = {"scheduler": f"host:{port}", "gateway": "", "api_key": "", "secure": True}
        files = {"tls.key": f"of {port}".encode()}
        actor = SimpleNamespace(
            describe=SimpleNamespace(remote=lambda told=told: told),
            credentials=SimpleNamespace(remote=lambda _, files=files: files),
        )
        ray = {"is_initialized": lambda: True, "get_actor": lambda *_, actor=actor, **__: actor}
        with standing_in({"ray": {**ray, "get": lambda answer, timeout: answer}}, "on_ray") as (
            module,
        ):
            meshes[port] = module.find_mesh()
    assert {port: (mesh.tls_folder / "tls.key").read_text() for port, mesh in meshes.items()} == {
        1: "of 1",
        2: "of 2",
    }


def test_threads_of_a_process_may_keep_certificates_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with standing_in({"ray": {}}, "on_ray") as (module,), ThreadPoolExecutor(8) as threads:
        folders = set(threads.map(lambda _: module._keep("m", {"tls.key": b"k"}), range(200)))
    assert [path.name for folder in folders for path in folder.iterdir()] == ["tls.key"]


@pytest.mark.parametrize("adapter", ["verl", "verl_engines", "areal", "rllm", "roll", "trl"])
def test_a_client_without_the_framework_works_and_the_adapter_says_what_is_missing(
    adapter: str,
) -> None:
    """In a process of its own, in which no framework can be imported."""
    names = ("verl", "areal", "rllm", "roll", "trl")
    program = (
        f"import sys; sys.modules.update({', '.join(f'{name}=None' for name in names)})\nimport "
        f"treadle, treadle.adapters.calls\nimport treadle.adapters.{adapter}"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TREADLE_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if (
        adapter == "verl_engines"
    ):  # verl loads it in every process, so it does nothing without an address
        assert done.returncode == 0, done.stderr
    else:
        assert f"No module named '{adapter}." in done.stderr, done.stderr


@pytest.mark.full  # it needs the packages of `make frameworks`
@pytest.mark.parametrize(
    "stand_in", PACKAGED, ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_a_stand_in_has_the_parameters_that_the_package_has(stand_in: ModuleType) -> None:
    assert stand_in.__file__ is not None
    folder = folder_of("adapters")
    ours = Path(stand_in.__file__).read_text()
    for path, names in stand_in.SOURCES.items():
        theirs = (folder / path).read_text()
        for name in names:
            assert written_parameters(ours, name) == written_parameters(theirs, name), (
                f"{path}: {name}"
            )
    for path, names in stand_in.FIELDS.items():
        for name in names:
            assert fields(ours, name) == fields((folder / path).read_text(), name), (
                f"{path}: {name}"
            )


@pytest.mark.full
def test_trls_loop_takes_what_the_worker_gives_it() -> None:
    """The worker hands on what it is given, in TRL too: a name that the loop does not know fails in
    the child alone."""
    with standing_in(trl_1_16_0.contents(), "trl") as (module,):
        tokenizer = SimpleNamespace(eos_token_id=2)
        given = {
            "model_name": "m",
            "dataset": [],
            "reward_funcs": [],
            "processing_class": tokenizer,
        }
        worker = module.RolloutWorker.of(trl_1_16_0.config(), **given)
    source = folder_of("adapters") / "trl/experimental/async_grpo/async_rollout_worker.py"
    taken = {
        name for name, _ in written_parameters(source.read_text(), "_AsyncRolloutLoop.__init__")
    }
    assert set(worker.loop_kwargs) - {"address"} <= taken
