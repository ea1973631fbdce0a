"""The sidecar's smaller parts: tickets, contexts, load, storage keys, the engine's command line,
what is learned of an engine."""

import asyncio
import hashlib
import json
import math
import os
from array import array
from pathlib import Path

import grpc.aio
import pytest
from treadle.common.v1.ticket_pb2 import Ticket
from treadle_core.engine_queue.pace import EngineProgress
from treadle_runtime.errors import FailedPrecondition, PermissionDenied
from treadle_runtime.http.sglang import EngineClient, EngineLost, EngineRefused
from treadle_sidecar.config import SidecarSettings
from treadle_sidecar.convert import engine_info
from treadle_sidecar.engine.process import (
    EngineSpec,
    choose_weights,
    cpu_dtype,
    engine_command,
    main,
)
from treadle_sidecar.engine.watch import EngineWatch, read_profile
from treadle_sidecar.prefixes import Prefixes
from treadle_sidecar.runner import WINDOW_S, Contexts, LoadMeter
from treadle_sidecar.servicer import TicketBook
from treadle_sidecar.storage_keys import StoredPages, page_keys


def test_a_used_ticket_is_remembered_until_its_date_refuses_it() -> None:
    book, ticket = TicketBook("e0", None), Ticket(ticket_id="k1", engine_id="e0")
    book.check(ticket, 100.0, 50.0)
    book.use("k1", 100.0, 50.0)
    with pytest.raises(FailedPrecondition, match="before"):
        book.check(ticket, 100.0, 60.0)
    book.use("k2", 300.0, 150.0)
    with pytest.raises(PermissionDenied, match="expired"):
        book.check(ticket, 100.0, 150.0)
    assert book._used == {"k2"}


def test_contexts_beyond_the_limit_go_least_recently_used_first() -> None:
    contexts = Contexts(limit_tokens=10)
    contexts.remember("a", array("i", range(4)))
    contexts.remember("b", array("i", range(4)))
    assert contexts.get("a") is not None
    contexts.remember("c", array("i", range(4)))
    assert contexts.get("b") is None
    contexts.remember("a", array("i", range(6)))
    assert (contexts.get("a"), contexts.get("c")) == (array("i", range(6)), array("i", range(4)))
    contexts.forget("a")
    contexts.forget("a")
    contexts.remember("huge", array("i", range(50)))
    assert contexts.get("huge") is not None, "the newest stays, whatever its length"


def test_the_load_meter_counts_the_last_seconds_only() -> None:
    meter = LoadMeter()
    assert meter.tokens_per_s(0.0) == 0.0
    for step in range(100):
        meter.add(1, step * 0.1)
    assert meter.tokens_per_s(9.9) == pytest.approx(10.0, rel=0.1)
    assert meter.tokens_per_s(9.9 + WINDOW_S + 1) == 0.0


def test_storage_keys_are_a_chain_of_pages_seeded_by_the_salt() -> None:
    ids = list(range(40))
    keys = list(page_keys(ids, 16, None))
    first = hashlib.sha256(array("I", ids[:16]).tobytes())
    assert keys[0] == first.hexdigest()
    assert keys[1] == hashlib.sha256(first.digest() + array("I", ids[16:32]).tobytes()).hexdigest()
    assert len(keys) == 2, "the last page is not whole"
    assert set(page_keys(ids, 16, "v1")).isdisjoint(keys)
    assert set(page_keys(ids, 16, "v1")).isdisjoint(page_keys(ids, 16, "v2"))


def test_storage_keys_are_those_of_a_stock_engine() -> None:
    """The name of a file that SGLang 0.5.23 wrote with its own compiled hash: page 12 of these ids,
    this salt."""
    keys = list(page_keys(list(range(1000, 1200)), 16, "default"))
    assert keys[11] == "19c6c886cc9b47c01b20c874ab87b446ac9246fb288461418208100c67213edc"


def test_stored_pages_count_up_to_the_first_that_is_missing(tmp_path: Path) -> None:
    ids, suffix = list(range(64)), "_model_0_1.bin"
    keys = list(page_keys(ids, 16, "v1"))
    pages = StoredPages(tmp_path, [suffix], ids, 16, "v1")
    pages.look()
    assert pages.tokens == 0
    for key in (keys[0], keys[2]):
        (tmp_path / f"{key}{suffix}").touch()
    pages.look()
    assert pages.tokens == 16
    (tmp_path / f"{keys[1]}{suffix}").touch()
    pages.look()
    assert pages.tokens == 48
    (tmp_path / f"{keys[3]}{suffix}").touch()
    (tmp_path / f"{keys[0]}{suffix}").unlink()
    pages.look()
    assert pages.tokens == 64, (
        "what was seen counts for this look; the engine computes a page that has gone"
    )
    unknown = StoredPages(None, [suffix], ids, 16, "v1")
    unknown.look()
    assert unknown.tokens == 0


async def test_the_loop_runs_other_tasks_while_a_long_prefix_is_looked_up(tmp_path: Path) -> None:
    """128k tokens are 8,192 pages, all of them stored. Result: another task runs again and again
    meanwhile."""
    ids, others_ran = array("i", range(128 * 1024)), 0
    progress = EngineProgress(stall_s=1.0)
    engine = EngineClient("http://127.0.0.1:1")
    watch = EngineWatch(engine, progress, lambda: None)
    server = {"page_size": 16, "incremental_streaming_output": True}
    watch.profile = read_profile(server, {"model_path": "m", "weight_version": "v1"}, 0)
    watch.healthy = True
    for key in page_keys(ids, 16, "v1"):
        (tmp_path / f"{key}{watch.profile.storage_suffixes[0]}").touch()
    contexts = Contexts()
    contexts.remember("t", ids)
    prefixes = Prefixes(
        engine,
        watch,
        contexts,
        tmp_path,
        0.0,
        lambda address, _: grpc.aio.insecure_channel(address),
    )
    export = asyncio.create_task(prefixes.export("t", counts_only=True))
    while not export.done():
        await asyncio.sleep(0)
        others_ran += 1
    await engine.close()
    assert (await export).stored_tokens == len(ids)
    assert others_ran > 10


def spec(**options: object) -> EngineSpec:
    defaults = {
        "engine_id": "e0",
        "port": 31000,
        "cpu": True,
        "model_path": "/m",
        "venv_python": Path("/v/bin/python"),
    }
    return EngineSpec(**{**defaults, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["/proc/none", "/proc/self"])
def test_a_folder_that_takes_no_page_is_refused_before_the_engine_starts(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that cannot be made, and one that is there. Also root cannot write to these."""
    with pytest.raises(SystemExit, match="2"):
        main(["--cpu", "--model", "/m", "--hicache-dir", folder])
    assert (
        f"hicache-dir: user {os.getuid()} cannot write pages of KV to {folder}"
        in capsys.readouterr().err
    )


def test_a_cpu_engine_is_pinned_has_one_thread_a_core_and_chooses_the_platform() -> None:
    command = engine_command(
        spec(
            cores=(1,),
            slots=3,
            kv_tokens=9000,
            hicache_dir=Path("/kv"),
            hicache_limit_gb=12.5,
            extra_args=("--dtype", "float32"),
            nccl_port=31001,
        ),
        {"PATH": "/bin", "PYTHONPATH": "/elsewhere", "SGLANG_USE_CPU_ENGINE": "1"},
    )
    line = " ".join(command.argv)
    assert command.argv[:3][1:] == ("--cpu-list", "1")
    assert (
        "/v/bin/python -m sglang.launch_server --model-path /m --host 127.0.0.1 --port 31000"
        in line
    )
    assert "--max-running-requests 5" in line, "two above the slots, for prefetches"
    assert command.forked_arguments[:2] == ("--model-path", "/m"), "those of the server itself"
    assert "--nccl-port 31001" in line
    assert "--device cpu" in line
    assert "--hicache-io-backend direct" in line
    assert '"limit_gb": 12.5' in line
    assert line.endswith("--dtype float32")
    assert "--quantization" not in " ".join(engine_command(spec(weights="float"), {}).argv)
    assert command.env["OMP_NUM_THREADS"] == command.env["TREADLE_SGLANG_CPU"] == "1"
    assert command.env["SGLANG_PLATFORM"] == "treadle_cpu"
    assert command.env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == "/kv"
    assert command.env["PATH"] == "/bin"
    assert "SGLANG_USE_CPU_ENGINE" not in command.env
    assert (Path(command.env["PYTHONPATH"]) / "checked_pages.py").exists(), (
        "nothing else is on the engine's path"
    )


@pytest.mark.parametrize(
    ("info", "dtype"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", "auto"),
        ("Features\t: fp asimd bf16\n", "auto"),
        ("flags\t\t: fpu avx2\nmodel name\t: bf16\n", "float32"),
        (None, "float32"),
    ],
)
def test_an_engine_on_a_processor_without_bf16_computes_in_float32(
    tmp_path: Path, info: str | None, dtype: str
) -> None:
    if info is not None:
        (tmp_path / "cpuinfo").write_text(info)
    assert cpu_dtype(tmp_path / "cpuinfo") == dtype


def test_weights_are_8_bits_where_the_processor_multiplies_bytes(tmp_path: Path) -> None:
    able, unable = tmp_path / "able", tmp_path / "unable"
    able.write_text("flags\t\t: fpu avx512f avx512_vnni\n")
    unable.write_text("flags\t\t: fpu avx512f\n")
    assert choose_weights("auto", True, able) == choose_weights("int8", True, able) == "int8"
    assert choose_weights("float", True, able) == choose_weights("auto", True, unable) == "float"
    assert choose_weights("auto", False, able) == "float", "engines on GPUs have SGLang's own flags"
    for asked, cpu, info, why in (
        ("int8", True, unable, "without avx512_vnni"),
        ("int8", False, able, "--quantization"),
        ("int4", True, able, "auto, int8, float, not 'int4'"),
    ):
        with pytest.raises(ValueError, match=why):
            choose_weights(asked, cpu, info)


def test_a_gpu_engine_gets_a_model_name_and_sglangs_own_flags() -> None:
    command = engine_command(
        spec(cpu=False, model_path="Qwen/Qwen3-8B", extra_args=("--tp-size", "2")),
        {"CUDA_VISIBLE_DEVICES": "0,1"},
    )
    line = " ".join(command.argv)
    assert line.startswith("/v/bin/python -m sglang.launch_server --model-path Qwen/Qwen3-8B")
    assert line.endswith("--tp-size 2")
    assert "cpu" not in line
    assert "hicache" not in line
    assert "--nccl-port" not in line, "it chooses one itself"
    assert command.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "TREADLE_SGLANG_CPU" not in command.env


@pytest.mark.parametrize("options", [{"port": 0}, {"slots": 0}, {"hicache_limit_gb": 0.0}])
def test_a_spec_that_cannot_run_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        engine_command(spec(**options), {})


@pytest.mark.parametrize(
    ("flags", "host_kv_tokens"),
    [
        ({}, 0),
        ({"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_size": 0}, 40_000),
        ({"enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_size": 3}, 60_000),
    ],
)
def test_a_profile_says_what_the_hosts_memory_keeps(
    flags: dict[str, object], host_kv_tokens: int
) -> None:
    memory = {"token_capacity": 20_000, "kvcache": 1e9 / 1024**3}
    server = {
        **flags,
        "incremental_streaming_output": True,
        "internal_states": [{"memory_usage": memory}],
    }
    profile = read_profile(server, {"model_path": "m", "weight_version": "default"}, 0)
    assert profile.host_kv_tokens == host_kv_tokens


@pytest.mark.parametrize(
    ("server", "model"),
    [
        ({"max_req_input_len": 2**31}, {}),
        ({"page_size": -1}, {}),
        ({"tp_size": math.inf}, {}),
        ({"internal_states": [7]}, {}),
        ({"internal_states": {"a": 1}}, {}),
        ({}, {"model_path": "\ud800"}),
        ({}, {"model_path": "x" * 70_000}),
        ({}, {"weight_version": None}),
    ],
)
def test_a_profile_that_no_engine_has_is_refused(
    server: dict[str, object], model: dict[str, object]
) -> None:
    known = {"model_path": "m", "weight_version": "default"}
    with pytest.raises(EngineLost, match="does not speak the protocol"):
        read_profile({"incremental_streaming_output": True, **server}, {**known, **model}, 0)


def test_a_profile_takes_the_end_tokens_from_the_models_own_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    server = {
        "incremental_streaming_output": False,
        "stream_interval": 4,
        "max_req_input_len": 8186,
        "page_size": 16,
        "tp_size": 1,
        "hicache_storage_backend": "file",
        "internal_states": [
            {
                "memory_usage": {"token_capacity": 20000, "kvcache": 0.429},
                "effective_max_running_requests_per_dp": 4,
            }
        ],
    }
    profile = read_profile(
        server, {"model_path": str(tmp_path), "weight_version": "default"}, 49152
    )
    assert profile.end_token_ids == {0, 2, 7}
    assert (profile.slots, profile.max_sequence_tokens, profile.storage) == (2, 8190, True)
    assert (profile.incremental, profile.tokens_a_chunk) == (False, 4)
    assert profile.kv_bytes_per_token == pytest.approx(23_040, rel=0.01)
    assert profile.storage_suffixes[0] == f"_{str(tmp_path).replace('/', '-')}_0_1.bin"


@pytest.mark.parametrize(
    ("engine_url", "address", "told"),
    [
        ("http://127.0.0.1:30000", "127.0.0.1:7410", True),
        ("http://127.0.0.1:30000", "10.0.0.7:7410", False),
        ("http://localhost:30000", "engine-0.engine:7410", False),
        ("http://10.0.0.7:30000", "10.0.0.7:7410", True),
    ],
)
def test_an_engine_on_loopback_is_told_to_nobody_on_another_machine(
    engine_url: str, address: str, told: bool, tmp_path: Path
) -> None:
    states = [
        {
            "memory_usage": {"token_capacity": 9, "kvcache": 0.1},
            "effective_max_running_requests_per_dp": 4,
        }
    ]
    server = {
        "incremental_streaming_output": True,
        "max_req_input_len": 8186,
        "tp_size": 1,
        "internal_states": states,
    }
    profile = read_profile(server, {"model_path": str(tmp_path), "weight_version": "default"}, 0)
    settings = SidecarSettings(engine_id="e0", engine_url=engine_url)
    info = engine_info(settings, profile, address, slots=2, curve=None)
    assert info.url == (engine_url if told else "")


@pytest.mark.parametrize(
    ("server", "model", "argument"),
    [
        ({}, {}, "--incremental-streaming-output"),
        (
            {"incremental_streaming_output": True, "disaggregation_mode": "decode"},
            {},
            "--disaggregation-mode decode",
        ),
        ({"incremental_streaming_output": True}, {"is_generation": False}, "--is-embedding"),
    ],
)
def test_an_engine_that_cannot_run_a_step_is_refused_by_the_name_of_its_argument(
    server: dict[str, object], model: dict[str, object], argument: str
) -> None:
    with pytest.raises(EngineRefused, match=argument):
        read_profile(server, model, 0)
