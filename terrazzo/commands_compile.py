"""`terrazzo compile`: kernels without a GPU, ahead of time, of single weights or of everything that a model needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from terrazzo.building import Build, describe, print_kernels, print_summary
from terrazzo.command_line import (
    AMOUNT,
    COUNT,
    DEQUANTIZATION,
    MODEL,
    NO_CACHE,
    NUMERICS,
    OPERATOR,
    Command,
    Counts,
    Dtype,
    Formats,
    Shape,
    TargetName,
)
from terrazzo.console import check_writable, json_option, print_json, print_table, size
from terrazzo.lowering.errors import BundleError, CompileError

if TYPE_CHECKING:
    from collections.abc import Callable

    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.model_requests import Model

_FOLDER = click.Path(exists=True, path_type=Path)


@click.command("compile", cls=Command)
@click.argument("folders", type=_FOLDER, nargs=-1, metavar="[FOLDER]...")
@click.option("--model", "models", type=MODEL, multiple=True, help="The same of a model by its name; may be repeated.")
@click.option("--shape", "shapes", type=Shape(), multiple=True, help="A weight [N, K], as 28672x4096; may be repeated.")
@click.option("--op", type=OPERATOR, help="Only this operator. Default: the checkpoint's and attention, else w4a16.")
@click.option("--target", type=TargetName(), help="sm_80 to sm_120a, or nvidia/... Default: this machine's GPU.")
@click.option("--tensor-parallel", type=click.IntRange(1, 1024), default=1, show_default=True, help="Ranks.")
@click.option("--max-tokens", type=click.IntRange(1, 1 << 24), help="Of one step, at most. Default: any number.")
@click.option("--kv", type=Formats(none=True), multiple=True, help="As int8, int4/int4, or none; may be repeated.")
@click.option("--kv-cache-dtype", "caches", multiple=True, help="A cache of vLLM's on our attention; may be repeated.")
@click.option("--m", "ms", type=Counts(), help="Numbers of tokens to serve, 1,16,256. Default: every M.")
@click.option("--dtype", type=Dtype("f16", "bf16"), help="Activations and output. Default: the checkpoint's, else f16.")
@click.option(
    "--group", help="Input channels for each scale; K: all. Default: 128, w4a8 64, mxfp4 32, nvfp4 16, else K."
)
@click.option("--symmetric/--asymmetric", default=False, help="Without or with (default) zero points.")
@click.option("--scale-dtype", type=Dtype("f16", "bf16", "f32"), help="Default: as the activations.")
@click.option("--numerics", type=NUMERICS, default="auto", show_default=True, help="w4a16: auto, exact, fused or post.")
@click.option(
    "--dequantization", type=DEQUANTIZATION, default="auto", show_default=True, help="w4a8, w8a8: e4m3 or another."
)
@click.option("--q-len", "q_lens", type=Counts(), default="1", show_default=True, help="New tokens of a step, 1..8.")
@click.option(
    "--page",
    type=AMOUNT,
    default=128,
    show_default=True,
    help="Tokens of a page of the cache; 0 for contiguous ones.",
)
@click.option("--heads", default="32/8", show_default=True, help="--op attention: query/kv heads of a layer.")
@click.option("--head-dim", type=COUNT, default=128, show_default=True, help="--op attention: 64, 128 or 256.")
@click.option("--prefill", is_flag=True, help="--op attention: the kernels of prefill too.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write a bundle to this folder.")
@click.option("--replace", is_flag=True, help="Replace a bundle that is there.")
@click.option("--wheel", type=click.Path(path_type=Path), help="Write a wheel of ready kernels to this folder.")
@click.option("--workers", type=COUNT, help="Processes. Default: one for each CPU.")
@click.option("--dry-run", is_flag=True, help="Only what would be compiled, and about how long it takes.")
@json_option
def compile_command(**given: Any) -> None:
    """Compile kernels without a GPU and report what the compiler made of them.

    FOLDER is a Hugging Face folder: everything that serving it needs is compiled, with the dtypes and zero points that
    its layers have. Each linear layer by itself and as engines join them (qkv, gate_up, experts), the quantizers of
    activations, decode, prefill and append, for every number of tokens. A folder without files of weights is read by
    its config.json alone.

    --wheel without anything to compile takes the kernels of the wheel that is published, `terrazzo-kernels-sm90`: it
    serves the models of the table, with every format that the target runs. A build that was interrupted goes on.
    """
    from terrazzo.lowering.targets import Target

    options = Options(**given)
    _check_options(options)
    at, wanted = Target.parse(options.target), _Wanted()
    check_output(options.output, options.replace)
    check_writable("--wheel", options.wheel)
    if options.published:
        _add_published(wanted, at)
    for source in options.sources:
        _add_model(wanted, source, at, options)
    if options.shapes or (options.op == "attention" and not options.sources):
        _add_named(wanted, at, options)
    _build(wanted, at, options)


def _build(wanted: _Wanted, at: Target, options: Options) -> None:
    """Compile what is wanted, write what the options ask for, and say what came of it."""
    output, wheel, requests = options.output, options.wheel, list(wanted.requests)
    if not requests:
        raise click.UsageError("nothing to compile: every part was left out, " + "; ".join(wanted.skipped.values()))
    if options.dry_run:
        return _show_dry_run(wanted, at, options)
    build = Build(requests, options.workers)
    outcomes = build.run()
    kernels = [describe(request, outcome) for request, outcome in zip(requests, outcomes)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, CompileError)]
    bundle = file = None
    if output is not None and not failed:
        from terrazzo.lowering.bundle import write_bundle

        bundle = write_bundle(output, requests, layouts=wanted.layouts, replace=options.replace)
    if wheel is not None and not failed:
        from terrazzo.lowering.wheel_file import write_wheel

        file = write_wheel(wheel, requests, layouts=wanted.layouts)
    if options.as_json:
        facts = {"target": at.arch, "bundle": bundle and str(bundle), "wheel": file and str(file)}
        facts |= {"skipped": wanted.skipped, **build.facts()}
        print_json(facts | {"kernels": kernels})
    else:
        (print_summary if wanted.models else print_kernels)(kernels)
        _print_skipped(wanted)
        if bundle is not None:
            bytes_ = sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file())
            click.echo(f"\n{bundle}: bundle of {len(requests)} kernels for {at.arch}, {size(bytes_)}")
        if file is not None:
            click.echo(f"\n{file}: wheel of {len(requests)} kernels for {at.arch}, {size(file.stat().st_size)}")
    if failed:
        for error in failed:
            click.echo(f"terrazzo: {error}", err=True)
        if output is not None or wheel is not None:
            what = "bundle" if wheel is None else "wheel"
            click.echo(f"terrazzo: no {what} was written, {len(failed)} of {len(requests)} kernels failed", err=True)
        raise click.exceptions.Exit(1)


@dataclass(frozen=True)
class Options:
    """What stands on the command line, by the names of its parameters."""

    folders: tuple[Path, ...]
    models: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    op: str | None
    target: str | None
    tensor_parallel: int
    max_tokens: int | None
    kv: tuple[Any, ...]
    caches: tuple[str, ...]
    ms: tuple[int, ...] | None
    dtype: str | None
    group: str | None
    symmetric: bool
    scale_dtype: str | None
    numerics: str
    dequantization: str
    q_lens: tuple[int, ...]
    page: int
    heads: str
    head_dim: int
    prefill: bool
    output: Path | None
    replace: bool
    wheel: Path | None
    workers: int | None
    dry_run: bool
    as_json: bool

    @property
    def sources(self) -> tuple[Path | str, ...]:
        """Folders, and names of models."""
        return (*self.folders, *self.models)

    @property
    def published(self) -> bool:
        """Whether the kernels of the published wheel are meant."""
        return self.wheel is not None and not (self.sources or self.shapes or self.op)


class _Wanted:
    """What a command line asks for.

    Attributes:
        requests: kernels, each once. layouts: name -> identity of what they read.
        models: names. kinds: rows of the table of layers. skipped: layer -> why it has no kernels.
    """

    def __init__(self) -> None:
        self.requests: dict[KernelRequest, None] = {}
        self.layouts: dict[str, str] = {}
        self.models: list[str] = []
        self.kinds: list[tuple[Any, ...]] = []
        self.skipped: dict[str, str] = {}


_LINEAR = {"symmetric", "scale_dtype", "group", "numerics", "dequantization", "ms"}
_CACHE = {"kv", "q_lens", "page"}
_BY_HAND = {"heads", "head_dim", "prefill"}
"""Options of attention that a model's config states."""
_WHOLE = {"tensor_parallel", "max_tokens", "caches"}
_STATED = {"symmetric", "scale_dtype", "group"}
"""Options that a checkpoint of quantized layers states."""
_NOT_OF_PACKED = {"op", "max_tokens", "caches", "numerics", "dequantization", "q_lens"}
"""Options of engines' steps, and of layers that could be read in more than one way."""


def _check_options(options: Options) -> None:
    """An option that was given and does not change what is compiled is an error, never passed over."""
    from terrazzo.ops.products.table import BY_RECORD, asked_for

    op, shapes, whole = options.op, bool(options.shapes), bool(options.sources or options.published)
    if op not in (None, "attention", *BY_RECORD):
        raise click.UsageError(f"--op {op}: its kernels come with a whole model's; give a FOLDER or a --model alone")
    if op == "attention":
        if shapes or (not whole and not options.kv):
            raise click.UsageError("attention takes no --shape, but --kv KEYS/VALUES")
    elif not shapes and not whole:
        raise click.UsageError("nothing to compile: name a FOLDER, a --model or a --shape NxK")
    linear = op or "w4a16"
    foreign = set(_LINEAR) if linear == "attention" else (_LINEAR & _OPTIONS) - _parameters(linear)
    foreign |= set() if linear == "attention" and not whole else _BY_HAND
    foreign |= set() if whole else _WHOLE
    foreign |= set() if whole or linear == "attention" else _CACHE
    for parameter in _given():
        if parameter.name in foreign:
            what = "a whole model" if whole and parameter.name in _BY_HAND else linear
            raise click.UsageError(f"{parameter.opts[0]} is no option of {what}")
    if op not in (None, "attention") and asked_for(op).direct and options.dequantization not in ("auto", "e4m3"):
        raise click.UsageError(f"--dequantization {options.dequantization}: of {op} it is auto (int8) or e4m3")
    if options.ms and options.max_tokens:
        raise click.UsageError("--m and --max-tokens both say how many tokens there are; give one")


def _given() -> list[click.Parameter]:
    """Options that stand on the command line."""
    context = click.get_current_context()
    source = click.core.ParameterSource.COMMANDLINE
    return [it for it in context.command.params if context.get_parameter_source(it.name) is source]


def check_output(output: Path | None, replace: bool) -> None:
    """Refuse, before anything is compiled, a folder that a bundle cannot be written to."""
    if output is not None and output.exists():
        from terrazzo.lowering.cache import MANIFEST

        if not replace:
            raise BundleError(f"{output} exists already; remove it, choose another folder or give --replace")
        if not (output / MANIFEST).is_file():
            raise BundleError(f"{output} is no bundle, so --replace leaves it alone; choose another folder")
    check_writable("--output", output)


def _add_model(wanted: _Wanted, source: Path | str, at: Target, options: Options) -> None:
    """Everything of a Hugging Face folder, or of a model of the table."""
    from terrazzo.ops import model_requests
    from terrazzo.ops.kinds.base import Serving
    from terrazzo.ops.products.table import asked_for

    if isinstance(source, Path) and model_requests.is_packed(source):
        return _add_packed(wanted, source, at, options)

    op, dequantization = options.op, options.dequantization
    linear = op != "attention"
    operator = op if linear else None
    if dequantization == "e4m3" and linear:
        operator = asked_for(op or "w4a8", dequantization).record
    group = _group(_usual_group(op, dequantization) if options.group is None else options.group, 0)
    forms = (options.symmetric, options.scale_dtype, options.dtype)
    weights = model_requests.Weights(group, *forms, operator)
    if isinstance(source, Path):
        model = model_requests.of_folder(source, weights, target=at)
    else:
        model = model_requests.of_name(source, weights)
    if model.stored:
        _check_stored(source)
    kv = options.kv or (((model.dtype, model.dtype),) if op in (None, "attention") else ())
    serving = Serving(
        at, model.dtype, linear, tuple(it for it in kv if it != NO_CACHE), options.max_tokens, options.ms,
        options.tensor_parallel, options.q_lens, options.page, dequantization, options.numerics,
    )  # fmt: skip
    plan = model_requests.plan(model, serving)
    wanted.requests |= plan.requests | _of_engine(model, at, options)
    wanted.layouts |= plan.layouts
    wanted.models.append(model.name)
    wanted.skipped |= plan.skipped
    for kind, names in plan.kinds.items():
        form = [f"{kind.group_size}" if kind.group_size < kind.k else "K"]
        form += [kind.scale_dtype, *["symmetric"] * kind.symmetric, *["bias"] * kind.bias]
        form += [*["static"] * kind.static, *["zero points of x"] * kind.zeros]
        what = f"{kind.experts} x {kind.leaf}" if kind.experts else kind.leaf
        wanted.kinds.append((what, kind.operator, kind.n, kind.k, " ".join(filter(None, form)), model.times(names)))


def _add_packed(wanted: _Wanted, folder: Path, at: Target, options: Options) -> None:
    """Everything of a folder that `terrazzo quantize` or `save_pretrained` wrote; its files say what its layers are."""
    import torch
    from terrazzo.nn.hollow import requests

    _check_stored(folder)
    for parameter in _given():
        if parameter.name in _NOT_OF_PACKED:
            raise click.UsageError(f"{parameter.opts[0]}: {folder} is packed by Terrazzo, and its files say it")
    kv = [it for it in options.kv if it != NO_CACHE] if options.kv else [None]
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    facts = dict(dtype=dtype, page=options.page, ranks=options.tensor_parallel)
    found, layouts = requests(folder, kv, options.ms, at, **facts)
    wanted.requests |= dict.fromkeys(found)
    wanted.layouts |= layouts
    wanted.models.append(folder.name)


def _of_engine(model: Model, at: Target, options: Options) -> dict[KernelRequest, None]:
    """Kernels of attention over caches of vLLM."""
    if not options.caches:
        return {}
    from terrazzo.integrations.vllm.names import CACHES

    if model.architecture is None:
        raise click.UsageError(f"--kv-cache-dtype: {model.name} does not say what heads it has")
    facts = dict(ranks=options.tensor_parallel, most_rows=max(options.q_lens))
    found = [CACHES.model_requests(model.architecture, name, model.dtype, at, **facts) for name in options.caches]
    return dict.fromkeys(request for requests in found for request in requests)


def _add_published(wanted: _Wanted, at: Target) -> None:
    """What the published wheel of a target holds."""
    from terrazzo.ops import ready

    plan = ready.published(at)
    wanted.requests |= plan.requests
    wanted.layouts |= plan.layouts
    wanted.models.append("the published wheel")


def _check_stored(source: Path | str) -> None:
    """What a checkpoint of quantized layers states cannot be stated again."""
    for parameter in _given():
        if parameter.name in _STATED:
            raise click.UsageError(f"{parameter.opts[0]}: the layers of {source} are stored quantized and say it")


def _add_named(wanted: _Wanted, at: Target, options: Options) -> None:
    """Kernels of single weights, or of attention by its formats and heads."""
    from terrazzo.layouts.instances import get_instance
    from terrazzo.ops.products.table import asked_for
    from terrazzo.ops.w4a8.w8a8.op import form_of

    op, dtype, dequantization = options.op or "w4a16", options.dtype or "float16", options.dequantization
    requests = _requests(op)
    if op == "attention":
        facts = dict(head_dim=options.head_dim, page=options.page, prefill=options.prefill, dtype=dtype, target=at)
        for formats in (it for it in options.kv if it != NO_CACHE):
            for q_len in options.q_lens:
                wanted.requests |= dict.fromkeys(requests(*formats, **_heads(options.heads), q_len=q_len, **facts))
            wanted.layouts |= _cache_layout(*formats, options.head_dim)
        return
    facts = {"m": options.ms, "dtype": dtype, "target": at, "symmetric": options.symmetric}
    facts |= {"scale_dtype": options.scale_dtype or dtype, "numerics": options.numerics}
    facts |= {"dequantization": dequantization}
    facts = {name: value for name, value in facts.items() if name not in _OPTIONS - _parameters(op)}
    product = asked_for(op, dequantization)
    if product.direct:
        del facts["dequantization"]
    group = _usual_group(op, dequantization) if options.group is None else options.group
    for n, k in options.shapes:
        size = _group(group, k)
        own = form_of(size, k, product.codes.name) if product.direct else {"group_size": size}
        wanted.requests |= dict.fromkeys(requests(n, k, **own, **facts))
        if product.wide and product.codes.one_group and size > k:
            note = f"{n}x{k}: K is below the group of {group}, so its kernels have one group of K"
            click.echo(f"terrazzo: {note}", err=True)
    wanted.layouts[product.layout] = get_instance(product.layout).identity


_OPTIONS = {"symmetric", "scale_dtype", "numerics", "dequantization"}
"""Facts that not every linear layer's kernels differ by."""


def _parameters(op: str) -> set[str]:
    import inspect

    from terrazzo.ops.products.table import asked_for

    own = {"dequantization"} if asked_for(op).direct else set()
    return own | set(inspect.signature(_requests(op)).parameters)


def _requests(op: str) -> Callable[..., list[KernelRequest]]:
    """The function that names an operator's kernels."""
    import importlib

    return importlib.import_module(f"terrazzo.ops.{op}").kernel_requests


def _usual_group(op: str | None, dequantization: str) -> str:
    from terrazzo.ops.products.table import asked_for

    return "128" if op in (None, "attention") else str(asked_for(op, dequantization).codes.usual or "K")


def _group(text: str, k: int) -> int:
    if text.upper() == "K" or text == "-1":
        return k
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise click.BadParameter(f"{text[:60]!r} is no group size: use 32, 64, 128 or K", param_hint="--group")
    return int(text)


def _heads(text: str) -> dict[str, int]:
    parts = text.split("/")
    if len(parts) != 2 or not all(re.fullmatch(r"\d{1,9}", part, re.ASCII) for part in parts):
        raise click.BadParameter(f"{text[:60]!r}: write query/kv heads, as 32/8", param_hint="--heads")
    return dict(zip(("heads", "kv_heads"), map(int, parts)))


def _cache_layout(keys: str, values: str, head_dim: int) -> dict[str, str]:
    """Name and identity of the packed form of a pair of KV formats."""
    from terrazzo.ops.attention import CacheLayout

    return {f"kv.{keys}/{values}.d{head_dim}": CacheLayout(keys, values, head_dim).identity}


def _show_dry_run(wanted: _Wanted, at: Target, options: Options) -> None:
    from terrazzo.ops.model_requests import seconds

    build = Build(list(wanted.requests), options.workers)
    counts: dict[str, list[float]] = {}
    for request in wanted.requests:
        counts.setdefault(request.name, []).append(seconds(request))
    expected = build.expected()
    if options.as_json:
        kernels = {name: len(each) for name, each in counts.items()}
        return print_json({"target": at.arch, "kernels": kernels, "skipped": wanted.skipped, **expected})
    if wanted.kinds:
        columns = ("layer", "operator", "N", "K", "group, scales", "layers")
        print_table(columns, sorted(wanted.kinds, key=lambda it: (it[2], it[3])))
        click.echo()
    print_table(("kernels", "count", "CPU s"), [(name, len(each), round(sum(each))) for name, each in counts.items()])
    _print_skipped(wanted)
    click.echo(
        f"\n{expected['total']} kernels for {at.arch}, {expected['cached']} of them in the cache; about "
        f"{expected['minutes']:.1f} minutes with {build.workers} processes; nothing was compiled"
    )


def _print_skipped(wanted: _Wanted) -> None:
    reasons: dict[str, list[str]] = {}
    for name, why in wanted.skipped.items():
        reasons.setdefault(why, []).append(name)
    for why, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        click.echo(f"left out: {names[0]}{more}: {why}")
