"""How things stand: what is held and free, who waits, and which providers are left alone."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle_core.tools.dispatcher import Dispatcher
from treadle_core.tools.grants import Usage
from treadle_core.tools.providers import BasicManager, State


@dataclass(frozen=True)
class ProviderStanding:
    """rests_s: for how long no call goes; 0: calls go."""

    name: str
    breaker: State
    rests_s: float


class Standing:
    """See the module. All as of the call."""

    def __init__(self, dispatcher: Dispatcher, providers: Mapping[str, BasicManager]) -> None:
        self._dispatcher = dispatcher
        self._providers = providers

    @property
    def waiting(self) -> int:
        """Actions that wait for their turn."""
        return len(self._dispatcher)

    @property
    def running(self) -> int:
        """Actions that run."""
        return self._dispatcher.running

    def usage(self) -> Sequence[tuple[Usage, int]]:
        """Each dimension, and how many actions wait that ask for it."""
        waiting = self._dispatcher.waiting_for()
        return [(each, waiting[each.dimension]) for each in self._dispatcher.resources.usage(time.monotonic())]

    def providers(self) -> Sequence[ProviderStanding]:
        """Each of them."""
        now_s = time.monotonic()
        return [
            ProviderStanding(name, provider.state(now_s), provider.rests_s(now_s))
            for name, provider in self._providers.items()
        ]
