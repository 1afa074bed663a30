"""One run: the proxies and what stands behind them, the rounds, the figures of a sample."""

import dataclasses
import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

from . import helpers, loads, machine, report
from .cases import CASES, Case
from .peers import PEERS, Peer, PeerError

REPOSITORY = Path(__file__).resolve().parent.parent.parent
MOST_UPSTREAMS = max(case.shape.upstreams for case in CASES.values())
CAPACITY_SAMPLES = 3
MISFORTUNES = (PeerError, RuntimeError, OSError, subprocess.TimeoutExpired)


def known_peers() -> list[str]:
    """The program under test first, then whom it is compared with most."""
    names = sorted(p.parent.name for p in PEERS.glob("*/peer.toml"))
    order = {"l7rp": 0, "nginx": 1, "haproxy": 2}
    return sorted(names, key=lambda name: order.get(name.split("-")[0], len(order)))


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def chosen_cores(args: Namespace) -> tuple[list[int], list[int]]:
    """The proxy's CPUs and those of the load."""
    every = sorted(os.sched_getaffinity(0))
    proxy = numbers(args.proxy_cpus) if args.proxy_cpus else every[: args.cores]
    rest = [cpu for cpu in every if cpu not in proxy]
    return proxy, numbers(args.load_cpus) if args.load_cpus else rest or proxy


def make_certificate(folder: Path) -> dict[str, Path]:
    """A self-signed P-256 certificate for localhost, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"cert": folder / "cert.pem", "key": folder / "key.pem", "pem": folder / "both.pem"}
    if not files["pem"].exists():
        subprocess.run(
            [
                "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-days", "3650", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
                "-keyout", files["key"], "-out", files["cert"],
            ],
            check=True, capture_output=True,
        )
        files["pem"].write_text(files["cert"].read_text() + files["key"].read_text())
    return files


class Bench:
    """The proxies, what stands behind them, and the settings of one run."""

    def __init__(self, args: Namespace):
        self.args = args
        self.work = Path(args.work).resolve()
        self.proxy_cores, self.load_cores = chosen_cores(args)
        common = {
            "work": self.work, "bin": self.work / "bin", "first_port": args.first_port,
            "files": machine.raise_file_limit(), "cores": args.cores,
            "l7rp": Path(args.l7rp).resolve() if args.l7rp else REPOSITORY / "target/release/l7rp",
            "backend": f"127.0.0.1:{args.backend_port}", "backend_port": args.backend_port,
            "collector": f"127.0.0.1:{args.backend_port + 1}",
        } | make_certificate(self.work / "tls")
        sources = args.proxies.split(",") if args.proxies else known_peers()
        self.peers = [Peer.create(source, i, common, self.proxy_cores) for i, source in enumerate(sources)]
        if len({peer.name for peer in self.peers}) < len(self.peers):
            raise PeerError("two proxies have the same name")
        self.asked = list(self.peers)
        self.setting = loads.Setting(self.load_cores, common["bin"], common["l7rp"])
        self.helpers: list[helpers.Helper] = []
        self.capacity: float | None = None

    def leave_out(self, peer: Peer, error: Exception) -> None:
        print(f"left out: {error}", file=sys.stderr)
        peer.failed["all cases"] = str(error)
        self.peers.remove(peer)

    def start(self) -> None:
        """Starts the backend and every proxy; one that will not start is left out, with a message."""
        port = self.args.backend_port
        self.helpers.append(helpers.backend(self.work / "bin", port, self.load_cores, MOST_UPSTREAMS))
        tracing = [peer for peer in self.peers if peer.told.get("collector")]
        try:
            if tracing:
                self.helpers.append(helpers.collector(port + 1, self.load_cores))
        except PeerError as error:
            for peer in tracing:
                self.leave_out(peer, PeerError(f"{peer.name}: {error}"))
        for peer in list(self.peers):
            try:
                peer.start()
            except MISFORTUNES as error:
                self.leave_out(peer, error)

    def stop(self) -> None:
        for peer in self.peers:
            peer.stop()
        for helper in self.helpers:
            helper.stop()

    def load(self, peer: Peer, case: Case, seconds: int) -> loads.Outcome:
        return loads.judged(loads.TOOLS[case.tool](self.setting, case, peer.port(case.listener), seconds))

    def sample(self, peer: Peer, case: Case, is_fresh: bool) -> report.Sample:
        """Loads one proxy once; returns all figures. `is_fresh`: it was started for this case."""
        lean = machine.memory_mib(peer.family())
        idle = loads.Idle(peer.port(case.listener), case.idle) if case.idle else None
        grown = machine.memory_mib(peer.family()) - lean
        closed = 0
        try:
            began = time.monotonic()
            before = machine.times(peer.family())
            cores = (machine.core_times(self.proxy_cores), machine.core_times(self.load_cores))
            seen = self.load(peer, case, self.args.seconds)
            took = time.monotonic() - began
            pids = peer.family()
            us, user, system = (seconds * 1e6 / seen.done for seconds in machine.spent(before, machine.times(pids)))
            cores_after = (machine.core_times(self.proxy_cores), machine.core_times(self.load_cores))
            memory = machine.memory_mib(pids)
            peer.check(case)
        finally:
            if idle:
                closed = idle.release()
            peer.shorten_logs()
        if closed > loads.MOST_ERRORS * case.idle:
            raise PeerError(f"it closed {closed} of {case.idle} idle connections")
        return {
            "us": us, "user": user, "system": system,
            "per_second": seen.done / took if case.tool == "handshakes" else seen.per_second,
            "p50": seen.p50, "p99": seen.p99, "p999": seen.p999,
            "proxy_core": machine.load_percent(cores[0], cores_after[0]),
            "load_core": machine.load_percent(cores[1], cores_after[1]),
            "memory": memory,
            "idle_kib": grown * 1024 / case.idle if idle and is_fresh else None,
            "errors": seen.errors + closed,
        }

    def reference(self) -> Peer:
        """The proxy whose capacity the rates are shares of."""
        named = [peer for peer in self.peers if peer.name == self.args.reference]
        if not named and not self.peers:
            raise PeerError("no proxy is left")
        return (named or self.peers)[0]

    def with_rate(self, case: Case) -> Case:
        """An open loop with its rate; the capacity is measured at its first use, by a closed loop."""
        if case.tool != "rate":
            return case
        if not case.share:
            return dataclasses.replace(case, rate=self.args.rate)
        peer = self.reference()
        if self.capacity is None:
            small = CASES["small"]
            peer.reshape(small.shape)
            peer.check(small)
            seen = [self.load(peer, small, self.args.seconds).per_second for _ in range(CAPACITY_SAMPLES)]
            self.capacity = statistics.median(seen)
            peer.shorten_logs()
        about = case.about.replace("the reference's capacity", f"{peer.name}'s capacity, {self.capacity:.0f}/s")
        return dataclasses.replace(case, rate=round(self.capacity * case.share), about=about)

    def able(self, case: Case) -> list[Peer]:
        """The proxies that have what the case needs and answer it rightly."""
        able = []
        for peer in self.peers:
            if lack := peer.lacks(case):
                peer.failed[case.name] = lack
                continue
            try:
                peer.reshape(case.shape)
                peer.check(case)
                able.append(peer)
            except MISFORTUNES as error:
                peer.fail(case, error)
        return able

    def run_case(self, case: Case) -> dict[str, list[report.Sample]]:
        """All rounds of one case; each round begins with another proxy. One that fails has no figure at all."""
        peers = self.able(case)
        samples: dict[str, list[report.Sample]] = {peer.name: [] for peer in peers}
        for number in range(self.args.rounds):
            turn = number % max(1, len(peers))
            for peer in peers[turn:] + peers[:turn]:
                if case.name in peer.failed:
                    continue
                try:
                    is_fresh = number == 0 and case.idle > 0
                    if is_fresh:
                        # Memory that earlier cases have left free would hide what idle connections take.
                        peer.restart()
                        peer.check(case)
                    if number == 0 and self.args.warm:
                        self.load(peer, case, self.args.warm)
                        peer.shorten_logs()
                    machine.wait_for_calm(self.proxy_cores + self.load_cores, self.args.calm)
                    samples[peer.name].append(self.sample(peer, case, is_fresh))
                except MISFORTUNES as error:
                    peer.fail(case, error)
        return {name: taken for peer in peers if (taken := samples[name := peer.name]) and case.name not in peer.failed}
