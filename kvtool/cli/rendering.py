"""Tables and pages as text for a terminal, or for a pipe."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from kvtool.cli.streams import SafeStream
from kvtool.cli.text import one_line


def render_table(columns: Sequence[str], rows: list[list[Any]], title: str, stream: SafeStream) -> str:
    """Draw a table as text: fitted to a terminal, at its full width into a pipe."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = stream.isatty()
    canvas = io.StringIO()
    width = None if terminal else 100_000
    console = Console(file=canvas, force_terminal=terminal, markup=False, highlight=False, emoji=False, width=width)
    table = Table(
        box=box.SIMPLE_HEAD if terminal else None, pad_edge=terminal, title=Text(title) if title and terminal else None
    )
    for index, column in enumerate(columns):
        numbers = bool(rows) and all(_is_number(row[index]) for row in rows)
        table.add_column(Text(column), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console.print(table)
    return "".join(line.rstrip() + "\n" for line in canvas.getvalue().splitlines())


def render_markdown(text: str) -> str:
    """Draw a page of the documentation for a terminal, no wider than is good to read."""
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.theme import Theme

    canvas = io.StringIO()
    console = Console(file=canvas, force_terminal=True, theme=Theme({"markdown.code": "cyan"}))
    page = Markdown(text, hyperlinks=False, code_theme="ansi_dark")
    console.print(page, width=min(console.width, 120))
    return canvas.getvalue()


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else one_line(str(value))
