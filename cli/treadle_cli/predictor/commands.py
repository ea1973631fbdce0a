"""The commands of `treadle predictor`: options in, exit codes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from treadle_cli import exits
from treadle_cli.mesh.engines import DEFAULT_MODEL, default_model_folder
from treadle_cli.predictor.bars import bars
from treadle_cli.predictor.ending import ending
from treadle_cli.problems import UsageProblem

DEFAULT_BACKBONE = "Qwen/Qwen3-0.6B"  # Heddle 4.1; treadle_learned.backbone says the same, and would import torch

commands = typer.Typer(no_args_is_help=True, help="Learn from ended trajectories how long running ones will be.")
out = Console()

Sources = Annotated[list[Path], typer.Argument(help="Trace files (docs/traces.md), folders of runs (runs/<id>).")]
Transcripts = Annotated[Path, typer.Argument(help="What harvest wrote, or a trace file (docs/traces.md).")]
CheckpointFolder = Annotated[Path, typer.Argument(help="Folder that train wrote.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Version = Annotated[str, typer.Option(help="Its name in predictions; the folder's own where it is not given.")]


@commands.command()
def harvest(
    sources: Sources,
    out_file: Annotated[Path, typer.Option("--out", help="File to write; gzip where the name ends in .gz.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with the tokenizer.json of a run's model, where that is elsewhere."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Gather trajectories of all sources into one file to train on."""
    from treadle_cli.predictor.harvest import harvest as gather

    with ending():
        found = gather(sources, out_file, tokenizer)
        if as_json:
            typer.echo(json.dumps(found))
        else:
            for name, count in found.items():
                out.print(f"{name:<14} {count:>10,}", highlight=False)


@commands.command()
def train(
    transcripts: Transcripts,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder to write; nothing may be there yet.")],
    version: Version = "",
    backbone: Annotated[
        str,
        typer.Option(
            help="Folder or hub name of the decoder that reads the texts; "
            f'{DEFAULT_MODEL}: that of the demo; "" to learn from numbers alone.'
        ),
    ] = DEFAULT_BACKBONE,
    tune: Annotated[str, typer.Option(help="frozen: the head alone; lora, full: the backbone with it.")] = "frozen",
    seed: Annotated[int, typer.Option(min=0, help="Of the split by prompt, the drawing and the fits.")] = 0,
    epochs: Annotated[int, typer.Option(min=0, help="At most; 0: 200 of the head, 3 of a backbone.")] = 0,
    max_tuples: Annotated[int, typer.Option(min=0, help="Draw trajectories with at most so many; 0: all.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Fit a predictor and compare it with the estimators without a model, on prompts that it was not fitted to."""
    with ending():
        from treadle_learned.backbone import Tune
        from treadle_learned.training import Training
        from treadle_learned.training import train as fit

        from treadle_cli.predictor.sources import read_source

        if tune not in list(Tune):
            raise UsageProblem(f"--tune must be {', '.join(Tune)}, is {tune!r}")
        read = read_source(transcripts)
        with_text = any(transcript.has_text for transcript in read)
        out_folder = out_folder.absolute().resolve()  # "." has no name
        how = Training(
            version=version or out_folder.name,
            backbone=_backbone(backbone) if with_text else "",
            tune=Tune(tune),
            seed=seed,
            epochs=epochs,
            max_tuples=max_tuples,
        )
        with bars(exits.err) as bar:
            _quiet()
            found = fit(read, how, out_folder, bar=bar)
        if as_json:
            said: dict[str, Any] = {"version": found.version, "leads": found.leads, **found.notes}
            typer.echo(json.dumps(said))
            return
        for name, loss in sorted(found.notes["validation"].items(), key=lambda each: each[1]):
            out.print(f"{name:<10} validation loss {loss:.4f}", highlight=False)
        out.print(f"{out_folder}: {_verdict(found.leads, found.reads_text)}", highlight=False, soft_wrap=True)


@commands.command()
def evaluate(checkpoint: CheckpointFolder, transcripts: Transcripts, as_json: AsJson = False) -> None:
    """Score a predictor, siblings and history on the test prompts, which no training looks at."""
    with ending():
        from treadle_cli.predictor.evaluation import evaluated, table
        from treadle_cli.predictor.sources import read_source

        read = read_source(transcripts)
        with bars(exits.err) as bar:
            _quiet()
            found = evaluated(checkpoint, transcripts.name, read, bar)
        if as_json:
            typer.echo(json.dumps(found))
        else:
            out.print(table(found))


@commands.command()
def export(
    checkpoint: CheckpointFolder,
    models: Annotated[Path, typer.Option(help="Folder of versions that a predictor service reads.")],
    version: Version = "",
) -> None:
    """Copy a predictor into a folder of versions, and make it the one in use."""
    with ending():
        from treadle_learned.checkpoint import ModelsFolder

        folder = ModelsFolder(models).add(checkpoint, version)
        out.print(f"{folder} is in use", highlight=False, soft_wrap=True)


def _backbone(named: str) -> str:
    if named != DEFAULT_MODEL:
        return named
    folder = default_model_folder()
    if not folder.exists():
        raise UsageProblem(f"{folder} is not there yet: `treadle demo` makes it; or pass --backbone FOLDER or NAME")
    return str(folder)


def _verdict(leads: bool, reads_text: bool) -> str:
    reads = "reads texts and numbers" if reads_text else "reads numbers alone"
    return f"{reads}; it is {'better' if leads else 'no better'} than what siblings and history say"


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
