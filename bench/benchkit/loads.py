"""Runs one load tool against one proxy and reads its result."""

import json
import re
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path

from . import machine
from .cases import Case

LUA = Path(__file__).resolve().parent.parent / "lua"
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3}
STREAMS = 16
MOST_ERRORS = 0.01  # beside the right answers; to refuse is cheaper than to answer


@dataclass
class Outcome:
    """What a load tool saw; latencies in milliseconds, None where the tool does not tell."""

    done: int  # right answers; any other is an error
    per_second: float
    errors: int
    p50: float | None = None
    p99: float | None = None
    p999: float | None = None


@dataclass(frozen=True)
class Setting:
    """How load is made: on which cores, by which tools."""

    cores: list[int]
    bin: Path
    l7rp: Path


def _run(setting: Setting, argv: list[str], limit: float, fine: Iterable[int] = (0,)) -> str:
    """Runs a tool, pinned; returns what it printed. `fine`: exit codes that are no failure of the tool."""
    with machine.launch(setting.cores, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
        try:
            text, complaint = tool.communicate(timeout=limit)
        except BaseException:
            tool.kill()
            raise
    if tool.returncode not in fine:
        raise RuntimeError(f"{argv[0]} failed: {complaint.strip()[-300:]}")
    return text


def _find(pattern: str, text: str) -> str:
    """The first group of the first match; a tool that printed something else has failed."""
    found = re.search(pattern, text)
    if not found:
        raise RuntimeError(f"unexpected output: {text.strip()[-200:]}")
    return found[1]


def _milliseconds(text: str) -> float:
    unit = text.lstrip("0123456789.")
    return float(text.removesuffix(unit)) * UNITS[unit]


def _total(pattern: str, text: str) -> int:
    return sum(int(n) for n in re.findall(pattern, text))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def judged(seen: Outcome) -> Outcome:
    """The same, if it is fit for a figure."""
    if not seen.done:
        raise RuntimeError("no right answer")
    if seen.errors > MOST_ERRORS * seen.done:
        raise RuntimeError(f"{seen.errors} errors beside {seen.done} right answers")
    return seen


def wrk(setting: Setting, case: Case, port: int, seconds: int) -> Outcome:
    """Closed loop: every connection sends its next request once the last is answered."""
    threads = max(1, min(len(setting.cores), case.connections))
    argv = ["wrk", f"-t{threads}", f"-c{case.connections}", f"-d{seconds}s", "--latency", "--timeout", "10s"]
    if case.script:
        argv += ["-s", str(LUA / case.script)]
    if case.close:
        argv += ["-H", "Connection: close"]
    scheme = "https" if case.listener == "tls" else "http"
    return read_wrk(_run(setting, [*argv, f"{scheme}://127.0.0.1:{port}{case.path}"], seconds + 30))


def read_wrk(text: str) -> Outcome:
    """wrk takes 3xx for well answered too: whether 200 comes is asked before and after a sample."""
    answers, refused = _total(r"(\d+) requests in", text), _total(r"Non-2xx.*: (\d+)", text)
    return Outcome(
        done=answers - refused,
        per_second=float(_find(r"Requests/sec:\s+([\d.]+)", text)) * _share(answers - refused, answers),
        errors=_total(r"(?:connect|read|write|timeout) (\d+)", text) + refused,
        p50=_milliseconds(_find(r"(?m)^\s+50%\s+(\S+)", text)),
        p99=_milliseconds(_find(r"(?m)^\s+99%\s+(\S+)", text)),
    )


def h2load(setting: Setting, case: Case, port: int, seconds: int) -> Outcome:
    """HTTP/2, closed loop. h2load prints no percentiles; they are taken from its log."""
    scheme = "https" if case.listener == "h2" else "http"
    log = setting.bin.parent / "h2load.log"
    log.unlink(missing_ok=True)
    argv = ["h2load", "-D", str(seconds), "-c", str(case.connections), "-m", str(STREAMS), "-t", "1"]
    text = _run(setting, [*argv, f"--log-file={log}", f"{scheme}://127.0.0.1:{port}{case.path}"], seconds + 30)
    with open(log) as lines:
        seen = read_h2load(text, lines)
    log.unlink(missing_ok=True)
    return seen


def read_h2load(text: str, log: Iterable[str]) -> Outcome:
    """`log` has a line for each request: when it began, its status, its microseconds."""
    times = sorted(int(line.split()[2]) for line in log) or [0]
    # Counts of statuses have answers in them that had not ended when the time was over.
    elsewhere = _total(r"(\d+) 3xx", text)
    right = max(0, _total(r"(\d+) succeeded", text) - elsewhere)
    return Outcome(
        done=right,
        per_second=float(_find(r"([\d.]+) req/s", text)) * _share(right, _total(r"(\d+) done", text)),
        errors=_total(r"(\d+) failed", text) + elsewhere,
        p50=times[len(times) // 2] / 1e3,
        p99=times[len(times) * 99 // 100] / 1e3,
    )


def handshakes(setting: Setting, case: Case, port: int, seconds: int) -> Outcome:
    """Full TLS handshakes, by several openssl clients at once."""
    argv = ["openssl", "s_time", "-connect", f"127.0.0.1:{port}", "-new", "-time", str(seconds)]
    clients = [
        machine.launch(setting.cores, argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(case.connections)
    ]
    texts = [client.communicate(timeout=seconds + 30)[0] for client in clients]
    return read_s_time("\n".join(texts), seconds)


def read_s_time(text: str, seconds: int) -> Outcome:
    done = _total(r"(\d+) connections in \d+ real seconds", text)
    # s_time counts whole seconds and may run into the next; the caller takes the rate from its own clock.
    return Outcome(done=done, per_second=done / seconds, errors=0 if done else 1)


def rate(setting: Setting, case: Case, port: int, seconds: int) -> Outcome:
    """Open loop at a constant rate: `l7rp load`, whose latencies count from when a request was due."""
    argv = [str(setting.l7rp), "load", "--json", "--rate", str(case.rate), "--duration", f"{seconds}s"]
    argv += ["--concurrency", str(case.connections), f"http://127.0.0.1:{port}{case.path}"]
    return read_rate(_run(setting, argv, seconds + 30, fine=(0, 1)))


def read_rate(text: str) -> Outcome:
    try:
        seen = json.loads(text)
    except ValueError as e:
        raise RuntimeError(f"l7rp load has made no load: {text.strip()[-200:]}") from e
    answers, right = seen["answers"], seen["statuses"].get("200", 0)
    times = seen.get("latency")
    # Without an answer there are none.
    ms = {name: times[f"{name}_us"] / 1e3 for name in ("p50", "p99", "p999")} if times else {}
    return Outcome(
        done=right,
        per_second=seen["rate_per_s"] * _share(right, answers),
        # What was due and never sent is no error: who falls behind is told by the rate.
        errors=sum(seen["errors"].values()) + answers - right,
        **ms,
    )


TOOLS = {"wrk": wrk, "h2load": h2load, "handshakes": handshakes, "rate": rate}


class Idle:
    """Connections held open around a measurement, idle after one request each."""

    def __init__(self, port: int, count: int):
        self.sockets = []
        try:
            for _ in range(count):
                self.sockets.append(_asked_once(port))
        except OSError as e:
            self.release()
            raise RuntimeError(f"could not open {count} idle connections: {e}") from e

    def release(self) -> int:
        """Closes them; returns how many the proxy had closed before."""
        closed = sum(not _is_open(one) for one in self.sockets)
        for one in self.sockets:
            one.close()
        return closed


def _asked_once(port: int) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=10)
    one.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    answer = HTTPResponse(one)
    answer.begin()
    answer.read()
    answer.close()
    return one


def _is_open(one: socket.socket) -> bool:
    """Whether the other side has neither closed nor reset it."""
    one.setblocking(False)
    try:
        return one.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
