"""The metrics of docs/metrics.md, as Prometheus has them."""

from pathlib import Path

TABLE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def series_of(name: str, kind: str, unit: str) -> str:
    """What the collector's exporter makes of an OpenTelemetry name: underscores, the unit, _total of counters."""
    words = [name.replace(".", "_"), *(["seconds"] if unit == "s" else []), *(["total"] if kind == "counter" else [])]
    return "_".join(words)


def documented() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels of each metric, by its name in Prometheus."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.read_text().splitlines()]
    rows = [row for row in cells if len(row) == 7 and row[0].startswith("`")]
    return {row[1].strip("`"): (row[2], set(filter(None, row[4].split(", ")))) for row in rows}
