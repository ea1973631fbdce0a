"""Listens to the mesh's facts for what no client sees: migrations, lost engines and forecasts.

A plain core subscription, not a durable one: the listener is there before the arm starts and forgets with it.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import nats
from google.protobuf.message import DecodeError
from nats.aio.msg import Msg
from treadle.telemetry.v1.facts_pb2 import Fact, MigrationEnded, TrajectoryPredicted

from treadle_cli.demo.forecasts import StepTimes

ALL_FACTS = "treadle.facts.>"


@dataclass
class Heard:
    """What was said during an arm, in the order of arrival; a fact that arrives twice is here once."""

    migrations: list[MigrationEnded] = field(default_factory=list)
    lost_engines: list[tuple[float, str, str]] = field(default_factory=list)  # unix time, engine id, reason
    forecasts: list[tuple[float, TrajectoryPredicted]] = field(default_factory=list)  # with unix time
    steps: StepTimes = field(default_factory=StepTimes)
    seen: set[str] = field(default_factory=set)

    def take(self, fact: Fact) -> None:
        """Keeps what the report needs."""
        if fact.fact_id in self.seen:
            return
        self.seen.add(fact.fact_id)
        self.steps.take(fact)
        if fact.HasField("migration_ended"):
            self.migrations.append(fact.migration_ended)
        elif fact.HasField("engine_lost"):
            self.lost_engines.append(
                (fact.time.ToMicroseconds() / 1e6, fact.engine_lost.engine_id, fact.engine_lost.reason)
            )
        elif fact.HasField("trajectory_predicted"):
            self.forecasts.append((fact.time.ToMicroseconds() / 1e6, fact.trajectory_predicted))


@asynccontextmanager
async def listening(nats_url: str, note: Callable[[str], None]) -> AsyncIterator[Heard]:
    """Collects facts until the block ends, those still on the way included."""
    heard = Heard()
    client = await nats.connect(nats_url)

    async def on_message(message: Msg) -> None:
        fact = Fact()
        try:
            fact.ParseFromString(message.data)
        except DecodeError:
            note(f"a fact on {message.subject} is none that this version knows")
            return
        heard.take(fact)

    await client.subscribe(ALL_FACTS, cb=on_message)
    await client.flush()
    try:
        yield heard
    finally:
        await client.drain()
