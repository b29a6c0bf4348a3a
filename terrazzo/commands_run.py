"""`terrazzo demo` and `terrazzo bench`: see it run, and how fast."""

from __future__ import annotations

import json
from pathlib import Path

import click
from terrazzo.command_line import COUNT, MODEL, Choice, Command, Counts, Shape, Targets, linear_operators
from terrazzo.console import check_writable, json_option, print_json, print_table


@click.command(cls=Command)
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A safetensors file with one AWQ layer. Default: one is made.",
)
@click.option(
    "--targets", type=Targets(), default="sm_80,sm_89,sm_90a", show_default=True, help="Architectures to compile for."
)
@json_option
def demo(data: Path | None, targets: tuple[str, ...], as_json: bool) -> None:
    """One quantized layer through the whole library; needs no GPU, and uses one if it is there."""
    from terrazzo.demo import run_demo

    report = run_demo(data, targets, quiet=as_json)
    if as_json:
        print_json(report)
    if not report["ok"]:
        raise click.exceptions.Exit(1)


@click.command(cls=Command)
@click.option("--shape", "shapes", type=Shape(), multiple=True, help="Weight [N, K] as 28672x4096; may be repeated.")
@click.option("--model", "models", type=MODEL, multiple=True, help="All layers of a model. Default: llama-3-8b.")
@click.option("--m", "ms", type=Counts(), default="1,16,64,256,1024", show_default=True, help="Numbers of tokens.")
@click.option("--op", type=Choice("op", linear_operators), default="w4a16", show_default=True)
@click.option("--dtype", type=click.Choice(["f16", "bf16"]), default="f16", show_default=True)
@click.option("--group", type=COUNT, help="Input channels for each scale. Default: the operator's usual.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Also write the result as JSON to this file."
)
@json_option
def bench(
    shapes: tuple[tuple[int, int], ...],
    models: tuple[str, ...],
    ms: tuple[int, ...],
    op: str,
    dtype: str,
    group: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Time a linear layer beside cuBLAS on this machine's GPU, outputs checked (other packages: benchmarks/ of the
    source)."""
    from terrazzo.autotune.gemm_bench import bench as measure
    from terrazzo.autotune.linear import settings_of
    from terrazzo.building import compile_with_progress
    from terrazzo.schedules.models import shapes as layers_of

    check_writable("--out", out)
    if not shapes and not models:
        models = ("llama-3-8b",)
    problems = {**dict.fromkeys(shapes, ()), **layers_of(models)}
    kind, settings = settings_of(op, dtype={"f16": "float16", "bf16": "bfloat16"}[dtype], group=group)
    result = measure(kind, problems, ms, settings, compile_all=compile_with_progress)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        return print_json(result)
    click.echo(f"{result['gpu']}, {result['copy_gb_s']:.0f} GB/s copied; times in us")
    columns = ("N", "K", "M", "terrazzo", "spread %", "cuBLAS", "speed-up", "GB/s", "problem")
    print_table(
        columns,
        [
            (
                row["n"],
                row["k"],
                row["m"],
                row["us"],
                row["spread"] and 100 * row["spread"],
                row["peers"].get("cublas_f16"),
                row["us"] and row["peers"].get("cublas_f16") and row["peers"]["cublas_f16"] / row["us"],
                row["us"] and row["bytes"] / row["us"] / 1e3,
                row.get("failure", ""),
            )
            for row in result["rows"]
        ],
    )
