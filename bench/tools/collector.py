"""Takes spans (OTLP over gRPC) on a port of this machine and throws them away, so that a proxy that traces has
somewhere to send them. Ends when its standard input does. Needs Python's gRPC (Debian: python3-grpcio)."""

import sys
from concurrent import futures

import grpc

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


def main() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    # Without serializers messages are bytes, and no bytes are an answer without complaints.
    export = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": export}),))
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    sys.stdin.read()


main()
