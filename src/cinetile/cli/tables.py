"""Tables of numbers that fit the terminal's width; a number is never broken over lines."""

import dataclasses
from collections.abc import Iterator

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_MORE_THAN_ENOUGH = 1000


@dataclasses.dataclass(frozen=True)
class _Column:
    name: str
    is_text: bool


class Numbers:
    """A table of names and right-aligned numbers.

    A table that is wider than the terminal gets headings of several lines. If that is not enough,
    it loses its expendable columns; if it is still too wide, each row becomes a list.

    Args:
        first_column: heading of the names.
        *columns: headings of the numbers.
        expendable: columns to leave out of a narrow table, in this order.
    """

    def __init__(self, first_column: str, *columns: str, expendable: tuple[str, ...] = ()) -> None:
        self._columns = [_Column(name, is_text=False) for name in (first_column, *columns)]
        self._rows: list[tuple[tuple[str, ...], str | None]] = []
        self._expendable = expendable

    def add_text_column(self, name: str) -> None:
        """Adds a column whose text may be broken between words."""
        self._columns.append(_Column(name, is_text=True))

    def add_row(self, *cells: str, style: str | None = None) -> None:
        """Adds a row with a cell for each column."""
        if len(cells) != len(self._columns):
            raise ValueError(f"a row must have {len(self._columns)} cells, got {len(cells)}")
        self._rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table | Text]:
        unbounded = options.update(width=_MORE_THAN_ENOUGH)
        for table in self._candidates():
            if Measurement.get(console, unbounded, table).minimum <= options.max_width:
                yield table
                return
        yield from self._records()

    def _candidates(self) -> Iterator[Table]:
        yield self._table(without=(), tall=False)
        for count in range(len(self._expendable) + 1):
            yield self._table(without=self._expendable[:count], tall=True)

    def _table(self, *, without: tuple[str, ...], tall: bool) -> Table:
        """Returns the table with headings on one line, or with one line per word if `tall`."""
        kept = [place for place, column in enumerate(self._columns) if column.name not in without]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), header_style="bold")
        for place in kept:
            column = self._columns[place]
            if column.is_text:
                table.add_column(Text(column.name), overflow="fold")
                continue
            heading = column.name.replace(" ", "\n") if tall else column.name
            lines = [*heading.split("\n"), *(cells[place] for cells, _ in self._rows)]
            table.add_column(
                Text(heading),
                no_wrap=True,
                justify="left" if place == 0 else "right",
                min_width=max(map(cell_len, lines)),
            )
        for cells, style in self._rows:
            table.add_row(*(Text(cells[place]) for place in kept), style=style)
        return table

    def _records(self) -> Iterator[Table | Text]:
        """Yields every row as a list of headings and numbers."""
        for cells, style in self._rows:
            record = Table.grid(padding=(0, 2))
            record.add_column(overflow="fold")
            record.add_column(
                overflow="fold", min_width=max(map(_longest_word, cells[1:]), default=1)
            )
            for column, cell in zip(self._columns[1:], cells[1:], strict=True):
                record.add_row(Text(column.name), Text(cell))
            heading = f"{self._columns[0].name} {cells[0]}".strip()
            yield Text(heading, style="bold")
            record.style = style or "none"
            yield record
            yield Text("")


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=1)
