"""Whether a proxy answers a case rightly, before anything is measured."""

import http.client
import ssl

from .cases import Case

BODY = b"x" * 16384
PIECES = 4


class WrongAnswer(Exception):
    """What came is not what the backend sends."""


def _connection(case: Case, port: int) -> http.client.HTTPConnection:
    if case.listener == "tls":
        trusting = ssl._create_unverified_context()
        return http.client.HTTPSConnection("localhost", port, timeout=5, context=trusting)
    return http.client.HTTPConnection("127.0.0.1", port, timeout=5)


def _send(client: http.client.HTTPConnection, case: Case) -> None:
    if case.upload == "chunked":
        size = len(BODY) // PIECES
        pieces = (BODY[i : i + size] for i in range(0, len(BODY), size))
        client.request("POST", case.path, pieces, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    elif case.upload:
        client.request("POST", case.path, BODY)
    else:
        client.request("GET", case.path)


def check(case: Case, port: int) -> None:
    """Asks twice on one connection and compares the bodies. HTTP/2 is left to its load tool's own count."""
    if case.listener not in ("http", "tls"):
        return
    expected = f"received {len(BODY)}\n".encode() if case.upload else b"x" * case.size
    client = _connection(case, port)
    try:
        for _ in range(2):
            _send(client, case)
            answer = client.getresponse()
            body = answer.read()
            if answer.status != 200 or body != expected:
                raise WrongAnswer(f"status {answer.status}, {len(body)} bytes")
        if case.miss:
            client.request("GET", case.miss)
            if client.getresponse().status == 200:
                raise WrongAnswer(f"{case.miss}, which no route is for, is answered with 200")
    except (OSError, http.client.HTTPException) as error:
        raise WrongAnswer(repr(error)) from error
    finally:
        client.close()
