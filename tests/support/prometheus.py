"""The metrics of docs/metrics.md, as Prometheus has them."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
# `series` (`name`), kind of unit by label, label, from service, service: what it counts.
ENTRY = re.compile(
    r"`(?P<series>\w+)` \(`[\w.]+`\), (?P<kind>\w+) of \w+"
    r"(?: by (?P<labels>(?:(?!, from )[^:])+))?(?:, from [^:]+)?: "
)


def series_of(name: str, kind: str, unit: str) -> str:
    """What the collector's exporter makes of an OpenTelemetry name: underscores, the unit, _total
    of counters."""
    words = [
        name.replace(".", "_"),
        *(["seconds"] if unit == "s" else []),
        *(["total"] if kind == "counter" else []),
    ]
    return "_".join(words)


def entries() -> list[str]:
    """Return the entries of the page, each on one line."""
    listed = PAGE.read_text().split("\n\n")[-1]
    return [" ".join(entry.split()) for entry in f"\n{listed}".split("\n- ")[1:]]


def documented() -> dict[str, tuple[str, set[str]]]:
    """Return kind and labels of each metric, by its name in Prometheus."""
    found: dict[str, tuple[str, set[str]]] = {}
    for entry in entries():
        match = ENTRY.match(entry)
        assert match is not None, f"docs/metrics.md: {entry}"
        found[match["series"]] = (match["kind"], set((match["labels"] or "").split(", ")) - {""})
    return found
