"""Plots as SVG text. Colours are of middle brightness on no background, so that they can be read on light and dark."""

import math
from html import escape

TEXT = "#768390"
OURS = "#2f81f7"
OTHERS = "#9aa4af"
LINE = 17  # height of a bar with its gap
TITLE = 24
GAP = 14
FONT = "font-family='ui-sans-serif, system-ui, sans-serif' font-size='12'"

Bar = tuple[str, float, str]  # who, how much, how it is written


def linear(value: float, greatest: float, width: float) -> float:
    """Length of a bar from zero."""
    return width * value / greatest if greatest > 0 else 0.0


def decades(values: list[float]) -> tuple[float, float]:
    """The powers of ten that enclose all positive values, at least one apart."""
    positive = [value for value in values if value > 0] or [1.0]
    low = math.floor(math.log10(min(positive)))
    high = max(low + 1, math.ceil(math.log10(max(positive))))
    return 10.0**low, 10.0**high


def logarithmic(value: float, low: float, high: float, width: float) -> float:
    """Length of a bar from `low`; what is less has none."""
    if value <= low:
        return 0.0
    return width * min(1.0, math.log10(value / low) / math.log10(high / low))


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' fill='{TEXT}' {more}>{escape(words)}</text>"


def _panel(x: float, y: float, title: str, bars: list[Bar], lengths: list[float], label: float) -> list[str]:
    """A title and a bar for each proxy, whose names have `label` pixels."""
    out = [_text(x, y + 15, title, "font-weight='600'")]
    for i, ((who, _, written), length) in enumerate(zip(bars, lengths)):
        top = y + TITLE + i * LINE
        colour = OURS if who.startswith("l7rp") else OTHERS
        out.append(_text(x + label - 6, top + 11, who, "text-anchor='end'"))
        out.append(f"<rect x='{x + label:.1f}' y='{top + 1:.1f}' width='{max(1, length):.1f}' height='12' "
                   f"rx='1.5' fill='{colour}'/>")
        out.append(_text(x + label + length + 5, top + 11, written))
    return out


def _image(width: float, height: float, title: str, parts: list[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
    head += f"viewBox='0 0 {width:.0f} {height:.0f}' role='img' {FONT}>"
    return "\n".join([head, f"<title>{escape(title)}</title>", *parts, "</svg>"]) + "\n"


def processor_time(panels: list[tuple[str, list[Bar]]]) -> str:
    """Bars of CPU µs, a panel for each case with a scale of its own."""
    columns, width, label, room = 3, 290, 84, 150
    parts, y = [_text(0, 14, "CPU µs for each request; shorter is better; each case has its own scale")], 26.0
    for start in range(0, len(panels), columns):
        row = panels[start : start + columns]
        for i, (title, bars) in enumerate(row):
            greatest = max(amount for _, amount, _ in bars)
            lengths = [linear(amount, greatest, room) for _, amount, _ in bars]
            parts += _panel(i * width, y, title, bars, lengths, label)
        y += TITLE + GAP + LINE * max(len(bars) for _, bars in row)
    return _image(columns * width, y, "CPU µs for each request, by case and proxy", parts)


def latency(panels: list[tuple[str, list[Bar]]]) -> str:
    """Bars of milliseconds below one another on one logarithmic scale."""
    width, label, room = 870, 96, 560
    low, high = decades([amount for _, bars in panels for _, amount, _ in bars])
    parts, y = [_text(0, 14, f"p99 in ms, logarithmic, from {low:g} to {high:g}; shorter is better")], 26.0
    for title, bars in panels:
        lengths = [logarithmic(amount, low, high, room) for _, amount, _ in bars]
        parts += _panel(0, y, title, bars, lengths, label)
        y += TITLE + GAP + LINE * len(bars)
    return _image(width, y, "p99 at a constant rate, by proxy", parts)
