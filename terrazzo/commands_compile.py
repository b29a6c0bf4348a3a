"""`terrazzo compile`: kernels without a GPU, ahead of time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from terrazzo.building import compile_with_progress, describe, print_kernels
from terrazzo.command_line import DEQUANTIZATION, MODEL, NUMERICS, OPERATOR, Command, Counts, Shape, TargetName
from terrazzo.console import check_writable, json_option, print_json, size
from terrazzo.lowering.errors import BundleError, CompileError

_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


class _Dtype(click.ParamType):
    """f16, bf16 (f32 for scales), or the long names."""

    name = "dtype"

    def __init__(self, *allowed: str) -> None:
        self.allowed = {short: _DTYPES[short] for short in allowed}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known = {**self.allowed, **{name: name for name in self.allowed.values()}}
        if value not in known:
            self.fail(f"{value!r} is no dtype here: use {' or '.join(self.allowed)}", param, ctx)
        return known[value]


@click.command("compile", cls=Command)
@click.option("--op", type=OPERATOR, default="w4a16", show_default=True, help="Operator; `terrazzo ops` lists them.")
@click.option("--shape", "shapes", type=Shape(), multiple=True, help="Weight [N, K] as 28672x4096; may be repeated.")
@click.option(
    "--model",
    "models",
    type=MODEL,
    multiple=True,
    help="All layers of a model, for example llama-3-8b; may be repeated.",
)
@click.option("--m", "ms", type=Counts(), help="Numbers of tokens to serve, 1,16,256. Default: every M.")
@click.option("--dtype", type=_Dtype("f16", "bf16"), default="f16", show_default=True, help="Activations and output.")
@click.option("--group", help="Input channels for each scale; K for one group. Default: 128, for w4a8 on int8 64.")
@click.option("--symmetric/--asymmetric", default=False, help="Without or with (default) zero points.")
@click.option("--scale-dtype", type=_Dtype("f16", "bf16", "f32"), help="Default: as the activations.")
@click.option("--numerics", type=NUMERICS, default="auto", show_default=True, help="w4a16: auto, exact, fused or post.")
@click.option(
    "--dequantization",
    type=DEQUANTIZATION,
    default="auto",
    show_default=True,
    help="w4a8: auto, xor, unsigned or e4m3.",
)
@click.option("--kv", multiple=True, help="attention: formats of keys/values as int4/int4; may be repeated.")
@click.option("--heads", default="32/8", show_default=True, help="attention: query/kv heads of a layer.")
@click.option("--head-dim", default=128, show_default=True, help="attention: 64, 128 or 256.")
@click.option("--q-len", default=1, show_default=True, help="attention: new tokens of a step, 1..8.")
@click.option("--page", default=128, show_default=True, help="attention: tokens of a page; 0 for contiguous caches.")
@click.option("--prefill", is_flag=True, help="attention: the kernels of prefill too.")
@click.option(
    "--target",
    type=TargetName(),
    required=True,
    help="sm_80, sm_86, sm_89, sm_90a or a TVM tag such as nvidia/nvidia-h100.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a bundle to this folder.")
@click.option("--replace", is_flag=True, help="Replace a bundle that is there.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes. Default: one for each CPU.")
@json_option
def compile_command(
    op: str,
    shapes: tuple[tuple[int, int], ...],
    models: tuple[str, ...],
    ms: tuple[int, ...] | None,
    dtype: str,
    group: str | None,
    symmetric: bool,
    scale_dtype: str | None,
    numerics: str,
    dequantization: str,
    kv: tuple[str, ...],
    heads: str,
    head_dim: int,
    q_len: int,
    page: int,
    prefill: bool,
    target: str,
    output: Path | None,
    replace: bool,
    workers: int | None,
    as_json: bool,
) -> None:
    """Compile kernels without a GPU and report what the compiler made of them."""
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.registry import rows as registered

    arch = Target.parse(target)
    registered(op, arch.arch)
    _refuse_foreign(op)
    problems = {**dict.fromkeys(shapes), **dict.fromkeys(_model_shapes(models))}
    if op == "attention" and (problems or not kv):
        raise click.UsageError("attention takes no --shape and no --model, but --kv KEYS/VALUES")
    if not problems and op != "attention":
        raise click.UsageError("nothing to compile: name a --shape NxK or a --model")
    if output is not None and output.exists():
        from terrazzo.lowering.cache import MANIFEST

        if not replace:
            raise BundleError(f"{output} exists already; remove it, choose another folder or give --replace")
        if not (output / MANIFEST).is_file():
            raise BundleError(f"{output} is no bundle, so --replace leaves it alone; choose another folder")
    check_writable("--output", output)
    facts = {"m": ms, "dtype": dtype, "target": arch, "symmetric": symmetric, "scale_dtype": scale_dtype or dtype}
    facts |= {"numerics": numerics, "dequantization": dequantization}
    group = ("64" if op == "w4a8" and dequantization != "e4m3" else "128") if group is None else group
    requests = []
    for formats in kv if op == "attention" else ():
        sizes = {"head_dim": head_dim, "q_len": q_len, "page": page, "dtype": dtype, "target": arch, "prefill": prefill}
        requests += _requests(op)(*_pair("--kv", formats), **_heads(heads), **sizes)
    for n, k in problems:
        requests += _requests(op)(n, k, group_size=_group(group, k), **_accepted(op, facts))
    _say_where_one_group_is(op, group, problems)
    requests = list(dict.fromkeys(requests))
    outcomes = compile_with_progress(requests, workers)
    kernels = [describe(request, outcome) for request, outcome in zip(requests, outcomes)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, CompileError)]
    bundle = None
    if output is not None and not failed:
        from terrazzo.layouts.instances import get_instance
        from terrazzo.lowering.bundle import write_bundle

        layouts = _cache_layouts(kv, head_dim) if op == "attention" else {
            name: get_instance(name).identity for name in _layouts(op, dequantization)
        }  # fmt: skip
        bundle = write_bundle(output, requests, layouts=layouts, replace=replace)
    if as_json:
        print_json({"target": arch.arch, "bundle": bundle and str(bundle), "kernels": kernels})
    else:
        print_kernels(kernels)
        if bundle is not None:
            bytes_ = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
            click.echo(f"\n{bundle}: bundle of {len(requests)} kernels for {arch.arch}, {size(bytes_)}")
    if failed:
        for error in failed:
            click.echo(f"terrazzo: {error}", err=True)
        if output is not None:
            click.echo(f"terrazzo: no bundle was written, {len(failed)} of {len(requests)} kernels failed", err=True)
        raise click.exceptions.Exit(1)


def _model_shapes(models: tuple[str, ...]) -> list[tuple[int, int]]:
    from terrazzo.schedules.models import shapes

    return list(shapes(models))


def _say_where_one_group_is(op: str, group: str, problems: Iterable[tuple[int, int]]) -> None:
    """A group that is longer than a weight's rows is all of them: the kernels are those of --group K."""
    for n, k in problems if op == "w4a16" and group.isdecimal() else ():
        if k < int(group[:9]):
            click.echo(
                f"terrazzo: {n}x{k}: K is below the group of {group}, so its kernels have one group of K", err=True
            )


def _group(text: str, k: int) -> int:
    if text.upper() == "K" or text == "-1":
        return k
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise click.BadParameter(f"{text!r} is no group size: use 32, 64, 128 or K", param_hint="--group")
    return int(text)


def _pair(option: str, text: str) -> tuple[str, str]:
    first, slash, second = text.partition("/")
    if not (first and slash and second):
        raise click.BadParameter(f"{text!r}: write two of them, with a slash between", param_hint=option)
    return first, second


def _heads(text: str) -> dict[str, int]:
    parts = _pair("--heads", text)
    if not all(re.fullmatch(r"\d{1,9}", part, re.ASCII) for part in parts):
        raise click.BadParameter(f"{text!r}: write query/kv heads, as 32/8", param_hint="--heads")
    return dict(zip(("heads", "kv_heads"), map(int, parts)))


def _cache_layouts(kv: tuple[str, ...], head_dim: int) -> dict[str, str]:
    """Names and identities of the packed forms of some pairs of KV formats."""
    from terrazzo.ops.attention import CacheLayout

    return {f"kv.{formats}.d{head_dim}": CacheLayout(*_pair("--kv", formats), head_dim).identity for formats in kv}


def _requests(op: str) -> Any:
    """The function that names an operator's kernels."""
    import importlib

    return importlib.import_module(f"terrazzo.ops.{op}").kernel_requests


_OPTIONS = {"symmetric", "scale_dtype", "numerics", "dequantization"}
"""Facts that not every linear layer's kernels differ by."""
_LINEAR, _ATTENTION = _OPTIONS | {"group", "ms"}, {"kv", "heads", "head_dim", "q_len", "page", "prefill"}
"""Options of linear layers alone, and of attention alone."""


def _accepted(op: str, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts that a linear layer's kernels differ by."""
    dropped = _OPTIONS - _parameters(op)
    return {name: value for name, value in facts.items() if name not in dropped}


def _parameters(op: str) -> set[str]:
    import inspect

    return set(inspect.signature(_requests(op)).parameters)


def _refuse_foreign(op: str) -> None:
    """An option that was given and does not change this operator's kernels is an error, never passed over."""
    foreign = _LINEAR if op == "attention" else _ATTENTION | _OPTIONS - _parameters(op)
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
        if parameter.name in foreign and given:
            raise click.UsageError(f"{parameter.opts[0]} is no option of {op}")


def _layouts(op: str, dequantization: str) -> tuple[str, ...]:
    """Names of the packed layouts that an operator's kernels read."""
    import importlib

    form = "fp8_format" if dequantization == "e4m3" else "format"
    return (importlib.import_module(f"terrazzo.ops.{op}.{form}").LAYOUT,)
