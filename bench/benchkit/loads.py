"""Runs one load tool against one proxy and reads its result."""

import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import machine
from .cases import Case

LUA = Path(__file__).resolve().parent.parent / "lua"
UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3}
STREAMS = 16


@dataclass
class Outcome:
    """What a load tool saw; latencies in milliseconds, None where the tool does not tell."""

    done: int
    per_second: float
    errors: int
    p50: float | None = None
    p99: float | None = None
    p999: float | None = None


@dataclass(frozen=True)
class Setting:
    """How load is made: on which cores, from which folder of tools."""

    cores: list[int]
    bin: Path


def _run(setting: Setting, argv: list[str], limit: float) -> str:
    """Runs a tool, pinned; returns what it printed."""
    with machine.launch(setting.cores, argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tool:
        try:
            text, complaint = tool.communicate(timeout=limit)
        except BaseException:
            tool.kill()
            raise
    if tool.returncode != 0:
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
    return Outcome(
        done=_total(r"(\d+) requests in", text),
        per_second=float(_find(r"Requests/sec:\s+([\d.]+)", text)),
        errors=_total(r"(?:connect|read|write|timeout) (\d+)", text) + _total(r"Non-2xx.*: (\d+)", text),
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
    return Outcome(
        done=_total(r"(\d+) 2xx", text),
        per_second=float(_find(r"([\d.]+) req/s", text)),
        errors=_total(r"(\d+) failed", text) + _total(r"(\d+) [345]xx", text),
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
    """Open loop at a constant rate; see tools/load.rs."""
    argv = [str(setting.bin / "load"), "rate", f"127.0.0.1:{port}", case.path]
    argv += [str(case.rate), str(seconds), str(case.connections)]
    return read_rate(_run(setting, argv, seconds + 30))


def read_rate(text: str) -> Outcome:
    seen = json.loads(text)
    return Outcome(
        done=seen["answered"],
        per_second=seen["answered"] / seen["seconds"],
        errors=seen["errors"] + seen["unanswered"],
        p50=seen["p50"] / 1e3,
        p99=seen["p99"] / 1e3,
        p999=seen["p999"] / 1e3,
    )


TOOLS = {"wrk": wrk, "h2load": h2load, "handshakes": handshakes, "rate": rate}


class Idle:
    """Connections held open and idle around a measurement."""

    def __init__(self, setting: Setting, port: int, count: int):
        argv = [str(setting.bin / "load"), "hold", f"127.0.0.1:{port}", "/", str(count)]
        self.count = count
        self.process = machine.launch(setting.cores, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not self.process.stdout.readline().startswith("ready"):
            self.process.wait()
            raise RuntimeError(f"could not open {count} idle connections")

    def release(self) -> int:
        """Closes them; returns how many the proxy had closed before."""
        text, _ = self.process.communicate(timeout=30)
        return self.count - _total(r"alive (\d+)", text)
