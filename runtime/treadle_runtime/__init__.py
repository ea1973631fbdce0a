"""Everything around the code of a Treadle service: settings, lifecycle, errors, telemetry, bus,
request records.

It knows gRPC and NATS and no domain noun; `docs/architecture.md` says what each module owns.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _WhenUsed:
    """Module that is imported when one of its attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


def _import_without(optional: str, name: str) -> ModuleType:
    """Import a module of another project as if a package that it can do without were not
    installed."""
    if optional in sys.modules:
        return import_module(name)
    # With None here, an import of the package raises ModuleNotFoundError.
    sys.modules[optional] = None  # type: ignore[assignment]
    try:
        return import_module(name)
    finally:
        del sys.modules[optional]


# Each process would spend a fifth of a second on these. nats-py imports aiohttp, where it is
# installed, for NATS over WebSockets: it still gets aiohttp when it opens a WebSocket. structlog
# imports rich for tracebacks with colours: the images have no rich. Neither project has a switch,
# and an importlib.util.LazyLoader is no help, as an import statement reads the module's `__spec__`,
# which loads it.
_transport: Any = _import_without("aiohttp", "nats.aio.transport")
for _name in ("aiohttp", "multidict"):
    if getattr(_transport, _name) is None and find_spec(_name) is not None:
        setattr(_transport, _name, _WhenUsed(_name))
_import_without("rich", "structlog")
