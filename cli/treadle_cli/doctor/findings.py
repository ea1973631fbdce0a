"""Findings of a check: fine, a warning or a problem, each with what to do about it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from treadle_cli.exits import FAILED, printable
from treadle_cli.options import print_json

OK, WARNING, PROBLEM = "ok", "warning", "problem"
MARKS = {OK: ("✓", "green"), WARNING: ("!", "yellow"), PROBLEM: ("✗", "bold red")}


@dataclass(frozen=True)
class Finding:
    """Result of one check. subject: what was looked at, e.g. "this machine" or an engine's URL.
    check: its short name. says: what was found. do: what to change and why; empty where all is
    fine."""

    subject: str
    check: str
    level: str
    says: str
    do: str = ""


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst level of all; ok for none."""
    levels = [finding.level for finding in findings]
    return next((level for level in (PROBLEM, WARNING) if level in levels), OK)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print a heading for each subject, and a line for each finding; below it what to do."""
    shown = ""
    for finding in findings:
        if finding.subject != shown:
            subject = printable(finding.subject)
            console.print(Text(f"\n{subject}" if shown else subject, "bold"), soft_wrap=True)
            shown = finding.subject
        mark, style = MARKS[finding.level]
        says = printable(f"{finding.check}: {finding.says}")
        line = Text.assemble("  ", (mark, style), f" {says}")
        console.print(line, highlight=False, soft_wrap=True)
        if finding.do:
            console.print(
                Text(f"      {printable(finding.do)}", "dim"), highlight=False, soft_wrap=True
            )


def print_alike(findings: Sequence[Finding], out: Console) -> None:
    """Print findings, those of several servers that are alike as one."""
    alike: defaultdict[Finding, list[str]] = defaultdict(list)  # without its subject
    for finding in findings:
        alike[replace(finding, subject="")].append(finding.subject)
    print_findings(
        [replace(finding, subject=", ".join(subjects)) for finding, subjects in alike.items()], out
    )


def count_levels(findings: Sequence[Finding]) -> str:
    """Return the last line of a report."""
    counts = {level: sum(finding.level == level for finding in findings) for level in MARKS}
    return f"{counts[OK]} ok, {counts[WARNING]} warnings, {counts[PROBLEM]} problems"


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the object that --json prints."""
    return {"worst": worst(findings), "findings": [asdict(finding) for finding in findings]}


def report(findings: Sequence[Finding], json_only: bool, out: Console) -> int:
    """Print the findings; return the exit code, 1 where one is a problem."""
    if json_only:
        print_json(as_json(findings))
    else:
        print_findings(findings, out)
        out.print(f"\n{count_levels(findings)}", highlight=False)
    return FAILED if worst(findings) == PROBLEM else 0
