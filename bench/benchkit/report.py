"""Turns samples into figures and the record of a run into tables, for a terminal and as Markdown."""

import re
import statistics
import textwrap

Sample = dict[str, float | None]
ERRED = "†"
LONG_REASON = 300


def summary(samples: list[Sample]) -> Sample:
    """The median of each figure, with the least and the greatest processor time, and the most errors."""
    out: Sample = {}
    for key in samples[0]:
        known = [s[key] for s in samples if s[key] is not None]
        out[key] = statistics.median(known) if known else None
    times = [s["us"] for s in samples]
    errors = max(s["errors"] for s in samples)
    return out | {"us_min": min(times), "us_max": max(times), "errors": errors, "rounds": len(samples)}


def number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


COLUMNS = (
    ("proxy", lambda name, s: name),
    ("CPU µs", lambda name, s: number(s["us"], 2)),
    ("min–max", lambda name, s: f"{s['us_min']:.2f}–{s['us_max']:.2f}"),
    ("per s", lambda name, s: number(s["per_second"], 0)),
    ("p50 ms", lambda name, s: number(s["p50"], 2)),
    ("p99 ms", lambda name, s: number(s["p99"], 2)),
    ("p99.9 ms", lambda name, s: number(s["p999"], 2)),
    ("proxy core %", lambda name, s: number(s["proxy_core"], 0)),
    ("load core %", lambda name, s: number(s["load_core"], 0)),
    ("RSS MiB", lambda name, s: number(s["memory"], 0)),
    ("errors", lambda name, s: number(s["errors"], 0)),
)
IDLE_COLUMN = ("KiB each idle", lambda name, s: number(s.get("idle_kib"), 2))


def _table(results: dict[str, Sample]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of one case's table, the cheapest proxy first."""
    ranked = sorted(results.items(), key=lambda item: item[1]["us"])
    has_idle = any(s.get("idle_kib") is not None for s in results.values())
    columns = (*COLUMNS, IDLE_COLUMN) if has_idle else COLUMNS
    return [title for title, _ in columns], [[show(name, s) for _, show in columns] for name, s in ranked]


def text_table(results: dict[str, Sample]) -> str:
    """Aligned columns for a terminal."""
    titles, cells = _table(results)
    rows = [titles, *cells]
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    lines = []
    for row in rows:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows))


def case_table(results: dict[str, Sample]) -> str:
    """All figures of one case."""
    return markdown(*_table(results))


def kept_apart(record: dict) -> tuple[list[str], list[str]]:
    """The proxies that stand for themselves; and the variants, each beside the one it varies."""
    measured = record["versions"]
    variants = {name: of for name, of in record["variants"].items() if of in measured}
    peers = [name for name in measured if name not in variants]
    family: list[str] = []
    for peer in peers:
        if own := [name for name, of in variants.items() if of == peer]:
            family += [peer, *own]
    return peers, family


def _cell(sample: Sample | None, least: float | None) -> str:
    """CPU µs, bold if the least, marked if there were errors."""
    if not sample:
        return number(None, 1)
    text = number(sample["us"], 1)
    return (f"**{text}**" if sample["us"] == least else text) + (ERRED if sample["errors"] else "")


def compared(record: dict, names: list[str], cases: list[str], bold: bool = False) -> str:
    """CPU µs of each case and proxy; `bold` marks the least of a case."""
    rows = []
    for case in cases:
        results = record["cases"][case]["summary"]
        times = [results[name]["us"] for name in names if name in results]
        if times:
            rows.append([case, *(_cell(results.get(name), min(times) if bold else None) for name in names)])
    return markdown(["case", *names], rows)


def overview(record: dict) -> str:
    """The tables for a first look: proxies by case, then variants by case."""
    peers, family = kept_apart(record)
    parts = [compared(record, peers, list(record["cases"]), bold=True)]
    if family:
        variants = set(record["variants"])
        cases = [name for name, case in record["cases"].items() if variants & set(case["summary"])]
        parts.append(compared(record, family, cases))
    if ERRED in "".join(parts):
        parts.append(f"{ERRED} with errors, at most one for a hundred right answers; with more there is no figure.")
    return "\n\n".join(parts)


def without_folders(text: str) -> str:
    """Text with absolute paths cut to their last part: the folders are the machine's own matter."""
    return re.sub(r"(?<![\w.:/@-])/(?:[^\s/,:]+/)+", "", text)


def left_out(record: dict) -> str:
    """What was not asked for, and what was asked for and could not be measured, by proxy and reason."""
    lines = [f"- not asked for: {what} {', '.join(names)}" for what, names in record["not_asked"].items() if names]
    for peer, cases in record["left_out"].items():
        for why in dict.fromkeys(cases.values()):
            names = ", ".join(case for case, its in cases.items() if its == why)
            reason = textwrap.shorten(without_folders(why).removeprefix(f"{peer}: "), LONG_REASON)
            lines.append(f"- {peer} ({names}): {reason}")
    return "\n".join(lines) or "Nothing."


def document(record: dict) -> str:
    """The whole of a run as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = ["# Results", f"{record['machine']}; {record['setting']}.", f"{versions}.", f"By `{record['command']}`."]
    parts += ["## CPU µs for each request, median", overview(record)]
    parts += ["## Left out", left_out(record), "## All figures"]
    for name, case in record["cases"].items():
        parts.append(f"### {name}: {case['about']}\n\n{case_table(case['summary'])}")
    return "\n\n".join(parts) + "\n"


def ratio_line(case: str, first: str, second: str, results: dict[str, Sample], key: str) -> tuple[str, float]:
    """The one line of the quick mode, and the ratio."""
    a, b = results[first][key], results[second][key]
    return f"{case}: {first} {a:.1f} µs / {second} {b:.1f} µs = {a / b:.2f}", a / b
