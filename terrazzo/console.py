"""What all verbs of the command share: tables, JSON, lists of numbers and shapes as arguments."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

WIDTH_WITHOUT_TERMINAL = 160

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def console(stderr: bool = False) -> Console:
    """A rich console; in a pipe it is wide enough to keep table rows on one line."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_WITHOUT_TERMINAL
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, sort_keys=False, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table whose numbers are flush right. None is shown as "-"; cells are text, never markup."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=any(columns))
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows)
        table.add_column(column, justify="right" if numeric and rows else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell(value) for value in row))
    console().print(table)


def cell(value: Any) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "-"
    return str(value).replace("[", r"\[")


def check_writable(option: str, path: Path | None) -> None:
    """Refuse, before the work is done, a file or folder that could not be made at `path`."""
    if path is None:
        return
    above = next(folder for folder in path.absolute().parents if folder.exists())
    try:
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


class Shape(click.ParamType):
    """NxK, for example 28672x4096."""

    name = "NxK"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"\s*(\d+)\s*[xX,]\s*(\d+)\s*", value)
        if not found or not all(int(part) for part in found.groups()):
            self.fail(f"{value!r} is no shape: write N x K as two positive numbers, for example 28672x4096", param, ctx)
        return int(found.group(1)), int(found.group(2))


class Counts(click.ParamType):
    """Positive integers separated by commas."""

    name = "M,M,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() and int(part) for part in parts):
            self.fail(f"{value!r} is no list of positive numbers: write for example 1,16,256", param, ctx)
        return tuple(dict.fromkeys(map(int, parts)))
