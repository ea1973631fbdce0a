"""Lets a call to a provider go when its turn comes, and hears how it went: limits are shared by all jobs and tools.

What a provider allows, and how long it is left alone after it refused or failed, is the Basic manager's to say
(ARL-Tangram §5.1); each call of a function that has a provider is an action of its own there.
"""

import enum
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from treadle_core.tools.action import Action
from treadle_core.tools.grants import End, Ended
from treadle_core.tools.providers import BasicManager

from treadle_tools.remote.function import CallFailed
from treadle_tools.scheduling.turns import Turns


class Verdict(enum.Enum):
    """How a call went, as far as its provider is concerned."""

    SERVED = "served"
    FAILED = "failed"
    REFUSED = "refused"  # too many requests
    ABANDONED = "abandoned"  # nobody waited any more


ENDS = {
    Verdict.SERVED: End.SERVED,
    Verdict.FAILED: End.FAILED,
    Verdict.REFUSED: End.REFUSED,
    Verdict.ABANDONED: End.ABANDONED,
}


@dataclass
class Passage:
    """One call under way; whoever makes it says how it went. retry_after_s: of a refusal, where it was said."""

    verdict: Verdict = Verdict.ABANDONED
    retry_after_s: float | None = None


class Gate(Protocol):
    """See the module."""

    def passage(self, provider: str, within_s: float) -> AbstractAsyncContextManager[Passage]:
        """Waits for the provider's turn; inside of the block one call is made.

        Raises CallFailed at once where the provider is to be left alone for longer than `within_s`.
        """
        ...


class ProviderGate:
    """See the module. numbers: of actions, ascending over all of them."""

    def __init__(self, turns: Turns, providers: Mapping[str, BasicManager], numbers: Iterator[int]) -> None:
        self._turns = turns
        self._providers = providers
        self._numbers = numbers

    @asynccontextmanager
    async def passage(self, provider: str, within_s: float) -> AsyncIterator[Passage]:
        """See Gate. A function without a provider goes at once."""
        passage = Passage()
        if not provider:
            yield passage
            return
        manager = self._providers[provider]
        rest_s = manager.rests_s(time.monotonic())
        if rest_s > within_s:
            raise CallFailed(
                f"provider {provider!r} is left alone for another {rest_s:.1f} s", again=True, retry_after_s=rest_s
            )
        number = next(self._numbers)
        action = Action(f"call-{number}", f"call-{number}", number, manager.cost())
        failure: CallFailed | None = None
        async with self._turns.hold(action) as turn:
            try:
                yield passage
            except CallFailed as failed:
                failure = failed  # raised again once its end is told: to the provider it is more than abandoned
            turn.ended = Ended(ENDS[passage.verdict], passage.retry_after_s)
        if failure is not None:
            raise failure
