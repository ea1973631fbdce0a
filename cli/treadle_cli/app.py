"""Find the commands of `treadle`: COMMANDS names the module of each one, which is imported only
when somebody uses the command.

Options that several commands share are in `options.py`, exit codes in `exits.py`.
"""

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

# Module of each command below `treadle_cli`, which has a function (or a Typer with subcommands) of
# the command's name, and the line that `treadle --help` shows.
COMMANDS = {
    "demo": ("demo.command", "Compare Treadle with first come, first served on this machine."),
    "rollout": ("demo.command", "Run the demo's work once on a mesh that is running."),
    "up": ("up", "Run a whole mesh on this machine, or on a Ray cluster."),
    "down": ("up", "End the mesh of a Ray cluster; its engines go on as they were."),
    "attach": ("attach", "Put sidecars beside SGLang servers that somebody else started."),
    "apply": ("apply", "Change the engines of a running mesh to a resource plan."),
    "drain": ("drain", "Empty an engine of a running mesh, so that it can be stopped."),
    "doctor": ("doctor.command", "Check this machine, SGLang servers and a mesh."),
    "top": ("top", "Show a mesh while it runs."),
    "explain": ("explain", "Show where the time of a trajectory went, and why."),
    "shaping": ("shaping", "Show what shaping does to the distribution that is trained on."),
    "trace": ("trace", "Draw the report of a finished run again, or export the run."),
    "simulate": ("simulate.command", "Compare systems on simulated engines, without a GPU."),
    "fit": ("fit", "Fit an engine's curve to what was measured on it."),
    "predictor": ("predictor.commands", "Learn from ended trajectories how long others will be."),
    "certs": ("certs", "Make certificates for all parts of a mesh and for its clients."),
}
PASS_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": False}
TAKES_FLAGS = {"demo", "up"}  # arguments after -- go to SGLang
PLAIN: dict[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}


def load_command(name: str) -> Any:
    """Import a command of COMMANDS, and return it with its options."""
    found = getattr(importlib.import_module(f"treadle_cli.{COMMANDS[name][0]}"), name)
    if isinstance(found, typer.Typer):
        return typer.main.get_group(found)
    alone = typer.Typer(add_completion=False, **PLAIN)
    alone.command(name, context_settings=PASS_FLAGS if name in TAKES_FLAGS else None)(found)
    return typer.main.get_command(alone)


class Commands(TyperGroup):
    """All commands by name: each has only its line of help until somebody uses it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        lines = {name: TyperCommand(name, help=line) for name, (_, line) in COMMANDS.items()}
        self.commands = {**lines, **self.commands}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the name, the command and the arguments that are left for it."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else command, rest


app = typer.Typer(cls=Commands, no_args_is_help=True, callback=lambda: None, **PLAIN)


class _Untouched(TyperCommand):
    """Command that receives its arguments unchanged: click would remove the first "--"."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = list(args)
        return args


# The command of the distribution treadle-bench reads all arguments, --help too.
@app.command(cls=_Untouched, add_help_option=False)
def bench(ctx: typer.Context) -> None:
    """Measure a figure on this machine. Needs the distribution treadle-bench: pip install
    ./research"""
    from importlib.metadata import entry_points

    from treadle_cli import exits

    commands = entry_points(group="treadle.commands", name="bench")
    if not commands:
        exits.end(
            exits.UsageProblem(
                "treadle bench is a distribution of its own: run pip install ./research in a "
                "checkout"
            )
        )
    for command in commands:
        typer.main.get_command(command.load())(ctx.args, prog_name=ctx.command_path)
