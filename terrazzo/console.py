"""What all verbs of the command share in what they print: tables, JSON, sizes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

WIDTH_WITHOUT_TERMINAL = 100
LINE_S = 5.0
"""Seconds between two lines that say how far it is, where there is no terminal."""
_NARROW = 14  # columns up to this width are never folded

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def console(stderr: bool = False) -> Console:
    """A rich console; in a pipe it is as wide as $COLUMNS, or 100 columns."""
    stream = sys.stderr if stderr else sys.stdout
    stated = os.environ.get("COLUMNS", "")
    width = None if stream.isatty() or stated.isdecimal() else WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2, sort_keys=False, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], below: Sequence[str] = ()) -> None:
    """A table whose numbers are flush right, as wide as the terminal or 100 columns.

    None is shown as "-"; cells are text, never markup. `below` has a text for each row that stands indented under it.
    """
    from rich.cells import cell_len
    from rich.padding import Padding
    from rich.text import Text

    out, cells = console(), [[cell(value) for value in row] for row in rows]
    widths = [max(map(cell_len, (name, *column))) for name, *column in zip(columns, *cells)]
    numeric = [
        all(isinstance(row[at], int | float | None) for row in rows) and bool(rows) for at in range(len(columns))
    ]
    least = [width if right or below else min(width, _NARROW) for width, right in zip(widths, numeric)]
    out.width = max(out.width, sum(least) + 2 * len(least))  # a narrower terminal breaks lines itself

    def table(header: bool) -> Table:
        made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", show_header=header)
        for name, width, right, low in zip(columns, widths, numeric, least):
            made.add_column(name, justify="right" if right else "left", overflow="fold", min_width=low)
            if below:
                made.columns[-1].width = width
        return made

    if not below:
        whole = table(any(columns))
        for row in cells:
            whole.add_row(*map(Text, row))
        return out.print(whole)
    for at, (row, text) in enumerate(zip(cells, below, strict=True)):
        one = table(header=at == 0)
        one.add_row(*map(Text, row))
        out.print(one)
        if text:
            out.print(Padding(Text(text), (0, 0, 0, 4)))
    return None


def cell(value: object) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "-"
    return str(value)


def layers_progress(stack: ExitStack, quiet: bool = False) -> Callable[[int, int], None]:
    """What is told after each layer: a bar on a terminal, else lines on stderr, LINE_S apart and of the last layer.

    Args:
        stack: which ends the bar. quiet: show no bar.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    start = said = time.monotonic()
    if not sys.stderr.isatty():

        def line(done: int, total: int) -> None:
            nonlocal said
            if done == total or time.monotonic() - said >= LINE_S:
                said = time.monotonic()
                click.echo(f"layer {done} of {total}, {said - start:.0f} s", err=True)

        return line
    columns = (TextColumn("layers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console(stderr=True), disable=quiet)
    task = bar.add_task("layers", total=None)

    def note(done: int, total: int) -> None:
        if not bar.tasks[0].total:  # bad input, said before the first layer, comes without a bar
            stack.enter_context(bar)
        bar.update(task, completed=done, total=total)

    return note


def check_writable(option: str, path: Path | None) -> None:
    """Refuse, before the work is done, a file or folder that could not be made at `path`."""
    if path is None:
        return
    if not path.name:
        raise click.UsageError(f"{option} '{path}' has no name of its own; name a file or folder to write")
    above = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    try:
        with suppress(FileNotFoundError, NotADirectoryError):  # a name that is too long is neither
            path.with_name(f".{path.name}.old.12345678").lstat()  # as is written beside it first
        tempfile.TemporaryFile(dir=above).close()  # os.access says yes to root, of /proc too
    except OSError as error:
        reason = f"nothing can be made in {above} ({error.strerror})"
        raise click.UsageError(f"{option} {path} cannot be written: {reason}; name another place") from error


def size(number: float) -> str:
    """Bytes in words: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")
