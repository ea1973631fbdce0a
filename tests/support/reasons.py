"""Which reasons errors have, and the codes that come with them: by the protos, and by the sources of
the services. Fakes refuse with nothing else."""

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import grpc

ROOT = Path(__file__).resolve().parents[2]
CODE = "|".join(code.name for code in grpc.StatusCode)
REASON = r"(?!(?:" + CODE + r")\b)[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+"
# A code, and reasons with bars, commas or ticks between; a reason may have a remark behind it.
NAMED = re.compile(
    rf"\b({CODE})\b[ ,]+`?({REASON})`?((?:\s*(?:\([^()]*\)\s*)?[|,]\s*`?{REASON}`?)*)"
)
# classes of treadle_runtime.errors
CLASSES: Mapping[str, str] = {
    "".join(word.capitalize() for word in code.name.split("_")): code.name
    for code in grpc.StatusCode
}
RAISED = re.compile(rf"\b({'|'.join(CLASSES)})\(\s*\"({REASON})\"")
REFUSAL = re.compile(r"^class (\w+)\((\w+)\):.*?^    reason = \"(\w+)\"", re.M | re.S)
MAPPED = re.compile(r"refusals\.(\w+): (?:_as\(|lambda refusal: )(\w+)")

Reasons = Mapping[str, frozenset[str]]


def named_in(text: str) -> list[tuple[str, str]]:
    """The reasons that a text names behind a code, and that code."""
    return [
        (reason, code)
        for code, first, others in NAMED.findall(text)
        for reason in (first, *re.findall(REASON, re.sub(r"\([^()]*\)", "", others)))
    ]


def comments_of(proto: str) -> str:
    """The comments of a proto without their line ends."""
    lines = (line.partition("//") for line in proto.splitlines())
    return " ".join(comment.strip() if mark else "\n" for _, mark, comment in lines)


@cache
def by_contract() -> Reasons:
    """By the comments of the protos."""
    texts = map(Path.read_text, sorted((ROOT / "protos").rglob("*.proto")))
    return _grouped([pair for text in texts for pair in named_in(comments_of(text))])


@cache
def by_services() -> Reasons:
    """By what the sources of the services raise."""
    files = [
        file
        for folder in ("runtime", "services")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if "_pb2" not in file.name
    ]
    raised = [pair for file in files for pair in RAISED.findall(file.read_text())]
    return _grouped([*((reason, CLASSES[name]) for name, reason in raised), *_of_the_core()])


def possible_codes(reason: str) -> frozenset[str]:
    """The codes of a reason; empty where no service has it."""
    nothing = frozenset[str]()
    return by_contract().get(reason, nothing) | by_services().get(reason, nothing)


def _of_the_core() -> list[tuple[str, str]]:
    """Refusals of the controller, which the scheduler maps to codes by their class."""
    mapped = dict(
        MAPPED.findall((ROOT / "services/scheduler/treadle_scheduler/wire.py").read_text())
    )
    bases, reasons = dict[str, str](), dict[str, str]()
    for name, base, reason in REFUSAL.findall((ROOT / "core/treadle_core/refusals.py").read_text()):
        bases[name], reasons[name] = base, reason
    pairs = []
    for name, reason in reasons.items():
        kind = name
        while kind not in mapped:
            kind = bases[kind]
        pairs.append((reason, CLASSES[mapped[kind]]))
    return pairs


def _grouped(pairs: list[tuple[str, str]]) -> Reasons:
    found = defaultdict[str, set[str]](set)
    for reason, code in pairs:
        found[reason].add(code)
    return {reason: frozenset(codes) for reason, codes in found.items()}
