"""Facts as they travel: minting, subjects, kinds. See treadle/telemetry/v1/facts.proto."""

import uuid
from collections.abc import Sequence

from google.protobuf.message import Message
from treadle.telemetry.v1.facts_pb2 import Fact

SUBJECT_ROOT = "treadle.facts"
KINDS: frozenset[str] = frozenset(field.name for field in Fact.DESCRIPTOR.oneofs_by_name["fact"].fields)

# Where a fact's message says whom it is about, first that is set: a step's facts carry it in `step`.
_SUBJECT_FIELDS = ("trajectory_id", "engine_id", "migration_id")
_NESTED_FIELDS = ("step", "info")


def make_fact(source: str, **kind_message: Message) -> Fact:
    """A fact with a fresh id and the present time, e.g. make_fact("sidecar/e0", step_finished=StepFinished(...)).

    source: service and instance. Exactly one kind is given, by the name of its field. Raises TypeError otherwise.
    """
    if len(kind_message) != 1 or not KINDS.issuperset(kind_message):
        raise TypeError(f"a fact has exactly one kind of {sorted(KINDS)}, not {sorted(kind_message)}")
    fact = Fact(fact_id=uuid.uuid4().hex, source=source, **kind_message)  # type: ignore[arg-type]
    fact.time.GetCurrentTime()
    return fact


def kind_of(fact: Fact) -> str:
    """The name of the set field of `fact`. Raises ValueError where none is set."""
    kind = fact.WhichOneof("fact")
    if kind is None:
        raise ValueError(f"fact {fact.fact_id!r} has no kind")
    return kind


def subject_of(fact: Fact) -> str:
    """treadle.facts.<kind>.<trajectory or engine id>; `none` where the fact is about neither."""
    kind = kind_of(fact)
    return f"{SUBJECT_ROOT}.{_token(kind.replace('_', '-'))}.{_token(_about(getattr(fact, kind)) or 'none')}"


def subjects_of(kinds: Sequence[str]) -> list[str]:
    """The subject filters of some kinds; of all when `kinds` is empty. Raises ValueError for an unknown kind."""
    unknown = sorted(set(kinds) - KINDS)
    if unknown:
        raise ValueError(f"no such kind of fact: {unknown}; there are {sorted(KINDS)}")
    return [f"{SUBJECT_ROOT}.{kind.replace('_', '-')}.>" for kind in kinds] or [f"{SUBJECT_ROOT}.>"]


def _about(message: Message) -> str:
    names = message.DESCRIPTOR.fields_by_name
    for nested in _NESTED_FIELDS:
        if nested in names:
            return _about(getattr(message, nested))
    return next((str(value) for name in _SUBJECT_FIELDS if name in names and (value := getattr(message, name))), "")


def _token(text: str) -> str:
    """One token of a NATS subject: no dot, space or wildcard."""
    return "".join(char if char.isalnum() or char in "-_:" else "_" for char in text)
