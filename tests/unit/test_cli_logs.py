"""`treadle simulate --from-run` and `--from-log`: what each format becomes, what is assumed, and
what is refused."""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.runs import small_run, span, trajectory
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from treadle_cli.app import app
from treadle_cli.exits import UsageProblem
from treadle_cli.report.records import PlayRecord, Run, write_run
from treadle_cli.simulate.logs import Log, read_log
from treadle_cli.simulate.run_log import read_run_log
from treadle_sim.workloads.workload import TraceFileError
from typer.testing import CliRunner

ENGINES = ("--gpus", "2", "--slots", "4", "--degrees", "1")


def lines(folder: Path, *rows: Mapping[str, Any], name: str = "log.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return file


def shape(log: Log) -> list[tuple[str, int, int, list[tuple[int, int, Any]]]]:
    """Prompt, sample, prompt tokens, and the turns of each trajectory."""
    return [
        (
            work.prompt_id,
            work.sample,
            work.prompt_tokens,
            [(step.gen_tokens, step.obs_tokens, pytest.approx(step.tool_s)) for step in work.steps],
        )
        for work in log.works
    ]


def request(
    session: str, prompt: int, sampled: int, start: float, end: float, **more: Any
) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": sampled}
    return {"session_id": session, "started_at": start, "ended_at": end, "usage": usage, **more}


def test_requests_of_a_gateway_become_turns_with_the_time_between_as_tools(tmp_path: Path) -> None:
    file = lines(
        tmp_path,
        request("a", 100, 20, 10.0, 11.0, prompt_id="p"),
        request("b", 100, 5, 10.0, 10.5, prompt_id="p"),
        request("a", 150, 30, 14.0, 15.0, prompt_id="p"),
        request("a", 0 + 999, 1, 11.5, 11.6, prompt_id="p", status="failure"),
    )
    log = read_log(file, "openai", None)
    assert shape(log) == [
        ("p", 0, 100, [(20, 30, 3.0), (30, 0, 0.0)]),
        ("p", 1, 100, [(5, 0, 0.0)]),
    ]
    assert [each.makespan_s for each in log.recorded] == [5.0] and log.way == ""


def test_the_names_of_litellms_payload_do_as_well_and_odd_requests_are_said(tmp_path: Path) -> None:
    def payload(prompt: int, sampled: int, start: float, end: float) -> dict[str, Any]:
        tokens = {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        }
        return {"trace_id": "t", "startTime": start, "endTime": end, **tokens}

    log = read_log(
        lines(tmp_path, payload(10, 5, 0.0, 2.0), payload(8, 5, 1.0, 3.0)), "openai", None
    )
    assert shape(log) == [("t", 0, 10, [(5, 0, 0.0), (5, 0, 0.0)])]
    told = " ".join(log.assumptions)
    assert (
        "1 requests had less context" in told
        and "1 requests began before" in told
        and "names no prompts" in told
    )


# What logs of gateways hold besides good lines: the lines, the assumption that says what was left out.
GOOD = (request("a", 100, 20, 10.0, 11.0), request("a", 150, 30, 14.0, 15.0))
LEFT_OUT = {
    "a failure of LiteLLM": (
        {"status": "failure", "prompt_tokens": 0, "session_id": None, "error_str": "down"},
        "1 failed requests",
    ),
    "a failure without times": ({"status": "failure", "prompt_tokens": 0}, "1 failed requests"),
    "a status of HTTP": ({**request("a", 0, 0, 12.0, 12.1), "status": 503}, "1 failed requests"),
    "a status of HTTP as a text": ({"status_code": "429"}, "1 failed requests"),
    "a cancelled request": ({"status": "cancelled", "trace_id": "a"}, "1 failed requests"),
    "an error": ({"session_id": "a", "error": {"message": "x"}}, "1 failed requests"),
    "no end": ({"session_id": "a", "started_at": 12.0, "ended_at": None}, "without an end"),
    "no token": (request("a", 0, 0, 12.0, 12.1), "1 requests that sampled no token"),
    "a line twice": (GOOD[0], "1 repeated lines"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_lines_that_are_no_answers_are_left_out_and_counted(tmp_path: Path, name: str) -> None:
    line, says = LEFT_OUT[name]
    log = read_log(lines(tmp_path, GOOD[0], line, GOOD[1]), "openai", None)
    assert shape(log) == [("a", 0, 100, [(20, 30, 3.0), (30, 0, 0.0)])]
    assert [each.makespan_s for each in log.recorded] == [5.0]
    [left_out] = [each for each in log.assumptions if each.endswith(" are left out.")]
    assert says in left_out


# The same two requests, as logs may write them.
AS_GOOD = {
    "null beside another name": [{**GOOD[0], "session_id": None, "trace_id": "a"}, GOOD[1]],
    "empty beside another name": [{**GOOD[0], "session_id": "", "trace_id": "a"}, GOOD[1]],
    "counts beside a null": [
        {**GOOD[0], "usage": None, "prompt_tokens": 100, "completion_tokens": 20},
        GOOD[1],
    ],
    "nulls": [{**each, "prompt_id": None, "status": None, "error": None} for each in GOOD],
    "numbers as texts": [
        request("a", "100", "20", "10.0", "11.0"),  # type: ignore[arg-type]
        GOOD[1],
    ],
    "another order": [GOOD[1], GOOD[0]],
    "a success": [
        {**each, "status": word} for each, word in zip(GOOD, ("200", "success"), strict=True)
    ],
    "milliseconds and texts": [
        request("a", 100, 20, 1_700_000_010_000.0, 1_700_000_011_000.0),
        request("a", 150, 30, "2023-11-14T22:13:34Z", "2023-11-14 22:13:35.0"),  # type: ignore[arg-type]
    ],
    "nanoseconds and seconds": [
        request("a", 100, 20, "1700000010000000000", 1_700_000_011_000_000.0),  # type: ignore[arg-type]
        request("a", 150, 30, 1_700_000_014, 1_700_000_015),
    ],
}


@pytest.mark.parametrize("name", AS_GOOD)
def test_other_ways_to_write_a_request_are_read_alike(tmp_path: Path, name: str) -> None:
    log = read_log(lines(tmp_path, *AS_GOOD[name]), "openai", None)
    assert shape(log) == [("a", 0, 100, [(20, 30, 3.0), (30, 0, 0.0)])]
    assert [each.makespan_s for each in log.recorded] == [5.0]
    assert not any("left out" in each for each in log.assumptions)


TEXT = "".join(json.dumps(each) + "\n" for each in GOOD)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.replace("\n", "\r\n\r\n").encode(),
        gzip.compress(TEXT.encode()),
        TEXT.rstrip().encode(),
        (TEXT + '{"session_id": "b", "usa').encode(),
        (TEXT + '{"prompt": "\u00e9').encode()[:-1],
    ],
    ids=[
        *("a mark of the byte order", "lines of Windows", "gzip", "no last end"),
        *("a cut last line", "a cut letter"),
    ],
)
def test_a_file_may_be_written_in_several_ways(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "log.jsonl"
    file.write_bytes(content)
    log = read_log(file, "openai", None)
    assert shape(log) == [("a", 0, 100, [(20, 30, 3.0), (30, 0, 0.0)])]
    is_cut = not content.rstrip().endswith(b"}") and not content.startswith(b"\x1f")
    assert ("1 last lines that are cut are left out." in log.assumptions) is is_cut


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({**GOOD[0], "session_id": None}, "line 3: session_id: is missing"),
        ({**GOOD[0], "usage": None}, "line 3: usage.prompt_tokens: is missing"),
        (request("a", 0, 5, 1.0, 2.0), "line 3: prompt_tokens: must be at least 1, is 0"),
        (request("a", -1, 5, 1.0, 2.0), "line 3: usage.prompt_tokens: must be greater than"),
        (request("a", True, 5, 1.0, 2.0), "line 3: usage.prompt_tokens: must be a number"),
        (request("a", 10, 5, 2.0, 1.0), "line 3: ended_at: must not be before started_at"),
        (request("a", 10, 5, float("nan"), 1.0), "line 3: started_at: must be a finite number"),
        ({**GOOD[0], "started_at": "noon"}, "line 3: started_at: must be unix seconds, or a time"),
        ([GOOD[0]], "line 3: must be a JSON object"),
    ],
)
def test_a_line_that_cannot_be_read_names_its_field(tmp_path: Path, line: Any, says: str) -> None:
    with pytest.raises(TraceFileError, match=says):
        read_log(lines(tmp_path, GOOD[1], line), "openai", None)


def test_a_log_without_an_answer_says_what_was_left_out(tmp_path: Path) -> None:
    file = lines(tmp_path, {"status": "failure"}, {"status": "failure"})
    with pytest.raises(TraceFileError, match="sampled a token; left out: 2 failed requests"):
        read_log(file, "openai", None)


def trace(name: str, *calls: tuple[int, int, int, float, float], **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "task": {"type": "T", "key": "k", "data": {}},
        "calls": [
            {
                "usage": {
                    "prompt_tokens": new,
                    "cached_input_tokens": cached,
                    "completion_tokens": sampled,
                },
                "time": {"start": start, "end": end},
            }
            for new, cached, sampled, start, end in calls
        ],
        **more,
    }


def test_traces_of_prime_rl_and_episodes_of_verifiers_are_read(tmp_path: Path) -> None:
    first = trace(
        "x",
        (50, 0, 10, 0.0, 1.0),
        (20, 60, 5, 3.0, 4.0),
        rewards={"r": {"score": 0.5, "weight": 2.0}},
    )
    second = trace("y", (50, 0, 7, 0.0, 1.0), stop_condition="max_output_tokens")
    log = read_log(lines(tmp_path, first, {"traces": [second]}), "prime-rl", None)
    assert shape(log) == [("k", 0, 50, [(10, 20, 2.0), (5, 0, 0.0)]), ("k", 1, 50, [(7, 0, 0.0)])]
    assert [(work.reward, work.censored) for work in log.works] == [(1.0, False), (None, True)]
    assert (log.way, log.recorded[0].system, log.recorded[0].makespan_s) == (
        "sticky",
        "sticky",
        4.0,
    )
    with pytest.raises(TraceFileError, match=r"line 3: id: 'x' is on an earlier line"):
        read_log(lines(tmp_path, first, first), "prime-rl", None)


def test_calls_without_times_have_tools_that_take_none(tmp_path: Path) -> None:
    """A call that was not timed has zeros, or nothing, where others have the time of day."""
    day_s = 1_700_000_000.0
    row = trace("x", (50, 0, 10, day_s, day_s + 1), (90, 0, 5, 0.0, 0.0), (120, 0, 5, day_s, 0.0))
    row["calls"][1]["time"] = None
    row["calls"].append({"usage": None})
    log = read_log(lines(tmp_path, row, trace("failed")), "prime-rl", None)
    assert shape(log) == [("k", 0, 50, [(10, 30, 0.0), (5, 25, 0.0), (5, 0, 0.0)])]
    assert not log.recorded
    told = " ".join(log.assumptions)
    assert "2 requests have no times" in told
    nothing = "1 requests that sampled no token, 1 trajectories without a request are left out."
    assert nothing in told


def test_a_step_is_not_compared_where_trajectories_lack_their_begin(tmp_path: Path) -> None:
    """A begin that is missing is not 0 on the clock of the others."""
    row = {
        "prompt_id": "p",
        "prompt_tokens": 5,
        "censored": None,
        "steps": [{"gen_tokens": 5, "obs_tokens": 0, "tool_latency_s": 0.0, "text": None}],
    }
    timed = {**row, "sample": 0, "started_s": 1_700_000_000.0, "finished_s": 1_700_000_005.0}
    late = {**row, "sample": 1, "started_s": None, "finished_s": 1_700_000_009.0}
    assert not read_log(lines(tmp_path, timed, late), "jsonl", None).recorded
    backwards = {**timed, "finished_s": 1_699_999_999.0}
    with pytest.raises(TraceFileError, match="line 1: finished_s: must not be before started_s"):
        read_log(lines(tmp_path, backwards), "jsonl", None)


def test_samples_of_slime_have_turns_where_their_loss_mask_changes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    turns = {
        "tokens": list(range(20)),
        "response_length": 15,
        "loss_mask": [0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1],
        "group_index": 4,
        "status": "truncated",
        "reward": 1,
        "non_generation_time": 3.0,
    }
    single = {
        "tokens": [1, 2, 3],
        "response_length": 2,
        "loss_mask": None,
        "group_index": 4,
        "reward": {"a": 1},
    }
    unsampled = {"tokens": [1, 2, 3], "response_length": 0, "group_index": 5}
    file = tmp_path / "rollout_7.pt"
    torch.save({"rollout_id": 7, "samples": [turns, single, unsampled]}, file)
    log = read_log(file, "slime", None)
    assert shape(log) == [
        ("group-4", 0, 6, [(4, 3, 1.5), (2, 2, 1.5), (3, 0, 0.0)]),
        ("group-4", 1, 1, [(2, 0, 0.0)]),
    ]
    assert [(work.censored, work.reward) for work in log.works] == [(True, 1.0), (False, None)]
    assert log.way == "slime" and not log.recorded
    assert "1 samples that sampled no token are left out." in log.assumptions
    step = step_of(tmp_path, "--from-log", str(file), "--format", "slime", *ENGINES)["step"]
    assert (step["baseline"], step["recorded"]) == ("slime", [])
    torch.save({"samples": [{**turns, "loss_mask": [1]}]}, file)
    with pytest.raises(
        TraceFileError, match=r"line 1: loss_mask: must have response_length \(15\) values, has 1"
    ):
        read_log(file, "slime", None)
    torch.save({"samples": [{**single, "response_length": 4}]}, file)
    with pytest.raises(TraceFileError, match="response_length: must be at most the number of tok"):
        read_log(file, "slime", None)
    torch.save({"samples": [{**turns, "metadata": Path("x")}]}, file)
    with pytest.raises(UsageProblem, match="holds plain values alone"):
        read_log(file, "slime", None)


def test_texts_of_verl_are_counted_by_the_models_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    row = {"input": "a b", "output": "a a b", "gts": None, "score": 0.5, "step": 3}
    file = lines(tmp_path, row, {**row, "output": "b"}, {**row, "input": "a"})
    log = read_log(file, "verl", tmp_path)
    assert shape(log) == [
        ("prompt-0", 0, 2, [(4, 0, 0.0)]),
        ("prompt-0", 1, 2, [(2, 0, 0.0)]),
        ("prompt-1", 0, 1, [(4, 0, 0.0)]),
    ]
    assert log.way == "verl" and "neither turns nor seconds" in log.assumptions[0]
    with pytest.raises(UsageProblem, match="--format verl needs --tokenizer"):
        read_log(file, "verl", None)
    with pytest.raises(UsageProblem, match="--tokenizer is for --format verl"):
        read_log(file, "jsonl", tmp_path)


def step_of(folder: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["simulate", *options, "--json", "--out", str(folder)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def work(prompt: str, sample: int, turns: Sequence[int], **more: Any) -> dict[str, Any]:
    steps = [{"gen_tokens": tokens, "obs_tokens": 10, "tool_latency_s": 0.5} for tokens in turns]
    return {"prompt_id": prompt, "sample": sample, "prompt_tokens": 50, "steps": steps, **more}


def test_a_logged_step_is_compared_with_what_the_log_says_of_it(tmp_path: Path) -> None:
    times = {"started_s": 5.0, "finished_s": 9.0}
    works = [work(f"p{n % 3}", n // 3, [200, 300 + 500 * (n % 3)], **times) for n in range(9)]
    found = step_of(
        tmp_path, "--from-log", str(lines(tmp_path, *works)), "--baseline", "slime", *ENGINES
    )
    step, rows = found["step"], {row["system"]: row["makespan_s"] for row in found["systems"]}
    assert (step["baseline"], step["baseline_s"], step["treadle_s"]) == (
        "slime",
        rows["slime"],
        rows["treadle"],
    )
    assert step["ratio"] == pytest.approx(rows["slime"] / rows["treadle"])
    assert step["bound_s"] == found["bound"]["lower_s"] <= step["treadle_s"]
    assert step["recorded"] == [{"name": "the log", "recorded_s": 4.0, "simulated_s": None}]
    assert found["predictor"] == "siblings"
    assert any("give yours with --llm" in each for each in step["assumptions"])
    assert (
        found["told"][0].startswith("On log.jsonl slime takes")
        and f"Assumed: {step['assumptions'][0]}" in found["told"]
    )
    assert (Path(found["folder"]) / "simulate.png").is_file()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("coding", "--from-run", "x"), "takes one of WORKLOAD, --from-run and --from-log"),
        (("--from-run", "x"), "x/summary.json does not exist"),
        (("--from-log", "x"), "--from-log x: No such file"),
        (("--from-log", "x", "--format", "csv"), "--format: there is no 'csv'; take one of jsonl"),
        (("--from-log", "x", "--prompts", "3"), "a logged step is replayed as it is"),
        (("--baseline", "slime"), "--baseline says how a logged step was run"),
        (
            ("--from-log", "x", "--baseline", "best"),
            "--baseline: there is no 'best'; take one of verl",
        ),
    ],
)
def test_what_does_not_go_together_is_said(
    tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    result = CliRunner().invoke(app, ["simulate", *options, "--out", str(tmp_path)])
    assert result.exit_code == 2 and says in " ".join(result.stderr.split()), result.output


PREFILL_S, TOKEN_S = 0.05, 0.03
WAVE_S = PREFILL_S + 100 * TOKEN_S


def played() -> Run:
    """A run of the demo: four pinned trajectories of 101 tokens on one engine of two slots, two
    after two."""
    waves = [index // 2 for index in range(4)]
    records = tuple(
        trajectory(
            "pinned-fcfs",
            f"p{index}",
            0,
            101,
            (wave + 1) * WAVE_S,
            span("prefill", wave * WAVE_S, wave * WAVE_S + PREFILL_S),
            span("decode", wave * WAVE_S + PREFILL_S, (wave + 1) * WAVE_S),
        )
        for index, wave in enumerate(waves)
    )
    play = PlayRecord("pinned-fcfs", "Pinned FCFS", "first come first served", 2 * WAVE_S)
    return Run(replace(small_run().record, engines=("engine-0",), plays=(play,)), records)


def test_a_run_is_simulated_on_engines_as_fast_as_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "20260101-000000-abcd"
    folder.mkdir()
    write_run(folder, played())
    log = read_run_log(folder)
    assert log.model is not None and log.gpus == 1
    assert log.model.curve.decode_s(2.0) == pytest.approx(TOKEN_S)
    assert log.model.curve.prefill_s(2, 0) == pytest.approx(PREFILL_S)
    found = step_of(tmp_path, "--from-run", str(folder))
    [recorded] = found["step"]["recorded"]
    assert recorded["recorded_s"] == pytest.approx(2 * WAVE_S)
    assert recorded["simulated_s"] == pytest.approx(2 * WAVE_S, rel=0.05), (
        "verl's rule on those engines takes as long"
    )
    assert found["gpus"] == 1
