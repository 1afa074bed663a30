"""A gRPC peer of another make than the one in Rust: messages are octets, nothing is generated.

peer.py serve   serves on a free port and prints it; then the name of each call that was lost
peer.py call    reads a call a line, and prints what has become of it

Both end when standard input does, so that none outlives the test that started it.
"""

import json
import queue
import sys
import threading
from concurrent import futures

import grpc

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
SERVICE = "/peer.Echo/"


def say(text):
    # One call, so that lines of different threads do not mix.
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


# The server.


class Watch:
    """Tells when the call ends before the method has come to its own end."""

    def __init__(self, method, context):
        self.done = False
        self.over = threading.Event()
        self.method = method
        if not context.add_callback(self.end):
            self.end()
        metadata = context.invocation_metadata()
        own = [(key, value) for key, value in metadata if key.startswith("peer-")]
        context.send_initial_metadata([("got-" + key, value) for key, value in own])
        context.set_trailing_metadata([("end-" + key, value) for key, value in own])

    def end(self):
        if not self.done:
            say(self.method)
        self.over.set()


def unary(message, context):
    watch = Watch("Unary", context)
    watch.done = True
    return message


def late(message, context):
    watch = Watch("Late", context)
    watch.over.wait(int(message) / 1000)
    watch.done = True
    return message


def missing(message, context):
    # Nothing was sent before, so this is an answer of trailers only.
    context.abort(grpc.StatusCode.NOT_FOUND, message.decode())


def collect(messages, context):
    watch = Watch("Collect", context)
    whole = b"".join(messages)
    watch.done = True
    return whole


def expand(message, context):
    watch = Watch("Expand", context)
    count, pause = map(int, message.split())
    for number in range(count):
        watch.over.wait(pause / 1000)
        yield str(number).encode()
    watch.done = True


def partial(message, context):
    watch = Watch("Partial", context)
    yield message
    yield message
    watch.done = True
    context.abort(grpc.StatusCode.ABORTED, "half way")


def chat(messages, context):
    watch = Watch("Chat", context)
    for message in messages:
        yield message
    watch.done = True


def hold(messages, context):
    watch = Watch("Hold", context)
    yield next(messages)
    watch.over.wait()


HANDLERS = {
    "Unary": grpc.unary_unary_rpc_method_handler(unary),
    "Late": grpc.unary_unary_rpc_method_handler(late),
    "Missing": grpc.unary_unary_rpc_method_handler(missing),
    "Collect": grpc.stream_unary_rpc_method_handler(collect),
    "Expand": grpc.unary_stream_rpc_method_handler(expand),
    "Partial": grpc.unary_stream_rpc_method_handler(partial),
    "Chat": grpc.stream_stream_rpc_method_handler(chat),
    "Hold": grpc.stream_stream_rpc_method_handler(hold),
}


class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        if details.method.startswith(SERVICE):
            return HANDLERS.get(details.method[len(SERVICE):])
        return None


def serve():
    server = grpc.server(futures.ThreadPoolExecutor(16), handlers=[Echo()], options=OPTIONS)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    say(str(port))
    sys.stdin.read()
    server.stop(None)


# The client.

CHANNELS = {}


def channel(asked):
    key = (asked["address"], asked["host"], asked["ca"])
    if key not in CHANNELS:
        options = OPTIONS + [("grpc.default_authority", asked["host"])]
        if asked["ca"]:
            options.append(("grpc.ssl_target_name_override", asked["host"]))
            with open(asked["ca"], "rb") as file:
                trusted = grpc.ssl_channel_credentials(file.read())
            CHANNELS[key] = grpc.secure_channel(asked["address"], trusted, options)
        else:
            CHANNELS[key] = grpc.insecure_channel(asked["address"], options)
    return CHANNELS[key]


def converse(method, messages, cancels, got, more):
    """Sends a message when the answer to the one before has come."""
    to_send = queue.SimpleQueue()
    call = method(iter(to_send.get, None), **more)
    try:
        for message in messages:
            to_send.put(message)
            got.append(next(call))
        if cancels:
            call.cancel()
    except (grpc.RpcError, StopIteration):
        # It is in the call's code.
        pass
    to_send.put(None)
    return call


def perform(asked, got):
    """Calls, and keeps the messages that come; the call when it has ended."""
    way = asked["method"]
    path = asked["path"]
    messages = [message.encode() for message in asked["messages"]]
    metadata = []
    for key, value in asked["metadata"]:
        metadata.append((key, value.encode("latin-1") if key.endswith("-bin") else value))
    more = {"metadata": metadata, "timeout": asked["timeout"]}
    to = channel(asked)
    if way in ("Chat", "Hold"):
        call = converse(to.stream_stream(path), messages, asked["cancel"], got, more)
    elif way == "Collect":
        call = to.stream_unary(path).future(iter(messages), **more)
    elif way in ("Expand", "Partial"):
        call = to.unary_stream(path)(messages[0], **more)
    else:
        call = to.unary_unary(path).future(messages[0], **more)
    try:
        if way in ("Chat", "Hold", "Expand", "Partial"):
            got.extend(call)
        else:
            got.append(call.result())
    except (grpc.RpcError, grpc.FutureCancelledError):
        pass
    return call


def fields(metadata):
    text = lambda value: value.decode("latin-1") if isinstance(value, bytes) else value
    return {key: text(value) for key, value in metadata or []}


def call():
    for line in sys.stdin:
        got = []
        ended = perform(json.loads(line), got)
        say(
            json.dumps(
                {
                    "code": ended.code().value[0],
                    "message": ended.details() or "",
                    "initial": fields(ended.initial_metadata()),
                    "trailing": fields(ended.trailing_metadata()),
                    "messages": [message.decode() for message in got],
                }
            )
        )


{"serve": serve, "call": call}[sys.argv[1]]()
