"""`treadle simulate` from the options to the files: small workloads, and everything that a user can
get wrong."""

import json
import re
import signal
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, run
from typing import Any

import psutil
import pytest
from treadle_cli.app import app
from treadle_cli.simulate import run as simulate_run
from treadle_sim.workloads.parametric import make
from treadle_sim.workloads.workload import write_traces
from typer.testing import CliRunner

SMALL = ("--prompts", "3", "--samples", "3", "--gpus", "2", "--slots", "4")
LEAST_CHILDREN = 2  # a worker, and who tracks what workers share
FILES = {"summary.json", "trajectories.jsonl", "simulate.png", "simulate.html", "plan.json"}
PROFILE = {
    "accelerator": "CPU",
    "llm": "small",
    "gpus": 1,
    "slots": 4,
    "kv_tokens": 100_000,
    "decode": [
        {"batch": 1, "kv_tokens": 1000, "step_s": 0.01},
        {"batch": 4, "kv_tokens": 4000, "step_s": 0.02},
    ],
}


def simulated(out: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["simulate", *options, "--json", "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def refused(out: Path, *options: str) -> str:
    """What is said on stderr, as one line; exit code 2 and nothing else."""
    result = CliRunner().invoke(app, ["simulate", *options, "--out", str(out)])
    assert result.exit_code == 2, result.output
    assert result.stdout.strip() == ""
    return " ".join(result.stderr.split())


def computes(process: psutil.Process) -> bool:
    """Neither ended nor waiting to be buried."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return simulated(tmp_path_factory.mktemp("runs"), "coding", *SMALL)


def test_json_holds_every_system_with_the_others_makespans_and_the_bound_over_its_own(
    small: dict[str, Any],
) -> None:
    assert small["workload"] == "coding"
    assert (small["trajectories"], small["gpus"], small["slots_per_gpu"]) == (9, 2, 4)
    names = [row["system"] for row in small["systems"]]
    assert names == [
        "verl",
        "sticky",
        "verl*",
        "slime",
        "affinity-las",
        "pausing",
        "heddle",
        "treadle",
        "oracle",
    ]
    makespans = {row["system"]: row["makespan_s"] for row in small["systems"]}
    best_s = min(makespans[name] for name in names[:6])
    assert makespans[small["best_baseline"]] == best_s
    others_s = {"bound": small["bound"]["lower_s"], "best_baseline": best_s, **makespans}
    for row in small["systems"]:
        for other in ("bound", "best_baseline", "verl", "oracle"):
            assert row[f"ratio_to_{other}"] == pytest.approx(others_s[other] / row["makespan_s"])
        assert row["half_ended_s"] <= row["most_ended_s"] <= row["makespan_s"]
        assert row["makespan_s"] >= small["bound"]["lower_s"]
        assert 0.0 <= row["queue_share_longest"] < 1.0
        assert row["tokens_per_s"] == pytest.approx(small["gen_tokens"] / row["makespan_s"])


def test_a_run_leaves_its_files(small: dict[str, Any]) -> None:
    folder = Path(small["folder"])
    assert {path.name for path in folder.iterdir()} == FILES
    assert json.loads((folder / "summary.json").read_text()) == small
    assert (folder / "simulate.png").read_bytes().startswith(b"\x89PNG")
    engines = json.loads((folder / "plan.json").read_text())["engines"]
    [treadle] = [row["engines"] for row in small["systems"] if row["system"] == "treadle"]
    assert treadle == " + ".join(
        f"{each['count']}x{each['degree']} {each['accelerator']}" for each in engines[::-1]
    )
    page = (folder / "simulate.html").read_text()
    assert "<script src" not in page  # nothing is loaded from anywhere
    assert "no schedule ends this workload before" in page.lower()
    columns, *systems = (
        json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()
    )
    assert sum(columns["gen_tokens"]) == small["gen_tokens"]
    assert {line["system"]: max(line["finished_s"]) for line in systems} == {
        row["system"]: pytest.approx(row["makespan_s"], abs=1e-3) for row in small["systems"]
    }


def test_the_terminal_gets_the_table_the_sentences_and_the_path(tmp_path: Path) -> None:
    options = [
        "math",
        *SMALL,
        "--systems",
        "verl,treadle,oracle",
        "--degrees",
        "1",
        "--out",
        str(tmp_path),
    ]
    result = CliRunner().invoke(app, ["simulate", *options])
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert re.search(
        r"verl 2x1 H200 \d+\.\d s 1\.00 1\.00.*No schedule ends this workload before", text
    )
    assert "as fast as the best baseline, verl" in text
    assert str(tmp_path) in text
    assert max(map(len, result.stdout.splitlines()[:-1])) <= 80


def test_several_seeds_give_medians_and_every_makespan(tmp_path: Path) -> None:
    found = simulated(
        tmp_path, "search", *SMALL, "--systems", "slime,treadle", "--repeats", "3", "--seed", "5"
    )
    assert found["seeds"] == [5, 6, 7]
    for row in found["systems"]:
        assert len(set(row["makespans_s"])) == 3
        assert row["makespan_s"] == sorted(row["makespans_s"])[1]
        assert row["ratio_to_verl"] is None
    assert any("Medians of 3 seeds" in line for line in found["told"])


def test_a_trace_file_runs_as_it_is_and_says_what_was_cut(tmp_path: Path) -> None:
    cut = make("math", 2, 3, max_gen_tokens=4_000).trajectories
    write_traces(tmp_path / "mine.jsonl.gz", cut)
    found = simulated(
        tmp_path, str(tmp_path / "mine.jsonl.gz"), "--gpus", "1", "--systems", "verl,treadle"
    )
    assert found["workload"] == "mine.jsonl.gz"
    assert found["gen_tokens"] == sum(work.gen_tokens for work in cut)
    count = sum(work.censored for work in cut)
    assert count
    assert any(
        line.startswith(f"{count} of the 6 trajectories were cut off") for line in found["told"]
    )


def test_a_trace_file_is_resampled_where_prompts_are_asked_for_and_only_then_has_an_earlier_epoch(
    tmp_path: Path,
) -> None:
    write_traces(tmp_path / "mine.jsonl", make("math", 2, 3).trajectories)
    options = (
        str(tmp_path / "mine.jsonl"),
        "--predictor",
        "prompt-mean",
        "--gpus",
        "1",
        "--systems",
        "treadle",
    )
    assert "give --prompts" in refused(tmp_path, *options)
    assert simulated(tmp_path, *options, "--prompts", "4", "--samples", "2")["trajectories"] == 8


def test_an_engine_that_was_measured_takes_the_place_of_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(json.dumps(PROFILE))
    options = (*SMALL, "--systems", "verl,treadle", "--profile", str(tmp_path / "engine.json"))
    found = simulated(tmp_path, "coding", *options)
    assert (found["llm"], found["accelerator"], found["curve"]) == (
        "small",
        "CPU",
        "measured on a live engine",
    )
    assert {row["engines"] for row in found["systems"]} == {"2x1 CPU"}


def test_cores_change_no_figure(
    tmp_path: Path, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate_run, "ALONE_TRAJECTORIES", 0)
    found = simulated(tmp_path, "coding", *SMALL, "--systems", "verl,slime,treadle")
    by_name = {row["system"]: row["makespan_s"] for row in small["systems"]}
    assert [row["makespan_s"] for row in found["systems"]] == [
        by_name[name] for name in ("verl", "slime", "treadle")
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("nothing",), r"WORKLOAD: .*'nothing'; take coding, search, math or a trace file"),
        (
            ("--systems", "verl,foo"),
            r"--systems: there is no 'foo'; the systems are verl, .*oracle",
        ),
        (("--systems", ","), r"--systems: name at least one of"),
        (("--llm", "gpt"), r"--llm: no engine of 'gpt' was fitted on H200; there are .*Qwen3-14B"),
        (("--accelerator", "tpu"), r"--accelerator: no engine was fitted on 'tpu'; there are A100"),
        (("--degrees", "x"), r"--degrees: must be best or a number"),
        (
            ("--degrees", "3"),
            r"--degrees: there is no engine of .* on 3 GPUs; there are 1, 2, 4, 8",
        ),
        (("--degrees", "8", "--gpus", "4"), r"--gpus: 4 do not divide into engines .* take 8 GPUs"),
        (
            ("--gpus", "3", "--llm", "Llama-3.1-70B"),
            r"--gpus: 3 do not divide into engines .* take 2, 4, 8 GPUs",
        ),
        (("--gpus", "100000"), r"'--gpus': .*less than or equal to 1024"),
        (("--prompts", "1000000"), r"--prompts: at most 102,400 trajectories"),
        (("--predictor", "magic"), r"--predictor: there is no 'magic'; take one of oracle"),
        (("--profile", "absent.json"), r"--profile: absent.json: No such file"),
        *(((option, "0"), option) for option in ("--gpus", "--prompts", "--repeats")),
    ],
)
def test_bad_options_get_one_line_that_names_them(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    line = refused(tmp_path, *options)
    assert re.search(said, line)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", r"mine.jsonl: line 1: prompt_id: is missing \(format: docs/traces.md\)"),
        (
            '{"prompt_id":"a","sample":0,"prompt_tokens":9,"steps":[{"gen_tokens":99000000,"obs_tokens":0,'
            '"tool_latency_s":0}]}',
            r"WORKLOAD: the longest trajectory ends at 99,000,009 tokens, and no engine of .* "
            r"holds more",
        ),
    ],
)
def test_bad_traces_get_one_line_that_names_the_place(
    tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "mine.jsonl").write_text(content)
    assert re.search(said, refused(tmp_path, str(tmp_path / "mine.jsonl")))


def test_ctrl_c_ends_the_workers_and_leaves_no_folder(tmp_path: Path) -> None:
    """Workers are computing when SIGINT comes. Result: exit code 130, every worker ends, nothing is
    written."""
    command = [sys.executable, "-m", "treadle_cli", "simulate", "--prompts", "200", "--gpus", "16"]
    with Popen(
        [*command, "--out", str(tmp_path)], stdout=DEVNULL, stderr=PIPE, text=True
    ) as process:
        while len(workers := psutil.Process(process.pid).children()) < LEAST_CHILDREN:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in said
    while any(
        computes(worker) for worker in workers
    ):  # what tracks shared things goes once nobody shares
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())


def test_simulating_loads_neither_an_engine_nor_a_service() -> None:
    listed = (
        "import sys, treadle_cli.simulate.run; print(*{name.partition('.')[0] for name in "
        "sys.modules})"
    )
    loaded = set(
        run(
            [sys.executable, "-c", listed], capture_output=True, text=True, check=True
        ).stdout.split()
    )
    assert "treadle_sim" in loaded
    unneeded = {
        "torch",
        "sglang",
        "transformers",
        "nats",
        "grpc",
        "treadle_runtime",
        "treadle_sidecar",
    }
    assert not loaded & (unneeded | {"matplotlib", "plotly"})
