"""`python -m service_runtime.health_check HOST:PORT [NAME]`: exit code 0 while that name is SERVING, else 1.

For container health checks: it asks `grpc.health.v1` as the kubelet does. Must not know: which services there are.
"""

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main(arguments: list[str] | None = None) -> int:
    """Asks once; the reason for a 1 goes to stderr."""
    parser = argparse.ArgumentParser(prog="python -m service_runtime.health_check")
    parser.add_argument("target", metavar="HOST:PORT", help="a plaintext gRPC port")
    parser.add_argument("name", nargs="?", default="", help="name of the service (default: the whole server)")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds to wait for the answer (default: 2)")
    options = parser.parse_args(arguments)
    with grpc.insecure_channel(options.target) as channel:
        request = health_pb2.HealthCheckRequest(service=options.name)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=options.timeout)
        except grpc.RpcError as error:
            print(f"{options.target}: {error.code().name}", file=sys.stderr)
            return 1
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return 0
    print(f"{options.target}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
