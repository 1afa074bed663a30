#!/usr/bin/env python3
"""Writes what a run has found where people read it: RESULTS.md and plots/ here, and pictures and tables in the
repository's README.md, between the lines <!-- bench --> and <!-- /bench -->. What the run has not found goes.

  publish.py RESULTS.json
"""

import json
import sys
from pathlib import Path

from benchkit import plots, report

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- bench -->\n", "<!-- /bench -->"
KEEPS_UP = 0.97


def into(text: str, part: str) -> str:
    """`text` with what is between the marks replaced."""
    before, found, rest = text.partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not (found and ends):
        raise ValueError(f"README.md lacks {BEGIN.strip()} or {END}")
    return f"{before}{BEGIN}\n{part}\n\n{END}{after}"


def time_panels(record: dict) -> list[tuple[str, list[plots.Bar]]]:
    """A panel for each case; then the first case again, with the variants."""
    peers, family = report.kept_apart(record)
    wanted = [(name, name, peers) for name in record["cases"]]
    first = next(iter(record["cases"]))
    if family:
        wanted.append((first, f"{first}, more switched on", family))
    panels = []
    for case, title, names in wanted:
        seen = record["cases"][case]["summary"]
        bars = [(name, seen[name]["us"], f"{seen[name]['us']:.1f}") for name in names if name in seen]
        if bars:
            panels.append((title, bars))
    return panels


def latency_panels(record: dict) -> list[tuple[str, list[plots.Bar]]]:
    """A panel for each case with a constant rate."""
    panels = []
    for name, case in record["cases"].items():
        if not case.get("rate"):
            continue
        bars = []
        for peer in report.kept_apart(record)[0]:
            if seen := case["summary"].get(peer):
                behind = "" if seen["per_second"] >= KEEPS_UP * case["rate"] else ", falls behind"
                bars.append((peer, seen["p99"], f"{seen['p99']:.2f} (p99.9 {seen['p999']:.2f}){behind}"))
        panels.append((f"{name}: {case['rate']}/s", bars))
    return panels


def pictures(record: dict) -> dict[str, tuple[str, str]]:
    """Each plot's file: what it shows, and its text, which is empty where the run has nothing for it."""
    late = latency_panels(record)
    return {
        "cpu.svg": ("CPU µs for each request, by case and proxy", plots.processor_time(time_panels(record))),
        "openloop.svg": ("p99 at a constant rate, by proxy", plots.latency(late) if late else ""),
    }


def shown(record: dict) -> str:
    """What stands in the README between the marks."""
    parts = [f"{record['machine']}; by `{record['command']}`."]
    parts += [f"![{title}](bench/plots/{file})" for file, (title, text) in pictures(record).items() if text]
    parts += ["<details><summary>Table: CPU µs for each request</summary>", report.overview(record), "</details>"]
    return "\n\n".join(parts)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    record = json.loads(Path(sys.argv[1]).read_text())
    if not record["cases"]:
        print("publish.py: no case could be measured", file=sys.stderr)
        return 2
    text = into(README.read_text(), shown(record))
    folder = HERE / "plots"
    folder.mkdir(exist_ok=True)
    for file, (_, image) in pictures(record).items():
        if image:
            (folder / file).write_text(image)
        else:
            (folder / file).unlink(missing_ok=True)
    (HERE / "RESULTS.md").write_text(report.document(record))
    README.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
