"""Status tables for a terminal of any size: no column is squeezed out of sight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .status_tables import Table, tables, title

if TYPE_CHECKING:
    from rich.console import Group

NAME_CELLS = 24  # longer names lose their middle where a table has to be cut anyway
WRAPPED = "experts"  # a column of any length, which may take several lines
WRAPPED_CELLS = 24


def render(
    registry: str, facts: Mapping[str, Any], width: int, height: int | None = None, away: str = "",
) -> Group:
    """Title and tables for `width` cells. height: rows of a screen that cannot be scrolled; what
    does not fit it is counted in its last line. away: why the facts are old."""
    from rich.console import Console, Group
    from rich.text import Text

    head = [Text(title(registry, facts), style="bold")]  # Text: names are not markup
    if away:
        head.append(Text(away, style="bold red"))

    def drawn(framed: bool) -> Group:
        fitting = [part for table in tables(facts) for part in parts(table, width, framed)]
        return Group(*head, *[_rich_table(part, framed) for part in fitting])

    if height is None:
        return drawn(True)
    console = Console(width=width, height=height)
    for framed in (True, False):
        lines = console.render_lines(drawn(framed), pad=False)
        if len(lines) <= height:
            return drawn(framed)
    from rich.segment import Segment, Segments

    kept = [[*line, Segment.line()] for line in lines[: height - 1]]
    more = Text(f"{len(lines) - len(kept)} more lines: a higher window, or without --watch",
                style="bold")
    return Group(Segments([segment for line in kept for segment in line]), more)


def parts(table: Table, width: int, framed: bool) -> list[Table]:
    """The table, or several that have its first columns in common and fit into `width` cells."""
    around, each = (1, 3) if framed else (0, 2)
    if around + sum(w + each for w in _widths(table)) <= width:
        return [table]
    rows = [(*map(_shortened, row[: table.left]), *row[table.left :]) for row in table.rows]
    table = Table(table.name, table.columns, rows, table.left)
    widths = [w + each for w in _widths(table)]
    groups: list[list[int]] = [[]]
    fixed = around + sum(widths[: table.left])
    used = fixed
    for i in range(table.left, len(widths)):
        if groups[-1] and used + widths[i] > width:
            groups.append([])
            used = fixed
        groups[-1].append(i)
        used += widths[i]
    first = range(table.left)
    return [Table(table.name, tuple(table.columns[i] for i in (*first, *group)),
                  [tuple(row[i] for i in (*first, *group)) for row in rows], table.left)
            for group in groups]


def _widths(table: Table) -> list[int]:
    from rich.cells import cell_len

    found = [max(map(cell_len, column)) for column in
             zip(table.columns, *table.rows, strict=True)]
    return [min(w, WRAPPED_CELLS) if name == WRAPPED else w
            for name, w in zip(table.columns, found, strict=True)]


def _shortened(name: str) -> str:
    """Its two ends: names differ at either."""
    half = NAME_CELLS // 2
    return name if len(name) <= NAME_CELLS else f"{name[:half]}\u2026{name[-(half - 1):]}"


def _rich_table(table: Table, framed: bool):
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=box.ROUNDED if framed else None, header_style="bold cyan",
                      border_style="dim", padding=(0, 1) if framed else (0, 2, 0, 0))
    for idx, name in enumerate(table.columns):
        is_text = idx < table.left or name == WRAPPED
        shown.add_column(name, justify="left" if is_text else "right", no_wrap=name != WRAPPED,
                         overflow="fold" if name == WRAPPED else "ellipsis")
    previous = ""
    for row in table.rows:
        first, rest = row[0], row[1:]
        repeated = table.left > 1 and first == previous
        previous = first
        shown.add_row(Text("" if repeated else first), *map(Text, rest))
    return shown
