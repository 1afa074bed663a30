#!/usr/bin/env python3
"""Draws the pictures of the docs: docs/src/pictures/NAME.svg, one for each function below.

    docs/pictures.py            writes them
    docs/pictures.py --check    says which are not in step, and fails if any is

Colours follow the reader's scheme, and each picture has a ground of its own, so that it can be read
on any page. Python's standard library is all it takes.
"""

import sys
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "src" / "pictures"

STYLE = """
text { font: 14px system-ui, sans-serif; fill: var(--ink) }
.small { font-size: 12px; fill: var(--soft) } .bold { font-weight: 600 }
.code { font-family: ui-monospace, monospace; font-size: 13px }
.over { paint-order: stroke; stroke: var(--ground); stroke-width: 5px }
.ground { fill: var(--ground) } .box { fill: var(--box); stroke: var(--line); stroke-width: 1.5 }
.good { fill: var(--good); stroke: var(--good-line); stroke-width: 1.5 }
.bad { fill: var(--bad); stroke: var(--bad-line); stroke-width: 1.5 }
.warn { fill: var(--warn); stroke: var(--warn-line); stroke-width: 1.5 }
.dim { fill: none; stroke: var(--line); stroke-dasharray: 4 4 }
.arrow { fill: none; stroke: var(--ink); stroke-width: 1.5 } .head { fill: var(--ink) }
.rule { fill: none; stroke: var(--line) } .curve { fill: none; stroke: var(--good-line); stroke-width: 2.5 }
svg { --ground: #fff; --ink: #1b1f24; --soft: #57606a; --line: #8c959f; --box: #f3f5f7;
 --good: #dcf5e3; --good-line: #1a7f37; --bad: #ffe3e0; --bad-line: #c4261d;
 --warn: #fff3cd; --warn-line: #9a6700 }
@media (prefers-color-scheme: dark) { svg { --ground: #12161c; --ink: #e6edf3; --soft: #9aa7b4;
 --line: #6b7683; --box: #1f262e; --good: #12351f; --good-line: #3fb950; --bad: #431a19;
 --bad-line: #f0685f; --warn: #3a2d08; --warn-line: #d9a520 } }
"""


class Picture:
    """What is drawn, in pixels from the upper left corner."""

    def __init__(self, says, width, height):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{escape(says)}</title><style>{STYLE}</style>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
            'markerHeight="8" orient="auto-start-reverse"><path class="head" d="M0 0 10 5 0 10z"/>'
            "</marker></defs>",
            f'<rect class="ground" width="{width}" height="{height}" rx="8"/>',
        ]

    def text(self, x, y, words, kind="", at="start"):
        self.parts.append(
            f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{at}">{escape(words)}</text>'
        )

    def box(self, x, y, width, height, lines, kind="box", code=False):
        """A box with lines in its middle; the first of several is bold."""
        self.parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'
        )
        lines = [lines] if isinstance(lines, str) else lines
        top = y + height / 2 + 5 - (len(lines) - 1) * 9
        for number, line in enumerate(lines):
            bold = "bold" if number == 0 and len(lines) > 1 else "small" if number else ""
            self.text(x + width / 2, top + number * 18, line, f"{bold} code" if code else bold, "middle")

    def arrow(self, points, label="", where=None, both=False, at="middle"):
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        self.parts.append(f'<path class="arrow" d="{path}" marker-end="url(#head)"{start}/>')
        if label:
            (x1, y1), (x2, y2) = points[0], points[-1]
            x, y = where or ((x1 + x2) / 2, (y1 + y2) / 2 - 7)
            for number, line in enumerate(label.split("\n")):
                self.text(x, y + 16 * number, line, "small", at)

    def path(self, points, kind="rule"):
        path = "M" + " L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="{path}"/>')

    def svg(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def routing():
    p = Picture("Routes in order of precedence, and which one a request takes", 760, 330)
    p.text(20, 32, "GET /v1/users    Host: API.example.com:8080", "code bold")
    p.text(20, 54, "is compared as api.example.com, without case, port and trailing dot", "small")
    bands = [("exact host", 75, 128), ("wildcard host", 211, 40), ("any host", 259, 40)]
    for name, y, height in bands:
        p.box(20, y, 120, height, name, "dim")
    rows = [
        (75, "canary", "api.example.com  /v1  X-Canary: 1", "the field is missing", "bad"),
        (119, "api", "api.example.com  /v1", "takes it", "good"),
        (163, "old", "api.example.com  /", "shorter prefix: not reached", "box"),
        (211, "site", "*.example.com  /v1/users", "not reached", "box"),
        (259, "rest", "(any)  /", "not reached", "box"),
    ]
    for y, name, rule, why, kind in rows:
        p.box(155, y, 585, 40, "", kind)
        p.text(170, y + 25, name, "bold")
        p.text(235, y + 25, rule, "code")
        p.text(725, y + 25, why, "small", "end")
    p.text(155, 318, "within one host: the longer prefix first; then those with conditions; then the file's order", "small")
    return p


def client_address():
    p = Picture("The client's address is the first from the right that is not trusted", 760, 270)
    for x, name, address, kind in [
        (20, "client", "203.0.113.7", "warn"),
        (210, "CDN", "198.51.100.4", "good"),
        (400, "balancer", "10.0.0.2", "good"),
        (590, "l7rp", "sees the peer 10.0.0.2", "box"),
    ]:
        p.box(x, 20, 150, 50, [name, address], kind)
    for x in (170, 360, 550):
        p.arrow([(x, 45), (x + 38, 45)])
    p.text(20, 110, "X-Forwarded-For as it arrives:", "small")
    p.text(590, 110, "and the peer itself:", "small")
    for x, address, says, kind in [
        (20, "1.2.3.4", "the client made it up", "bad"),
        (210, "203.0.113.7", "not trusted: the client", "warn"),
        (400, "198.51.100.4", "trusted: go on", "good"),
        (590, "10.0.0.2", "trusted: go on", "good"),
    ]:
        p.box(x, 120, 150, 50, [address, says], kind)
    p.arrow([(665, 195), (285, 195), (285, 174)])
    p.text(475, 213, "read from the right, up to the first that is not in trusted_proxies", "small", "middle")
    p.text(20, 250, "trusted_proxies: [198.51.100.0/24, 10.0.0.0/8]", "code")
    return p


def balancing():
    p = Picture("Who may be chosen, and the better of two drawn at random", 760, 330)
    p.text(20, 30, "1  who may be chosen", "bold")
    rows = [
        ("a", "12 ms, 3 in flight", "good", ""),
        ("b", "20 ms, 1 in flight", "good", ""),
        ("c", "9 ms, 8 in flight", "box", "at its max_in_flight"),
        ("d", "15 ms, 2 in flight", "good", ""),
        ("e", "", "bad", "breaker open"),
        ("f", "", "bad", "health checks failed"),
        ("g", "", "box", "backup: others are there"),
    ]
    for number, (name, load, kind, why) in enumerate(rows):
        y = 45 + 38 * number
        p.box(20, y, 310, 30, "", kind)
        p.text(34, y + 20, name, "bold")
        p.text(60, y + 20, load or why, "small")
        if load and why:
            p.text(318, y + 20, why, "small", "end")
    p.text(400, 30, "2  two of them, at random", "bold")
    p.box(400, 60, 150, 66, ["a", "12 ms × (1 + 3)", "= 48"], "box")
    p.box(590, 60, 150, 66, ["b", "20 ms × (1 + 1)", "= 40"], "good")
    p.arrow([(332, 60), (398, 84)])
    p.arrow([(332, 98), (366, 140), (620, 140), (620, 128)])
    p.text(400, 190, "3  the lower score wins", "bold")
    p.box(590, 170, 150, 34, "to b", "good")
    p.arrow([(690, 128), (690, 168)])
    p.text(400, 240, "p2c-ewma: latency average × (1 + in flight).", "small")
    p.text(400, 260, "Random pairs keep many proxies from all choosing", "small")
    p.text(400, 278, "the same upstream at the same moment.", "small")
    return p


def health_checks():
    p = Picture("How an upstream comes in and goes out", 760, 300)
    p.box(30, 100, 150, 56, ["new", "gets no traffic"], "warn")
    p.box(320, 100, 150, 56, ["in", "may be chosen"], "good")
    p.box(600, 100, 130, 56, ["out", "gets no traffic"], "bad")
    p.arrow([(180, 128), (318, 128)], "healthy_threshold (2)\ngood probes, at once", (249, 96))
    p.arrow([(470, 114), (598, 114)], "unhealthy_threshold (3)\nbad probes in a row", (534, 76))
    p.arrow([(598, 142), (472, 142)], "healthy_threshold (2)\ngood probes in a row", (534, 168))
    p.arrow([(395, 156), (395, 225), (665, 225), (665, 158)], "passive: too many real requests failed, or were slow", (530, 245))
    p.arrow([(105, 100), (105, 40), (665, 40), (665, 98)], "unhealthy_threshold (3) bad probes", (385, 32))
    p.text(30, 285, "One probe to the contrary begins the count anew. Only probes bring an upstream back.", "small")
    return p


def circuit_breaker():
    p = Picture("States of a circuit breaker", 760, 320)
    p.box(40, 110, 180, 70, ["closed", "all are let in"], "good")
    p.box(540, 110, 180, 70, ["open", "nobody is let in"], "bad")
    p.box(290, 220, 180, 70, ["half-open", "half_open_probes (5) let in"], "warn")
    p.arrow([(220, 130), (538, 130)], "more than failure_ratio (0.5) of the last\n100 results within 30 s failed, of at least 20", (380, 96))
    p.arrow([(630, 180), (630, 255), (472, 255)], "the open time is over:\n1 s, then 2, 4 … 60 s", (485, 275), at="start")
    p.arrow([(435, 220), (435, 160), (538, 160)], "one fails:\ntwice as long", (448, 184), at="start")
    p.arrow([(288, 255), (130, 255), (130, 182)], "all 5 succeed", (205, 275))
    p.text(40, 40, "A result counts when the last octet has come, and only in the state that let the request in.", "small")
    p.text(40, 58, "Clients that leave count for nothing.", "small")
    return p


def retries():
    p = Picture("When another try is made, and when not", 760, 350)
    p.box(20, 20, 200, 44, "a try has failed")
    p.box(20, 110, 200, 56, ["was anything sent?", "connection, TLS"], "warn")
    p.box(20, 220, 200, 56, ["may it be repeated?", "the route's retry"], "warn")
    p.arrow([(120, 64), (120, 108)])
    p.arrow([(120, 166), (120, 218)], "yes, or an answer came", (130, 196), at="start")
    p.box(330, 110, 400, 56, ["elsewhere, at once", "another upstream; any method; costs nothing"], "good")
    p.arrow([(220, 138), (328, 138)], "no")
    p.box(330, 205, 400, 86, ["a retry, after backoff × ½ to 1", "method, status, attempts, body, time are all as listed;", "the pool's budget has a token; no Retry-After"], "good")
    p.arrow([(220, 248), (328, 248)], "yes")
    p.box(20, 310, 710, 30, "the end: the client gets the last upstream's answer, or one of l7rp; no_retry in the log says why", "box")
    p.arrow([(120, 276), (120, 308)], "no", (130, 297), at="start")
    return p


def hedging():
    p = Picture("A slow first try gets company, and the first good answer wins", 760, 260)
    for ms in range(0, 301, 50):
        x = 120 + ms * 2
        p.path([(x, 40), (x, 190)])
        p.text(x, 30, f"{ms} ms", "small", "middle")
    p.text(20, 85, "first try", "bold")
    p.box(120, 65, 340, 34, "upstream a: nothing yet", "warn")
    p.text(20, 145, "hedge", "bold")
    p.box(320, 125, 140, 34, "upstream b", "good")
    p.arrow([(320, 101), (320, 123)], "hedge_after: 100ms", (312, 118), at="end")
    p.arrow([(460, 142), (530, 142)])
    p.text(540, 147, "200: it wins", "over")
    p.text(480, 87, "given up at 170 ms: held against nobody", "small over")
    p.text(20, 220, "A failure never wins while the other may still answer. A hedge costs one from the retry budget,", "small")
    p.text(20, 240, "and goes only to an upstream whose breaker is closed.", "small")
    return p


def rate_limits():
    p = Picture("A bucket of tokens: burst and rate", 760, 300)
    left, bottom, scale = 70, 230, 8
    p.path([(left, 60), (left, bottom), (730, bottom)])
    for tokens in (0, 10, 20):
        p.text(left - 10, bottom - tokens * scale + 5, str(tokens), "small", "end")
    p.path([(left, bottom - 20 * scale), (730, bottom - 20 * scale)])
    p.text(left, 45, "tokens of one client (burst: 20, per_ip_rps: 10)", "small")
    # 20 at once, then 15 a second for two seconds, then nothing.
    x = lambda seconds: left + 120 * seconds
    points = [(0, 20), (0.5, 20), (0.5, 0), (1.0, 0), (2.5, 0), (4.5, 20), (5.4, 20)]
    p.path([(x(t), bottom - n * scale) for t, n in points], "curve")
    p.text(x(0.5) + 8, 130, "20 at once pass:", "")
    p.text(x(0.5) + 8, 148, "the burst", "small")
    p.box(x(0.55), bottom - 42, 232, 34, "15 a second: 5 get 429", "bad")
    p.text(x(3.7) + 10, 160, "saved up again, 10 a second", "small")
    for seconds in range(6):
        p.text(x(seconds), bottom + 20, f"{seconds} s", "small", "middle")
    p.text(left, 280, "What is refused costs no token; Retry-After says when one will be there.", "small")
    return p


def overload():
    p = Picture("Each limit, in the order in which a request meets it", 760, 330)
    rows = [
        ("listeners[].max_connections", "capacity_connections", "before anything is read"),
        ("middleware: rate_limit", "rate_limited", "429; all others are 503"),
        ("limits.max_in_flight", "capacity_process", "the whole process"),
        ("listeners[].max_in_flight", "capacity_listener", ""),
        ("upstream_pools[].max_in_flight", "capacity_pool", ""),
        ("upstreams[].max_in_flight", "capacity_upstream", "all who may be chosen"),
    ]
    for number, (key, reason, note) in enumerate(rows):
        y = 20 + 44 * number
        p.box(20, y, 280, 32, key, "box", code=True)
        p.arrow([(300, y + 16), (378, y + 16)], "full", (339, y + 11))
        p.box(380, y, 190, 32, reason, "bad", code=True)
        p.text(580, y + 21, note, "small")
        if number:
            p.arrow([(160, y - 12), (160, y - 1)])
    p.box(20, 290, 280, 32, "an upstream", "good")
    p.arrow([(160, 272), (160, 289)])
    p.text(380, 311, "Never a queue: who does not get a place is told so at once.", "small")
    return p


def framing():
    p = Picture("One message, two readers, two ends: why it is refused", 760, 330)
    p.text(20, 30, "POST /a HTTP/1.1", "code")
    p.text(20, 50, "Content-Length: 40", "code bold")
    p.text(20, 70, "Transfer-Encoding: chunked", "code bold")
    p.text(20, 110, "who goes by the length", "small")
    p.box(20, 118, 690, 34, "0 ⏎ ⏎ GET /admin HTTP/1.1 ⏎ …   all of it is the body", "good", code=True)
    p.text(20, 180, "who goes by the chunks", "small")
    p.box(20, 188, 90, 34, "0 ⏎ ⏎", "good", code=True)
    p.box(120, 188, 590, 34, "GET /admin HTTP/1.1 ⏎ …   another request, which nobody has checked", "bad", code=True)
    p.box(20, 250, 330, 44, ["l7rp: 400, and the connection closes", "content_length_with_transfer_encoding"], "box")
    p.text(370, 268, "Nothing of it goes to an upstream. What l7rp does pass on", "small")
    p.text(370, 286, "it has framed itself, so that there is one way to read it.", "small")
    return p


def certificates():
    p = Picture("Which certificate a client is shown, and when one is renewed", 760, 340)
    p.box(20, 30, 190, 50, ["the client asks for", "shop.eu.example.com"], "box")
    rows = [
        ("exactly this name", "shop.eu.example.com", "good"),
        ("the longest wildcard", "*.eu.example.com", "box"),
        ("the first in certs", "for names that nobody has", "box"),
    ]
    for number, (rule, name, kind) in enumerate(rows):
        y = 20 + 54 * number
        p.box(320, y, 420, 44, [f"{number + 1}  {rule}", name], kind)
    p.arrow([(210, 55), (265, 55), (265, 42), (318, 42)])
    p.arrow([(530, 65), (530, 73)])
    p.arrow([(530, 119), (530, 127)])
    p.text(20, 215, "A certificate by ACME, of 90 days", "bold")
    p.box(20, 230, 480, 36, "60 days: it is served", "good")
    p.box(500, 230, 240, 36, "30 days: it is asked for again", "warn")
    p.text(478, 290, "renewal begins here, or somewhat sooner;", "small")
    p.text(478, 308, "after a failure again: 1, 4, 16 min …", "small")
    p.text(20, 290, "day 0", "small")
    p.text(740, 328, "day 90", "small", "end")
    p.arrow([(500, 275), (500, 268)])
    return p


PICTURES = [
    routing, client_address, balancing, health_checks, circuit_breaker, retries, hedging,
    rate_limits, overload, framing, certificates,
]


def main():
    wanted = {f"{draw.__name__.replace('_', '-')}.svg": draw().svg() for draw in PICTURES}
    if sys.argv[1:] == ["--check"]:
        there = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
        odd = sorted(name for name in wanted | there if wanted.get(name) != there.get(name))
        for name in odd:
            print(f"docs/src/pictures/{name} is not in step: run docs/pictures.py", file=sys.stderr)
        return 1 if odd else 0
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    for name, svg in wanted.items():
        (FOLDER / name).write_text(svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
