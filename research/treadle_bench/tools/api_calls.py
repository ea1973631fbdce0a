"""Calls of an API, with the Basic manager and without it (ARL-Tangram §5.1, §6.1: DeepSearch),
before one provider.

`UnmanagedCalls`: each trajectory sends its request at once, and after a refusal again, at most
three times with a backoff that doubles; then, or after 600 s, the call has failed and the
trajectory goes on without an answer. `ManagedCalls`: requests wait in one queue and leave when the
provider's limits allow it.
"""

import math
from dataclasses import dataclass

import numpy as np
from treadle_core.tools.dispatcher import Dispatcher, Resources, Started
from treadle_core.tools.providers import BasicManager, Provider, Quota
from treadle_sim.cluster import Timeline
from treadle_sim.workloads.parametric import WORKLOADS, draw

from treadle_bench.tools.reward_models import MOST_CONTEXT, MOST_TOKENS, TOOL_LLM
from treadle_bench.tools.trace import (
    Asked,
    Call,
    Dispatched,
    Executor,
    Record,
    Report,
    Trace,
    generation_s,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """concurrency: requests at a time. quota in each period, counted from multiples of it.
    refusal_s: until a refusal is back."""

    concurrency: int
    quota: int
    period_s: float
    refusal_s: float = 0.1


class ProviderModel:
    """A provider with limits. The caller passes times that never fall."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.refused = 0
        self.most_at_once = 0
        self.most_in_a_window = 0
        self._at_once = 0
        self._window = -1
        self._in_window = 0

    def admit(self, now_s: float) -> bool:
        """Whether a request that comes now is served; it counts against the quota only if it is."""
        window = math.floor(now_s / self.limits.period_s)
        if window != self._window:
            self._window, self._in_window = window, 0
        if self._at_once >= self.limits.concurrency or self._in_window >= self.limits.quota:
            self.refused += 1
            return False
        self._at_once += 1
        self._in_window += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        self.most_in_a_window = max(self.most_in_a_window, self._in_window)
        return True

    def leave(self) -> None:
        """A request that was served has ended."""
        self._at_once -= 1


def manager_of(limits: Limits, name: str) -> BasicManager:
    """The Basic manager that is told the same limits."""
    return BasicManager(
        Provider(name, limits.concurrency, (Quota(limits.quota, limits.period_s, sliding=False),))
    )


MOST_RETRIES = 3  # §6.1
TIMEOUT_S = 600.0  # §6.1
BACKOFF_S = 1.0  # before the first retry; doubled, and half of it drawn at random; a choice
PROVIDER = "search"
# A choice: a burst of 2,048 wants about twice of it.
LIMITS = Limits(concurrency=500, quota=15_000, period_s=60.0)


def search_batch(trajectories: int, seed: int) -> tuple[Trace, ...]:
    """Search agents that start as one burst; every step ends with a query. Rewards are not looked
    at here."""
    cost = manager_of(LIMITS, PROVIDER).cost()
    works = draw(
        "search-calls",
        WORKLOADS["search"],
        trajectories,
        1,
        seed,
        0,
        TOOL_LLM,
        MOST_TOKENS,
        MOST_CONTEXT,
    )
    return tuple(
        Trace(
            f"search-{at}",
            "search",
            tuple(
                Call(each_s, cost, step.tool_s)
                for each_s, step in zip(generation_s(work), work.steps, strict=True)
            ),
        )
        for at, work in enumerate(works)
    )


class UnmanagedCalls(Executor):
    def __init__(
        self, timeline: Timeline, report: Report, provider: ProviderModel, seed: int
    ) -> None:
        super().__init__(timeline, report)
        self.provider = provider
        self._rng = np.random.default_rng([seed, 1])

    def submit(self, asked: Asked) -> None:
        self._send(asked, 1)

    def _send(self, asked: Asked, tries: int) -> None:
        now, limits = self._timeline.now, self.provider.limits
        if self.provider.admit(now):
            ends_s = now + asked.call.single_unit_s
            self._timeline.at(ends_s, self._finish, Record(asked, now, 0.0, ends_s, 1, tries))
            return
        wait_s = BACKOFF_S * 2.0 ** (tries - 1) * (0.5 + float(self._rng.random()))
        known_s = now + limits.refusal_s
        if tries > MOST_RETRIES or known_s + wait_s - asked.arrived_s > TIMEOUT_S:
            self._timeline.at(
                known_s, self._report, Record(asked, known_s, 0.0, known_s, 0, tries, failed=True)
            )
        else:
            self._timeline.at(known_s + wait_s, self._send, asked, tries + 1)

    def _finish(self, record: Record) -> None:
        self.provider.leave()
        self._report(record)


class ManagedCalls(Executor):
    def __init__(self, timeline: Timeline, report: Report, provider: ProviderModel) -> None:
        super().__init__(timeline, report)
        self.provider = provider
        dispatcher = Dispatcher(Resources([manager_of(provider.limits, PROVIDER)]), 0.0)
        self._gateway = Dispatched(timeline, self._leave, dispatcher, self.decisions, self._admit)

    def submit(self, asked: Asked) -> None:
        self._gateway.submit(asked, asked.call.cost)

    def _admit(self, started: Started) -> float:
        assert self.provider.admit(self._timeline.now)
        return 0.0

    def _leave(self, record: Record) -> None:
        self.provider.leave()
        self._report(record)
