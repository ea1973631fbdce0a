"""Define the options of `treadle simulate`."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle_cli import exits
from treadle_cli.exits import Terminal, UsageProblem
from treadle_cli.options import (
    DEFAULT_OUT,
    MOST_GPUS,
    Accelerator,
    AsJson,
    Llm,
    Out,
    Profile,
    Seed,
    SimulatedSlots,
    complete_from,
    new_run_folder,
)

if TYPE_CHECKING:
    from treadle_cli.simulate.logs import Log

DEFAULT_WORKLOAD, DEFAULT_GPUS = "coding", 8
NAMED_SYSTEMS = (
    *("verl", "sticky", "verl*", "slime", "affinity-las", "pausing", "heddle", "treadle", "oracle"),
    "treadle-homogeneous",
)


def simulate(
    workload: Annotated[
        str,
        typer.Argument(
            help="coding, search, math, or a trace file (docs/traces.md).",
            autocompletion=complete_from("coding", "search", "math"),
        ),
    ] = "",
    from_run: Annotated[
        Path | None,
        typer.Option(
            help="Instead: a finished run, runs/<id>, on engines as fast as its own were."
        ),
    ] = None,
    from_log: Annotated[
        Path | None,
        typer.Option(help="Instead: what your framework has logged of a step (docs/simulator.md)."),
    ] = None,
    log_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="Of --from-log: jsonl, openai, prime-rl, slime or verl.",
            autocompletion=complete_from("jsonl", "openai", "prime-rl", "slime", "verl"),
        ),
    ] = "jsonl",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Of --format verl: the folder of the model's tokenizer.json."),
    ] = None,
    baseline: Annotated[
        str,
        typer.Option(
            help="System that stands for how your step was run; by default as the log's format "
            "says.",
            autocompletion=complete_from(*NAMED_SYSTEMS),
        ),
    ] = "",
    llm: Llm = "Qwen3-14B",
    accelerator: Accelerator = "H200",
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_GPUS, help="Accelerators of each system; 8, or as many as the run had."
        ),
    ] = None,
    slots: SimulatedSlots = 100,
    prompts: Annotated[
        int | None,
        typer.Option(
            min=1, help="50 of a named workload; a trace file is resampled where this is given."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Trajectories of each prompt; 16.")
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(
            help="With commas between: verl, sticky, verl*, slime, affinity-las, pausing, heddle, "
            "treadle, oracle (these all by default), treadle-homogeneous.",
            autocompletion=complete_from(*NAMED_SYSTEMS),
        ),
    ] = None,
    degrees: Annotated[
        str, typer.Option(help="GPUs an engine: best of each system, or 1, 2, 4, 8 of all.")
    ] = "best",
    predictor: Annotated[
        str,
        typer.Option(
            help="Of Heddle and Treadle: noisy, siblings, prompt-mean, oracle or blind. By "
            "default noisy, and siblings "
            "for a logged step, which is what the mesh knows without any training.",
            autocompletion=complete_from("noisy", "siblings", "prompt-mean", "oracle", "blind"),
        ),
    ] = "",
    seed: Seed = 0,
    repeats: Annotated[
        int, typer.Option(min=1, help="Seeds, from --seed on; figures are medians.")
    ] = 1,
    profile: Profile = None,
    out_folder: Out = DEFAULT_OUT,
    as_json: AsJson = False,
) -> None:
    """Compare systems on simulated engines: no engine, no GPU, seconds to an answer. With
    --from-run or --from-log: what would Treadle have won on your last step?

    Prints a table against every baseline and the lower bound, and writes a picture of it to a
    folder under --out.
    """
    from treadle_cli.simulate.request import Request
    from treadle_cli.simulate.run import run_simulate

    async def run(_: asyncio.Event) -> int:
        if sum(map(bool, (workload, from_run, from_log))) > 1:
            raise UsageProblem("simulate takes one of WORKLOAD, --from-run and --from-log")
        if (from_run or from_log) and (prompts or samples):
            raise UsageProblem(
                "--prompts, --samples: a logged step is replayed as it is, and not resampled"
            )
        with exits.err.status("reading"):
            log = _read(from_run, from_log, log_format, tokenizer, baseline)
        asked = Request(
            workload=workload or DEFAULT_WORKLOAD,
            llm=llm,
            accelerator=accelerator,
            gpus=gpus or (log.gpus if log else 0) or DEFAULT_GPUS,
            slots=slots,
            prompts=prompts,
            samples=samples,
            systems=systems,
            degrees=degrees,
            predictor=predictor or ("siblings" if log else "noisy"),
            seed=seed,
            repeats=repeats,
            profile=profile,
            log=log,
        )
        make_folder = partial(new_run_folder, out_folder, "simulate-")
        return await run_simulate(asked, make_folder, as_json, Terminal(), exits.err)

    exits.run(run)


def _read(
    from_run: Path | None,
    from_log: Path | None,
    log_format: str,
    tokenizer: Path | None,
    baseline: str,
) -> "Log | None":
    """Return the logged step; None where none was given. Raises UsageProblem, TraceFileError."""
    from treadle_sim.systems import BASELINES

    known = [system.name for system in BASELINES]
    if baseline and baseline not in known:
        raise UsageProblem(f"--baseline: there is no {baseline!r}; take one of {', '.join(known)}")
    if from_log is not None:
        from treadle_cli.simulate.logs import read_log

        log = read_log(from_log, log_format, tokenizer)
    elif from_run is not None:
        from treadle_cli.report.records import RecordError
        from treadle_cli.simulate.run_log import read_run_log

        try:
            log = read_run_log(from_run)
        except RecordError as error:
            raise UsageProblem(f"--from-run: {error}") from None
    elif baseline:
        raise UsageProblem(
            "--baseline says how a logged step was run: give --from-run or --from-log"
        )
    else:
        return None
    return replace(log, way=baseline) if baseline else log
