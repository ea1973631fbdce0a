"""Request the health of a server, where there is no other client: `python -m treadle_runtime.probe
ADDRESS [SERVICE]`.

ADDRESS is host:port, for gRPC, or the path of a unix socket where the server reports its health
(HEALTH_SOCKET). Probes run every few seconds for as long as a service lives: over the socket one
costs the start of a Python, 30 ms, as nothing but the standard library is imported; over gRPC ten
times as much.

Exit code 0 when SERVING, 1 when not or unreachable (one line on stderr says which), 2 on wrong
usage.
"""

import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

PROBE_TIMEOUT_S = 2.0  # below the probe interval of any orchestrator
LONGEST_BYTES = 256  # longest request, which is the name of a service, and longest answer
SERVING, NOT_SERVING, UNKNOWN = "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"
NATS = "nats"  # the service name under which health tells whether NATS and its JetStream answer


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        sys.stderr.write("usage: python -m treadle_runtime.probe HOST:PORT|SOCKET [SERVICE]\n")
        return 2
    address, service = arguments[0], arguments[1] if len(arguments) == 2 else ""
    status = (_ask_socket if "/" in address else _ask_server)(address, service)
    if status != SERVING:
        sys.stderr.write(f"{address}: {status}\n")
        return 1
    return 0


@contextlib.asynccontextmanager
async def saying_health(path: str, status_of: Callable[[str], str]) -> AsyncIterator[None]:
    """Report the health of services at a unix socket, for the time of the block. path: empty for
    nowhere. status_of: returns the name of a service's status, as gRPC has it. Raises StartError
    where the socket cannot be made."""
    if not path:
        yield
        return
    import asyncio  # a probe needs neither of these two

    from treadle_runtime.errors import StartError

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                question = await reader.read(LONGEST_BYTES)
                writer.write(status_of(question.decode(errors="replace").strip()).encode())
                await writer.drain()
        writer.close()

    try:
        _remove(path)  # a process that was killed leaves its socket
        server = await asyncio.start_unix_server(answer, path)
    except OSError as error:
        raise StartError(f"cannot say health at HEALTH_SOCKET={path}: {error}") from None
    try:
        yield
    finally:
        server.close()
        _remove(path)


def _remove(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _ask_socket(path: str, service: str) -> str:
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(PROBE_TIMEOUT_S)
        try:
            asked.connect(path)
            asked.sendall(f"{service}\n".encode())
            return asked.recv(LONGEST_BYTES).decode(errors="replace") or "no answer"
        except OSError as error:
            return str(error)


def _ask_server(address: str, service: str) -> str:
    import grpc  # here, as the import takes longer than the request
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=PROBE_TIMEOUT_S
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
