"""The cases: what is asked for, over how many connections, by which tool, of which configuration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """How large a configuration the proxies are started with."""

    upstreams: int = 1
    routes: int = 0  # 0: one route for everything


PLAIN = Shape()


def route_name(number: int) -> str:
    """All of one length, so that no route is another's prefix."""
    return f"r{number:06}"


@dataclass(frozen=True)
class Case:
    name: str
    listener: str  # which of a proxy's listeners is used: http, tls, h2 or h2c
    tool: str  # wrk, h2load, handshakes or rate
    about: str
    path: str = "/"
    size: int = 128  # length of the answer's body
    connections: int = 64
    script: str = ""  # wrk script, in lua/
    upload: str = ""  # "sized" or "chunked": the script posts 16 KiB, and the answer tells the length
    close: bool = False  # a new connection for each request
    idle: int = 0  # further connections, held idle meanwhile
    rate: int = 0  # of an open loop, per second; 0: --rate
    share: float = 0  # of an open loop: this share of the reference's capacity
    shape: Shape = PLAIN
    unit: str = "req"

    @property
    def miss(self) -> str:
        """A path that must not be answered well, or it is not the routes that decide."""
        return "/elsewhere" if self.shape.routes else ""


def _routes(name: str, count: int) -> Case:
    about = f"small by the last of {count:,} routes by path prefix"
    return Case(name, "http", "wrk", about, "/" + route_name(count - 1), shape=Shape(routes=count))


CASES = {
    case.name: case
    for case in (
        Case("small", "http", "wrk", "GET, 128 B answer, 64 connections"),
        Case("headers", "http", "wrk", "the same with 12 browser headers", script="headers.lua"),
        Case("16k", "http", "wrk", "GET, 16 KiB answer", "/16k", 16384),
        Case("1m", "http", "wrk", "GET, 1 MiB answer, 16 connections", "/1m", 1 << 20, 16),
        Case("chunked", "http", "wrk", "GET, chunked 16 KiB answer", "/chunked", 16384),
        Case("post16k", "http", "wrk", "POST with a 16 KiB body", script="post16k.lua", upload="sized"),
        Case("postchunked", "http", "wrk", "POST with a chunked 16 KiB body", script="postchunked.lua", upload="chunked"),
        Case("newconn", "http", "wrk", "GET, a new client connection for each", close=True),
        Case("c1000", "http", "wrk", "small on 1000 busy connections", connections=1000),
        Case("c10000", "http", "wrk", "small on 64 busy connections beside 9936 idle ones", idle=9936),
        Case("tls", "tls", "wrk", "small over TLS, kept alive"),
        Case("handshakes", "tls", "handshakes", "full TLS handshakes, no request", connections=3, unit="handshake"),
        Case("h2c", "h2c", "h2load", "small over clear HTTP/2, 16 connections x 16 streams", connections=16),
        Case("h2", "h2", "h2load", "small over HTTP/2 with TLS, 16 x 16", connections=16),
        Case("openloop", "http", "rate", "small at a constant rate; latency from the time due"),
        Case("openloop50", "http", "rate", "the same at 50 % of the reference's capacity", share=0.5),
        Case("openloop80", "http", "rate", "the same at 80 % of the reference's capacity", share=0.8),
        Case("upstreams100", "http", "wrk", "small to 100 upstreams", shape=Shape(upstreams=100)),
        _routes("routes1000", 1000),
        _routes("routes100k", 100_000),
    )
}
