"""`terrazzo serve-check`: what of a model would run on our kernels in vLLM."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click
from terrazzo.command_line import Command, TargetName
from terrazzo.console import json_option, print_json, print_table


@click.command("serve-check", cls=Command)
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--target", type=TargetName(), help="sm_90a or nvidia/... Default: this machine's GPU, else sm_90a.")
@click.option("--tensor-parallel", type=click.IntRange(1, 1024), default=1, show_default=True, help="Ranks.")
@json_option
def serve_check(folder: Path, target: str | None, tensor_parallel: int, as_json: bool) -> None:
    """Say which layers of a Hugging Face folder would run on terrazzo inside vLLM, and why others would not.

    Layers are named as vLLM joins them: qkv, gate_up, all experts of a layer. Attention, the cache of keys and values,
    embeddings, norms and the head are vLLM's own.
    """
    from terrazzo.integrations.vllm.check import check
    from terrazzo.lowering.errors import TargetError
    from terrazzo.lowering.targets import Target

    try:
        at = Target.parse(target)
    except TargetError:
        if target is not None:
            raise
        at = Target.parse("sm_90a")
    rows = check(folder, at, tensor_parallel)
    ours = sum(row.count for row in rows if row.operator)
    every = sum(row.count for row in rows)
    if as_json:
        return print_json(
            {"target": at.arch, "layers": every, "terrazzo": ours, "kinds": [asdict(row) for row in rows]}
        )
    columns = ("layers", "of", "N", "K", "experts", "runs on")
    runs = lambda row: f"terrazzo {row.operator}" if row.operator else "vLLM"
    cells = [(row.count, row.leaf, row.n, row.k, row.experts or None, runs(row)) for row in rows]
    print_table(columns, cells)
    for reason in dict.fromkeys(row.reason for row in rows if row.reason):
        named = ", ".join(dict.fromkeys(row.leaf for row in rows if row.reason == reason))
        click.echo(f"{named}: {reason}")
    click.echo(f"{ours} of {every} layers run on terrazzo ({at.arch})")
