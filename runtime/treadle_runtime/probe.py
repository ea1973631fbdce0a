"""`python -m treadle_runtime.probe HOST:PORT [SERVICE]`: asks a server for its health, where there is no other client.

Exit code 0 when SERVING, 1 when not or unreachable (one line on stderr says which), 2 on wrong usage.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROBE_TIMEOUT_S = 2.0  # below the probe interval of any orchestrator


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        sys.stderr.write("usage: python -m treadle_runtime.probe HOST:PORT [SERVICE]\n")
        return 2
    address, service = arguments[0], arguments[1] if len(arguments) == 2 else ""
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        try:
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"{address}: {error.code().name}: {error.details()}\n")
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.stderr.write(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
