"""`terrazzo cache`: what was compiled before."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
from terrazzo.command_line import Group
from terrazzo.console import json_option, print_json, print_table, size
from terrazzo.lowering.errors import CacheError


@click.group("cache", cls=Group)
def cache_group() -> None:
    """The kernel cache on this machine ($TERRAZZO_CACHE_DIR, else ~/.cache/terrazzo)."""


def _root() -> Path:
    """The folder of the cache; CacheError where there is something else in its place."""
    from terrazzo.lowering.cache import cache_root

    root = cache_root()
    for folder in (root, root / "v1", root / "v1" / "kernels"):
        if folder.exists() and not folder.is_dir():
            raise CacheError(f"kernel cache {folder} is a file; set TERRAZZO_CACHE_DIR to a folder, or remove it")
        if folder.is_dir():
            next(folder.iterdir(), None)  # a folder that may not be read is an error, not an empty one
    return root


@cache_group.command("list")
@json_option
def cache_list(as_json: bool) -> None:
    """Every compiled kernel."""
    from terrazzo.lowering.cache import list_entries

    root, entries = _root(), list_entries()
    if as_json:
        return print_json(entries)
    columns = {"key": "key", "kernel": "name", "target": "target", "registers": "registers"}
    columns |= {"spill B": "spill_stores", "bytes": "bytes"}
    rows = [
        tuple(str(entry[name])[:12] if name == "key" else entry[name] for name in columns.values()) for entry in entries
    ]
    params = [" ".join(f"{key}={value}" for key, value in entry["params"].items()) for entry in entries]
    print_table(tuple(columns), rows, below=params)
    click.echo(f"{len(entries)} kernels, {size(sum(entry['bytes'] for entry in entries))} in {root}")


@cache_group.command("clear")
@json_option
def cache_clear(as_json: bool) -> None:
    """Remove every compiled kernel."""
    from terrazzo.lowering.cache import clear

    root = _root()
    removed, left = clear(), _left(root)
    if as_json:
        print_json(removed | {"left": len(left)})
    else:
        click.echo(f"removed {removed['entries']} entries, {size(removed['bytes'])}, from {root}")
    if left:
        click.echo(f"terrazzo: {len(left)} entries cannot be removed: {_why(left[0])}", err=True)
        raise click.exceptions.Exit(1)


def _left(root: Path) -> list[Path]:
    """Entries that are still there."""
    folders = [root / "v1" / room for room in ("kernels", "quarantine")]
    return [entry for folder in folders if folder.is_dir() for entry in sorted(folder.iterdir())]


def _why(entry: Path) -> str:
    """Why an entry cannot be removed, as the system says it."""
    for folder in (entry.parent, entry):
        try:
            tempfile.TemporaryFile(dir=folder).close()  # os.access says yes to root
        except OSError as error:
            return f"{folder}: {error.strerror}; the cache is read-only to you"
    return f"{entry}; remove it by hand, or try again if another process is writing there"


@cache_group.command("verify")
@json_option
def cache_verify(as_json: bool) -> None:
    """Check every file against its sha256; damaged entries move aside and are rebuilt when needed. Exit 1 if any."""
    from terrazzo.lowering.cache import verify

    root, checked = _root(), verify()
    damaged = [entry for entry in checked if not entry["ok"]]
    if as_json:
        print_json(checked)
    else:
        if damaged:
            print_table(("damaged", "problem"), [(entry["key"], entry["problem"]) for entry in damaged])
        click.echo(f"{len(checked) - len(damaged)} of {len(checked)} kernels are intact in {root}")
    if damaged:
        raise click.exceptions.Exit(1)
