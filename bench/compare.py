#!/usr/bin/env python3
"""Compares HTTP reverse proxies: processor time for each request, throughput, latency.

Each proxy is bound to its own core(s); the backend and the load tool to the others. All proxies stay up during the
run, one at a time is loaded, and the rounds go through all proxies in turn, so that a slow spell of the machine
meets all of them. README.md tells the method and the traps.

  compare.py                                        all peers, all cases
  compare.py -p l7rp,nginx,./mine.toml -c small,16k
  compare.py --quick small -p l7rp,haproxy --max-ratio 0.9
"""

import argparse
import json
import os
import shlex
import signal
import sys
from datetime import datetime, timezone
from pathlib import Path

from benchkit import machine, report
from benchkit.bench import MISFORTUNES, REPOSITORY, Bench, known_peers
from benchkit.cases import CASES, Case
from benchkit.peers import PeerError

WRONG_USAGE = 2  # or nothing could be measured
OVER_RATIO = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("-p", "--proxies", help="names of peers/ folders or paths of TOML files, by comma; default: all in peers/")
    add("-c", "--cases", help="cases, by comma; default: all")
    add("-r", "--rounds", type=int, default=3)
    add("-d", "--seconds", type=int, default=3, help="length of a sample")
    add("--warm", type=int, default=1, help="seconds of load before the first sample of a case")
    add("--calm", type=float, default=4, help="seconds to wait, at most, for a quiet machine before a sample")
    add("--cores", type=int, default=1, help="cores, and threads, for the proxy")
    add("--proxy-cpus", help="which CPUs the proxy gets, by comma; default: the first ones")
    add("--load-cpus", help="which CPUs backend and load tool get; default: the others, or the same if none is left")
    add("--rate", type=int, default=10000, help="requests per second of the case openloop")
    add("--reference", default="l7rp", help="whose capacity openloop50 and openloop80 take a share of")
    add("--l7rp", help="the program under test; default: target/release/l7rp of the repository")
    add("--first-port", type=int, default=18100, help="ports are counted from here, ten for each proxy")
    add("--backend-port", type=int, default=18000, help="and the next one is the collector's")
    add("--work", default=os.environ.get("BENCH_WORK", REPOSITORY / "target/bench"),
        help="work folder; default: $BENCH_WORK or target/bench of the repository")
    add("--out", help="writes OUT.json and OUT.md; default: results in the work folder")
    add("--quick", metavar="CASE", help="two proxies, one case, one line with their ratio, in less than a minute")
    add("--max-ratio", type=float, help=f"with --quick: exit status {OVER_RATIO} if the ratio is greater")
    add("--stat", choices=("median", "min"), default="min", help="with --quick: which figure of the rounds counts")
    add("--list", action="store_true", help="lists the cases and the peers")
    return parser.parse_args()


def list_known() -> None:
    for case in CASES.values():
        print(f"{case.name:12} {case.about}")
    print("peers:", " ".join(known_peers()))


def measured(bench: Bench, case: Case) -> dict | None:
    """One case with all proxies; prints its table."""
    try:
        case = bench.with_rate(case)
    except MISFORTUNES as error:
        for peer in bench.peers:
            peer.fail(case, error)
        return None
    samples = bench.run_case(case)
    results = {name: report.summary(taken) for name, taken in samples.items()}
    if not results:
        return None
    about = f"{case.about} (each {case.unit})" + (f", {case.rate}/s" if case.rate else "")
    print(f"\n== {case.name}: {about}\n{report.text_table(results)}", flush=True)
    return {"about": about, "rate": case.rate, "summary": results, "samples": samples}


def full(bench: Bench, cases: list[Case]) -> int:
    """Runs the cases, printing each table when it is ready; writes JSON and Markdown."""
    out = Path(bench.args.out) if bench.args.out else bench.work / "results"
    record = {
        "machine": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC; {machine.describe()}",
        "setting": f"proxy on CPU {bench.proxy_cores}, load on {bench.load_cores}; "
                   f"{bench.args.rounds} rounds of {bench.args.seconds} s",
        "command": report.without_folders(shlex.join(["compare.py", *sys.argv[1:]])),
        "versions": {peer.name: peer.version() for peer in bench.peers},
        "variants": {peer.name: of for peer in bench.peers if (of := peer.is_variant_of())},
        "not_asked": {
            "proxies": [name for name in known_peers() if name not in {peer.name for peer in bench.asked}],
            "cases": [name for name in CASES if name not in {case.name for case in cases}],
        },
        "cases": {},
    }
    known = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    print(record["machine"], record["setting"], known, sep="\n", flush=True)
    for case in cases:
        if seen := measured(bench, case):
            record["cases"][case.name] = seen
        record["left_out"] = {peer.name: peer.failed for peer in bench.asked if peer.failed}
        out.with_suffix(".json").write_text(json.dumps(record, indent=1))
        out.with_suffix(".md").write_text(report.document(record))
    return 0 if record["cases"] else WRONG_USAGE


def quick(bench: Bench, case: Case) -> int:
    """One line for two proxies; the exit status tells whether the ratio is allowed."""
    samples = bench.run_case(bench.with_rate(case))
    if len(samples) != 2:
        print(f"{case.name}: only {', '.join(samples) or 'none'} could be measured", file=sys.stderr)
        return WRONG_USAGE
    results = {name: report.summary(taken) for name, taken in samples.items()}
    first, second = (peer.name for peer in bench.peers)
    line, ratio = report.ratio_line(case.name, first, second, results, "us_min" if bench.args.stat == "min" else "us")
    print(line)
    return OVER_RATIO if bench.args.max_ratio is not None and ratio > bench.args.max_ratio else 0


def main() -> int:
    args = arguments()
    if args.list:
        list_known()
        return 0
    names = [args.quick] if args.quick else args.cases.split(",") if args.cases else list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        print(f"no such case: {', '.join(unknown)} (see --list)", file=sys.stderr)
        return WRONG_USAGE
    if args.quick:
        args.rounds, args.seconds, args.calm = max(args.rounds, 5), min(args.seconds, 2), min(args.calm, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bench = None
    try:
        bench = Bench(args)
        if args.quick and len(bench.peers) != 2:
            raise PeerError("--quick compares two proxies: -p ONE,TWO")
        bench.start()
        return quick(bench, CASES[args.quick]) if args.quick else full(bench, [CASES[name] for name in names])
    except MISFORTUNES as error:
        print(error, file=sys.stderr)
        return WRONG_USAGE
    finally:
        if bench:
            bench.stop()


if __name__ == "__main__":
    sys.exit(main())
