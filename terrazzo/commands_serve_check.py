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

    Layers are named as vLLM joins them: qkv, gate_up, all experts of a layer. Embeddings, norms and the head are vLLM's
    own; attention and its cache too, unless --attention-backend CUSTOM asks for ours.
    """
    from terrazzo.integrations.vllm.names import CHECKER
    from terrazzo.lowering.errors import TargetError
    from terrazzo.lowering.targets import Target

    try:
        at = Target.parse(target)
    except TargetError:
        if target is not None:
            raise
        at = Target.parse("sm_90a")
    rows, held = CHECKER.check(folder, at, tensor_parallel), CHECKER.cache_refusals(folder, at)
    ours = sum(row.count for row in rows if row.operator)
    every = sum(row.count for row in rows)
    if as_json:
        return print_json(
            {
                "target": at.arch,
                "layers": every,
                "terrazzo": ours,
                "kinds": [asdict(row) for row in rows],
                "caches": held,
            }
        )
    columns = ("layers", "of", "N", "K", "experts", "runs on")
    runs = lambda row: f"terrazzo {row.operator}" if row.operator else "vLLM"
    cells = [(row.count, row.leaf, row.n, row.k, row.experts or None, runs(row)) for row in rows]
    print_table(columns, cells)
    for reason in dict.fromkeys(row.reason for row in rows if row.reason):
        named = ", ".join(dict.fromkeys(row.leaf for row in rows if row.reason == reason))
        click.echo(f"{named}: {reason}")
    for reason in dict.fromkeys(filter(None, held.values())):
        click.echo(f"caches {', '.join(name for name, why in held.items() if why == reason)}: {reason}")
    if taken := [name for name, reason in held.items() if not reason]:
        click.echo(f"attention, with --attention-backend CUSTOM: --kv-cache-dtype {', '.join(taken)}")
    click.echo(f"{ours} of {every} layers run on terrazzo ({at.arch})")
