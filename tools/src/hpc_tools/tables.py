"""The look of every table on the terminal: a rule below the head, no frame, so that it fits 80 columns."""

from rich.box import SIMPLE_HEAD
from rich.table import Table


def plain(title: str) -> Table:
    """An empty table with a bold title."""
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
