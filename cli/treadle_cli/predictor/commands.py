"""Define the commands of `treadle predictor`: harvest, train, evaluate, export.

The imports of torch stand in the functions, so that the other commands need no torch.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from treadle_cli import exits
from treadle_cli.exits import Terminal, UsageProblem, cell
from treadle_cli.mesh.engines import DEFAULT_MODEL, default_model_folder

if TYPE_CHECKING:
    from rich.table import Table
    from treadle_learned.transcript import Transcript

DEFAULT_BACKBONE = (
    "Qwen/Qwen3-0.6B"  # Heddle 4.1; treadle_learned.backbone has the same, and would import torch
)

# columns of the table of evaluate
COLUMNS = ("recall_top10", "pearson", "pearson_log", "pinball", "coverage_80")
Track = Callable[[Iterable[int], int], Iterable[int]]
Bar = Callable[[str], Track]  # the same as in treadle_learned.examples

predictor = typer.Typer(
    name="predictor",
    no_args_is_help=True,
    help="Learn from ended trajectories how long running ones will be.",
)
out = Terminal()

Sources = Annotated[
    list[Path], typer.Argument(help="Trace files (docs/traces.md), folders of runs (runs/<id>).")
]
Transcripts = Annotated[
    Path, typer.Argument(help="What harvest wrote, or a trace file (docs/traces.md).")
]
CheckpointFolder = Annotated[Path, typer.Argument(help="Folder that train wrote.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Version = Annotated[
    str, typer.Option(help="Its name in predictions; the folder's own where it is not given.")
]


@predictor.command()
def harvest(
    sources: Sources,
    out_file: Annotated[
        Path, typer.Option("--out", help="File to write; gzip where the name ends in .gz.")
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the tokenizer.json of a run's model, where that is elsewhere."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Gather trajectories of all sources into one file to train on."""
    from treadle_cli.predictor.transcripts import harvest as gather

    with exits.end_with_one_line():
        found = gather(sources, out_file, tokenizer)
        if as_json:
            typer.echo(json.dumps(found))
        else:
            for name, count in found.items():
                out.print(f"{name:<14} {count:>10,}", highlight=False)


@predictor.command()
def train(
    transcripts: Transcripts,
    out_folder: Annotated[
        Path, typer.Option("--out", help="Folder to write; nothing may be there yet.")
    ],
    version: Version = "",
    backbone: Annotated[
        str,
        typer.Option(
            help="Folder or hub name of the decoder that reads the texts; "
            f'{DEFAULT_MODEL}: that of the demo; "" to learn from numbers alone.'
        ),
    ] = DEFAULT_BACKBONE,
    tune: Annotated[
        Literal["frozen", "lora", "full"],
        typer.Option(help="frozen: the head alone; lora, full: the backbone with it."),
    ] = "frozen",
    seed: Annotated[
        int, typer.Option(min=0, help="Of the split by prompt, the drawing and the fits.")
    ] = 0,
    epochs: Annotated[
        int, typer.Option(min=0, help="At most; 0: 200 of the head, 3 of a backbone.")
    ] = 0,
    max_tuples: Annotated[
        int, typer.Option(min=0, help="Draw trajectories with at most so many; 0: all.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Fit a predictor and compare it with the estimators without a model, on prompts that it was
    not fitted to."""
    with exits.end_with_one_line():
        from treadle_learned.backbone import Tune
        from treadle_learned.training import Training
        from treadle_learned.training import train as fit

        from treadle_cli.predictor.transcripts import read_source

        read = read_source(transcripts)
        if not any(transcript.has_text for transcript in read):
            backbone = ""
        elif backbone == DEFAULT_MODEL:
            backbone = str(default_model_folder())
            if not Path(backbone).exists():
                raise UsageProblem(
                    f"{backbone} is not there yet: `treadle demo` makes it; or pass --backbone "
                    "FOLDER or NAME"
                )
        out_folder = out_folder.absolute().resolve()  # "." has no name
        how = Training(
            version=version or out_folder.name,
            backbone=backbone,
            tune=Tune(tune),
            seed=seed,
            epochs=epochs,
            max_tuples=max_tuples,
        )
        with _bars(exits.err) as bar:
            found = fit(read, how, out_folder, bar=bar)
        if as_json:
            typer.echo(json.dumps({"version": found.version, "leads": found.leads, **found.notes}))
            return
        for name, loss in sorted(found.notes["validation"].items(), key=lambda each: each[1]):
            out.print(f"{name:<10} validation loss {loss:.4f}", highlight=False)
        reads = "texts and numbers" if found.reads_text else "numbers alone"
        verdict = (
            f"it is {'better' if found.leads else 'no better'} than what siblings and history say"
        )
        out.print(f"{out_folder}: reads {reads}; {verdict}", highlight=False, soft_wrap=True)


@predictor.command()
def evaluate(
    checkpoint: CheckpointFolder, transcripts: Transcripts, as_json: AsJson = False
) -> None:
    """Score a predictor, siblings and history on the test prompts, which no training looks at."""
    with exits.end_with_one_line():
        from treadle_cli.predictor.transcripts import read_source

        read = read_source(transcripts)
        with _bars(exits.err) as bar:
            found = evaluate_checkpoint(checkpoint, transcripts.name, read, bar)
        if as_json:
            typer.echo(json.dumps(found))
        else:
            out.print(_table(found))


@predictor.command()
def export(
    checkpoint: CheckpointFolder,
    models: Annotated[
        Path, typer.Option(help="Folder of versions that a predictor service reads.")
    ],
    version: Version = "",
) -> None:
    """Copy a predictor into a folder of versions, and make it the one in use."""
    with exits.end_with_one_line():
        from treadle_learned.checkpoint import ModelsFolder

        folder = ModelsFolder(models).add(checkpoint, version)
        out.print(f"{folder} is in use", highlight=False, soft_wrap=True)


def evaluate_checkpoint(
    checkpoint: Path, name: str, transcripts: "Sequence[Transcript]", bar: Bar
) -> dict[str, Any]:
    """Return rows of `treadle_learned.scores` for learned, siblings and history on the test
    prompts, with the training prompts as history. Raises LearnedError."""
    import numpy as np
    from treadle_learned.checkpoint import load
    from treadle_learned.examples import Part, split
    from treadle_learned.head import remaining_tokens
    from treadle_learned.moments import replay
    from treadle_learned.scores import STEPS, Asked, PromptAverage, forecasts, rows
    from treadle_learned.transcript import LearnedError

    found = load(checkpoint)
    parts = split(transcripts, int(found.notes.get("seed", 0)))
    tested, earlier = parts[Part.TEST], parts[Part.TRAIN]
    moments = replay(tested, earlier, asked=lambda turn: turn in STEPS)
    if not moments:
        raise LearnedError(
            f"{name}: holds no test prompt (of 4 prompts one is): harvest more rollouts"
        )
    asked = found.examples(moments, tested, bar("reading"))
    answers = {
        "learned": remaining_tokens(found.head, asked),
        "siblings": forecasts(moments),
        "history": PromptAverage(earlier).predict(moments),
    }
    return {
        "version": found.version,
        "leads": found.leads,
        "validation": found.notes.get("validation", {}),
        "test": {"prompts": len({each.prompt_id for each in tested}), "trajectories": len(tested)},
        "rows": rows(name, Asked(moments, tested, answers, np.zeros(len(moments), np.int64))),
    }


def _table(found: dict[str, Any]) -> "Table":
    from rich.table import Table

    drawn = Table(
        title=cell(f"{found['version']} on {found['test']['prompts']} test prompts, 95% intervals")
    )
    for column in ("step", "trajectories", "estimator", *COLUMNS):
        drawn.add_column(column, justify="left" if column == "estimator" else "right")
    for row in found["rows"]:
        intervals = [(name, row[f"{name}_interval"]) for name in COLUMNS]
        scores = [f"{row[name]:.2f} [{low:.2f}, {high:.2f}]" for name, (low, high) in intervals]
        named = str(row["step"]), str(row["trajectories"]), cell(row["estimator"])
        drawn.add_row(*named, *map(cell, scores))
    return drawn


@contextmanager
def _bars(console: Console) -> Iterator[Bar]:
    """Show progress bars on stderr, that may stand inside each other, in place of those of
    transformers; a bar disappears when it is done."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from transformers.utils import logging

    logging.disable_progress_bar()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console
    ) as progress:

        def bar(words: str) -> Track:
            def track(over: Iterable[int], count: int) -> Iterable[int]:
                if count:
                    task = progress.add_task(words, total=count)
                    try:
                        yield from progress.track(over, task_id=task)
                    finally:
                        progress.remove_task(task)

            return track

        yield bar
