"""How commands print a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

GAP = "  "


def columns(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The rows as lines, each column as wide as its longest cell."""
    rows = list(rows)
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        line = GAP.join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield line.rstrip()


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, none: str) -> Iterator[str]:
    """The rows under their heading; without any the sentence `none`."""
    rows = list(rows)
    yield from columns([heads, *rows]) if rows else [none]
