"""Draw a snapshot for a terminal of 80 columns or more: engines, moves and rollouts whole, and as
many of the longest trajectories as fit.

Whatever comes from the mesh is printed as plain text: no name of a prompt can change the terminal.
"""

import math
from collections.abc import Sequence
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from treadle_cli.report.palette import COLOURS, printable
from treadle_cli.top.snapshot import EngineRow, MoveRow, RolloutRow, Snapshot, TrajectoryRow

BAR = 6  # characters
VERSION = 8  # last characters of a weight version
MOST = 24  # last characters of a name in a row of several
SHOWN_ENGINES, SHOWN_ROLLOUTS, SHOWN_MOVES = 12, 3, 4
HEALTH_STYLES = {"ok": "green", "lost": "bold red"}  # else yellow
UNKNOWN = "–"
OLD_S = 3.0  # age from which trajectories are marked as such
NO_ROLLOUT = "(no rollout)"


class Screen:
    """A snapshot as something that rich prints, as high as the terminal."""

    def __init__(self, snapshot: Snapshot, silent_s: float = 0.0) -> None:
        """Draw a snapshot. silent_s: for how long the scheduler has not answered; 0: it has."""
        self._snapshot, self._silent_s = snapshot, silent_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = options.height or console.height
        yield Group(*self._parts(height))

    def _parts(self, height: int) -> list[Text | Table]:
        shot = self._snapshot
        parts: list[Text | Table] = [self._headline(), Text("")]
        parts.append(_engines(shot.engines[:SHOWN_ENGINES]))
        parts += _more(len(shot.engines) - SHOWN_ENGINES, "engines")
        if shot.rollouts:
            parts += [Text(""), _rollouts(shot.rollouts[:SHOWN_ROLLOUTS])]
        if shot.moves:
            parts += [Text(""), _moves(shot.moves[:SHOWN_MOVES])]
        used = sum(
            part.row_count + 1 if isinstance(part, Table) else part.plain.count("\n") + 1
            for part in parts
        )
        # a blank line, the heading, how many more there are, and the cursor's line
        room = max(1, height - used - 4)
        parts += [Text(""), _trajectories(shot.trajectories[:room])]
        parts += _more(len(shot.trajectories) - room, "trajectories")
        return parts

    def _headline(self) -> Text:
        shot = self._snapshot
        age = f" {shot.age_s:.0f} s ago" if shot.age_s >= OLD_S else ""
        healthy = sum(engine.health == "ok" for engine in shot.engines)
        text = Text.assemble(
            ("treadle top ", "bold"),
            f"{shot.scheduler}  {healthy}/{len(shot.engines)} engines ok, ",
            f"{len(shot.trajectories)} trajectories open{age}\n",
            f"{shot.tokens_per_s:,.0f} tok/s, {shot.trajectories_per_minute:,.0f} "
            f"trajectories/min; {shot.policy}",
        )
        if self._silent_s:
            text.append(
                f"\nno answer for {self._silent_s:.0f} s: this is what was known before", "bold red"
            )
        return text


def _more(count: int, what: str) -> list[Text]:
    return [Text(f"  and {count} more {what}", "dim")] if count > 0 else []


def _table(*columns: str, left: Sequence[int] = (0,)) -> Table:
    """Return a table whose first column gets shorter where there is no room for all."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for index, name in enumerate(columns):
        heading = Text(name, no_wrap=True, overflow="ellipsis")
        justify: Literal["left", "right"] = "left" if index in left else "right"
        table.add_column(heading, justify=justify, no_wrap=index > 0, overflow="ellipsis")
    return table


def _name(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _engines(engines: Sequence[EngineRow]) -> Table:
    table = _table(
        "engine",
        "batch",
        "",
        "queue",
        "KV",
        "",
        "tok/s",
        "traj",
        "weights",
        "health",
        left=(0, 2, 5, 8, 9),
    )
    for each in engines:
        table.add_row(
            _name(each.engine_id),
            f"{each.running}/{each.slots}",
            _bar(each.running / each.slots if each.slots else math.nan, COLOURS["decode"]),
            Text(str(each.waiting), COLOURS["queue"] if each.waiting else ""),
            UNKNOWN if math.isnan(each.kv_share) else f"{each.kv_share:.0%}",
            _bar(each.kv_share, COLOURS["prefill"]),
            f"{each.tokens_per_s:,.0f}",
            str(each.trajectories),
            Text(printable(each.weight_version)[-VERSION:]),
            Text(each.health, HEALTH_STYLES.get(each.health, "yellow")),
        )
    return table


def _rollouts(rollouts: Sequence[RolloutRow]) -> Table:
    table = _table("rollout", "ended", "", "running", "straggler tax", left=(0, 2))
    for each in rollouts:
        tax = (
            "not yet: a tenth is to end"
            if math.isnan(each.straggler_tax)
            else f"{each.straggler_tax:.0%}"
        )
        table.add_row(
            _name(each.rollout_id or NO_ROLLOUT),
            f"{each.done}/{each.total}",
            _bar(each.done / each.total, COLOURS["tool"]),
            f"{each.running_s:,.0f} s",
            tax,
        )
    return table


def _moves(moves: Sequence[MoveRow]) -> Table:
    table = _table("move", "from", "to", "state", "s", left=(0, 1, 2, 3))
    for each in moves:
        ends = (each.source[-MOST:], each.target[-MOST:], each.state)
        table.add_row(_name(each.trajectory_id), *map(Text, ends), f"{each.seconds:.1f}")
    return table


def _trajectories(rows: Sequence[TrajectoryRow]) -> Table:
    table = _table(
        "longest remaining", "engine", "turn", "tokens", "left", "state", "moves", left=(0, 1, 5)
    )
    for each in rows:
        table.add_row(
            _name(f"{printable(each.prompt_id)[-MOST:]} #{each.sample}"),
            Text(each.engine_id[-MOST:] or UNKNOWN),
            str(each.turn),
            f"{each.gen_tokens:,}",
            UNKNOWN if math.isnan(each.left_tokens) else f"{each.left_tokens:,.0f}",
            Text(each.state),
            str(each.migrations),
        )
    return table


def _bar(share: float, colour: str) -> Text:
    if math.isnan(share):
        return Text("")
    full = min(BAR, max(0, round(share * BAR)))
    return Text.assemble(("━" * full, colour), ("─" * (BAR - full), COLOURS["other"]))
