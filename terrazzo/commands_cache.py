"""`terrazzo cache`: what was compiled before."""

from __future__ import annotations

import click
from terrazzo.command_line import Group
from terrazzo.console import json_option, print_json, print_table, size


@click.group("cache", cls=Group)
def cache_group() -> None:
    """The kernel cache on this machine ($TERRAZZO_CACHE_DIR, else ~/.cache/terrazzo)."""


@cache_group.command("list")
@json_option
def cache_list(as_json: bool) -> None:
    """Every compiled kernel."""
    from terrazzo.lowering.cache import cache_root, list_entries

    entries = list_entries()
    if as_json:
        return print_json(entries)
    columns = {"key": "key", "kernel": "name", "target": "target", "registers": "registers"}
    columns |= {"spill B": "spill_stores", "bytes": "bytes"}
    rows = [
        tuple(str(entry[name])[:12] if name == "key" else entry[name] for name in columns.values()) for entry in entries
    ]
    params = [" ".join(f"{key}={value}" for key, value in entry["params"].items()) for entry in entries]
    print_table(tuple(columns), rows, below=params)
    click.echo(f"{len(entries)} kernels, {size(sum(entry['bytes'] for entry in entries))} in {cache_root()}")


@cache_group.command("clear")
@json_option
def cache_clear(as_json: bool) -> None:
    """Remove every compiled kernel."""
    from terrazzo.lowering.cache import cache_root, clear

    removed = clear()
    if as_json:
        return print_json(removed)
    click.echo(f"removed {removed['entries']} entries, {size(removed['bytes'])}, from {cache_root()}")


@cache_group.command("verify")
@json_option
def cache_verify(as_json: bool) -> None:
    """Check every file against its sha256; damaged entries move aside and are rebuilt when needed. Exit 1 if any."""
    from terrazzo.lowering.cache import cache_root, verify

    checked = verify()
    damaged = [entry for entry in checked if not entry["ok"]]
    if as_json:
        print_json(checked)
    else:
        if damaged:
            print_table(("damaged", "problem"), [(entry["key"], entry["problem"]) for entry in damaged])
        click.echo(f"{len(checked) - len(damaged)} of {len(checked)} entries are intact in {cache_root()}")
    if damaged:
        raise click.exceptions.Exit(1)
