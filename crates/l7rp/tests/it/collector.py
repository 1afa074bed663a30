"""A collector of spans that shares no code with the proxy: OTLP over gRPC, by Python's gRPC and
the published protobuf definitions. Writes its port, then one line of JSON for each span that it
gets, and for each call its metadata. "refuse" on standard input has it refuse calls from then on,
"accept" take them again. With a certificate and a key as arguments it speaks TLS."""

import json
import sys
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

accepts = True


def plain(value):
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None


def attributes(pairs):
    return {pair.key: plain(pair.value) for pair in pairs}


def told(resource, scope, span):
    return {
        "resource": attributes(resource.attributes),
        "scope": scope.name,
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "flags": span.flags,
        "name": span.name,
        "kind": span.kind,
        "start": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
        "attributes": attributes(span.attributes),
        "status": span.status.code,
        "message": span.status.message,
    }


def say(what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def export(request, context):
    if not accepts:
        context.abort(grpc.StatusCode.UNAVAILABLE, "told to refuse")
    say({"call": {key: value for key, value in context.invocation_metadata()}})
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                say(told(resource_spans.resource, scope_spans.scope, span))
    return service.ExportTraceServiceResponse()


def main():
    global accepts
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    handler = grpc.unary_unary_rpc_method_handler(
        export,
        request_deserializer=service.ExportTraceServiceRequest.FromString,
        response_serializer=service.ExportTraceServiceResponse.SerializeToString,
    )
    name = "opentelemetry.proto.collector.trace.v1.TraceService"
    generic = grpc.method_handlers_generic_handler(name, {"Export": handler})
    server.add_generic_rpc_handlers((generic,))
    if len(sys.argv) > 2:
        with open(sys.argv[1], "rb") as certificate, open(sys.argv[2], "rb") as key:
            pair = (key.read(), certificate.read())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    say(port)
    for line in sys.stdin:
        accepts = line.strip() != "refuse"
    server.stop(0)


main()
