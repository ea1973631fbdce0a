"""What a process imports only when it uses it; each scenario runs in a process of its own."""

import subprocess
import sys

import pytest

# Of every service: compilers, what only telemetry with a collector uses, what draws, and the client
# behind the stubs.
NOBODY = (
    "numba",
    "llvmlite",
    "opentelemetry.sdk",
    "opentelemetry.exporter",
    "opentelemetry.instrumentation",
)
UNUSED = (
    *NOBODY,
    "grpc_reflection.v1alpha",
    "matplotlib",
    "plotly",
    "torch",
    "rich",
    "treadle.client",
)
ASKS_OVER_HTTP = {"gateway", "sidecar", "tools", "console"}
USES_THE_CLIENT = {"gateway"}
SERVICES = (
    "scheduler",
    "predictor",
    "placement",
    "migrator",
    "tools",
    "rollout",
    "gateway",
    "sidecar",
    "console",
)


def loaded(script: str) -> set[str]:
    """Names of all modules, with the packages around them, that a process has imported after the
    script."""
    script += (
        "\nimport sys\nprint(*(name for name, module in sys.modules.items() if module is not None))"
    )
    command = [sys.executable, "-c", script]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_starts_without_what_it_may_never_use(service: str) -> None:
    unused = {*UNUSED, *(() if service in ASKS_OVER_HTTP else ("aiohttp",))}
    unused -= {"treadle.client"} if service in USES_THE_CLIENT else set()
    assert not loaded(f"import treadle_runtime.server, treadle_{service}.wire") & unused


def test_the_command_line_shows_its_help_without_the_mesh() -> None:
    heavy = {
        *UNUSED,
        "aiohttp",
        "cryptography",
        "grpc",
        "nats",
        "numpy",
        "pydantic",
        "rich.markdown",
        "structlog",
    }
    heavy -= {"rich"}
    show_help = "from treadle_cli.app import app; app(['--help'], standalone_mode=False)"
    assert not loaded(show_help) & (heavy | {"treadle_core", "treadle_runtime", "treadle_sim"})


def test_a_stub_brings_no_client_and_the_public_names_do() -> None:
    assert "treadle.client" not in loaded("from treadle.scheduler.v1 import scheduler_pb2_grpc")
    assert "treadle.client" in loaded("from treadle import Client")


def test_nats_over_websockets_still_finds_its_http_client() -> None:
    script = """
import asyncio, sys, treadle_runtime
from nats.aio.transport import WebSocketTransport
assert "aiohttp" not in sys.modules
async def main():
    transport = WebSocketTransport()
    await transport._client.close()
asyncio.run(main())
"""
    assert "aiohttp.client" in loaded(script)
