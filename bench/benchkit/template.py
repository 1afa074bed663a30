"""Templates of configurations: words and blocks between `@`.

    @word@            its value; a word that is not known stays as it is
    @for LIST@        the lines up to @end@, once for each item, whose words count there too
    @if LIST@         the lines up to @end@, if the list has items
    @unless LIST@     ... if it has none

A mark of a block has its line alone; blocks are not nested.
"""

import re

MARK = re.compile(r"\s*@(for|if|unless) (\w+)@\s*\Z|\s*@(end)@\s*\Z")


def fill(text: str, values: dict) -> str:
    """Replaces each @word@ that is known."""
    return re.sub(r"@(\w+)@", lambda m: str(values.get(m[1], m[0])), text)


def uses(text: str, name: str) -> bool:
    """Whether a template goes through the list."""
    return f"@for {name}@" in text


def render(text: str, values: dict, lists: dict[str, list[dict]]) -> str:
    """The template with its blocks and words replaced; ValueError where blocks are not well formed."""
    out: list[str] = []
    block: list[str] = []
    kind = name = None
    for line in text.splitlines(keepends=True):
        mark = MARK.match(line)
        if not mark:
            block.append(line)
            continue
        if (mark[3] is None) == (kind is not None):
            raise ValueError(f"{line.strip()} has no counterpart, or is inside another block")
        out += _expand("".join(block), kind, lists.get(name, []), values)
        block, kind, name = [], mark[1], mark[2]
        if kind and name not in lists:
            raise ValueError(f"{line.strip()}: no such list")
    if kind:
        raise ValueError(f"@{kind} {name}@ has no @end@")
    return "".join(out) + fill("".join(block), values)


def _expand(text: str, kind: str | None, items: list[dict], values: dict) -> list[str]:
    if kind == "for":
        inner = fill(text, values)
        return [fill(inner, item) for item in items]
    if kind and (kind == "if") != bool(items):
        return []
    return [fill(text, values)]
