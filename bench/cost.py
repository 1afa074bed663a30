#!/usr/bin/env python3
"""What it costs to be told: the access log, traces (one request in a hundred) and the decision header, switched on and
off by reload while one process runs. Two processes differ by a few percent (memory layout), and the machine has slow
spells; one process that is loaded for a second in each setting, in turn, has neither. Ratios are taken within a
round; the tables give their medians, and the quarters below and above.

  cost.py [--rounds 20] [--starts 3]     # each start is another process
  cost.py --lines 100000                 # instead, so many lines a second: does the tail of latency move?
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

from benchkit import helpers, loads, machine, template
from benchkit.bench import REPOSITORY, chosen_cores, make_certificate
from benchkit.cases import CASES, PLAIN
from benchkit.peers import Peer, PeerError, lists

TRACING = 'tracing: { endpoint: "@collector@", sample_ratio: 0.01, insecure: true }'
TOLD = "    decision_header_for: [127.0.0.0/8]"
# What is answered by the proxy itself, so that a hundred thousand lines a second are a matter of lines.
OWN = "  - { name: own, path_prefix: /own, respond: { status: 200, body: ok } }\n"
SETTINGS = {
    "off": {},
    "log": {"access_log": "true"},
    "traces": {"more_top": TRACING},
    "log, traces": {"access_log": "true", "more_top": TRACING},
    "log, traces, header": {"access_log": "true", "more_top": TRACING, "more_listener": TOLD},
}
COSTS = ("A small answer through the proxy, 64 connections; starts: {starts}, each with {rounds} rounds of {seconds} s "
         "in each setting.")
TAILS = ("{lines} answers a second are due, made by the proxy itself without an upstream, on 16 connections; without "
         "the log and with it, {rounds} rounds of {seconds} s; medians; latency from the time due.")
RELOAD_SECONDS = 5
RELOADS = 'proxy_config_reloads_total{outcome="ok"}'


class Subject:
    """The program under test, one process of it."""

    def __init__(self, common: dict, cores: list[int]):
        self.peer = Peer.create("l7rp", 0, common, cores)
        self.peer.start()

    def metric(self, name: str) -> float:
        """The sum of all series of a metric."""
        url = f"http://127.0.0.1:{self.peer.values['admin']}/metrics"
        text = urllib.request.urlopen(url, timeout=RELOAD_SECONDS).read().decode()
        return sum(float(value) for value in re.findall(rf"(?m)^{re.escape(name)}(?:\{{.*\}})? (\S+)$", text))

    def set(self, words: dict) -> None:
        """Writes the configuration with these words, and has it read."""
        values = {name: template.fill(str(value), self.peer.values) for name, value in words.items()}
        values = self.peer.values | values
        [(name, text)] = self.peer.templates()
        text = template.render(text, values, lists(PLAIN, values["backend_port"])).replace("routes:\n", "routes:\n" + OWN)
        before = self.metric(RELOADS)
        # A file that says the same is not read as another one.
        note = f"# {time.monotonic()}\n"
        (values["run"] / name.removesuffix(".in")).write_text(text + note)
        self.peer.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + RELOAD_SECONDS
        while self.metric(RELOADS) == before:
            if time.monotonic() > deadline:
                raise PeerError(f"the reload has not come: {(values['run'] / 'output.log').read_text()[-500:]}")
            time.sleep(0.02)

    def times(self) -> tuple[int, int]:
        """Nanoseconds of processor time: of the workers, and of the whole process with threads that have ended."""
        workers = 0
        for task in Path(f"/proc/{self.peer.process.pid}/task").iterdir():
            if "worker" in (task / "comm").read_text():
                workers += int((task / "schedstat").read_text().split()[0])
        return workers, machine.process_nanoseconds(self.peer.process.pid)


def quarters(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


def costs(subject: Subject, load, rounds: int) -> list[dict]:
    """For each round, what a request costs in each setting: µs of the workers, and of the whole process."""
    names, seen = list(SETTINGS), []
    for number in range(rounds):
        turn, this = number % len(names), {}
        for name in names[turn:] + names[:turn]:
            subject.set(SETTINGS[name])
            before = subject.times()
            done = load().done
            this[name] = tuple((now - then) / done / 1e3 for now, then in zip(subject.times(), before))
            subject.peer.shorten_logs()
        seen.append(this)
    return seen


def cost_table(seen: list[dict]) -> str:
    out = ["| on | worker µs | ratio | process µs | ratio |", "|---|---|---|---|---|"]
    for name in SETTINGS:
        cells = [name]
        for part in (0, 1):
            cells.append(f"{statistics.median(this[name][part] for this in seen):.2f}")
            cells.append(quarters([this[name][part] / this["off"][part] for this in seen]))
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def tails(subject: Subject, load, rounds: int) -> str:
    """Latencies at a constant rate without the log and with it, in turn."""
    seen = []
    dropped = subject.metric("proxy_access_log_dropped_total")
    for number in range(rounds):
        this = {}
        for name in ("off", "log") if number % 2 else ("log", "off"):
            subject.set(SETTINGS[name])
            this[name] = load()
            subject.peer.shorten_logs()
        seen.append(this)
    dropped = subject.metric("proxy_access_log_dropped_total") - dropped
    out = ["| log | per s | p50 ms | p99 ms | p99.9 ms |", "|---|---|---|---|---|"]
    for name in ("off", "log"):
        of = lambda what: statistics.median(getattr(this[name], what) for this in seen)
        out.append(f"| {name} | {of('per_second'):.0f} | {of('p50'):.3f} | {of('p99'):.3f} | {of('p999'):.3f} |")
    ratios = quarters([this["log"].p99 / this["off"].p99 for this in seen])
    return "\n".join([*out, "", f"p99 with the log to without: {ratios}; lines dropped: {dropped:.0f}"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=20)
    add("--starts", type=int, default=3)
    add("--lines", type=int, help="no costs, but latencies at so many answers a second, made by the proxy itself")
    add("--seconds", type=int, default=1, help="length of a sample")
    add("--l7rp", help="the program under test; default: target/release/l7rp of the repository")
    add("--work", default=os.environ.get("BENCH_WORK", REPOSITORY / "target/bench"))
    add("--first-port", type=int, default=18100)
    add("--backend-port", type=int, default=18000)
    args = parser.parse_args()
    if args.rounds < 2 or args.starts < 1:
        parser.error("at least two rounds and one start: quarters need two ratios")
    return args


def main() -> int:
    args = arguments()
    args.cores, args.proxy_cpus, args.load_cpus = 1, None, None
    work = Path(args.work).resolve()
    proxy_cores, load_cores = chosen_cores(args)
    port = args.backend_port
    common = {
        "work": work, "bin": work / "bin", "first_port": args.first_port, "files": machine.raise_file_limit(),
        "l7rp": Path(args.l7rp).resolve() if args.l7rp else REPOSITORY / "target/release/l7rp", "cores": 1,
        "backend": f"127.0.0.1:{port}", "backend_port": port, "collector": f"127.0.0.1:{port + 1}",
    } | make_certificate(work / "tls")
    setting = loads.Setting(load_cores, common["bin"], common["l7rp"])
    behind, seen, texts = [], [], []
    try:
        behind += [helpers.backend(common["bin"], port, load_cores, 1), helpers.collector(port + 1, load_cores)]
        for start in range(1, args.starts + 1):
            subject = Subject(common, proxy_cores)
            try:
                entry = subject.peer.port("http")
                if args.lines:
                    case = replace(CASES["openloop"], rate=args.lines, path="/own", connections=16)
                    load = lambda: loads.judged(loads.rate(setting, case, entry, args.seconds))
                    texts += [f"Start {start}: {TAILS.format(**vars(args))}", tails(subject, load, args.rounds)]
                else:
                    case = CASES["small"]
                    subject.peer.check(case)
                    load = lambda: loads.judged(loads.wrk(setting, case, entry, args.seconds))
                    load()
                    seen += costs(subject, load, args.rounds)
            finally:
                subject.peer.stop()
    except (PeerError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"cost.py: {error}", file=sys.stderr)
        return 2
    finally:
        for helper in behind:
            helper.stop()
    print("\n\n".join(texts if args.lines else [COSTS.format(**vars(args)), cost_table(seen)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
