"""`terrazzo quantize`, a float model's folder to one in fewer bits, and `terrazzo pack`, that to a packed one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from terrazzo.command_line import TRUST, Command, Formats, TargetName
from terrazzo.console import json_option, layers_progress, print_json, print_table

if TYPE_CHECKING:
    import torch

MOST_TOKENS = 1 << 22
LETTERS = 32
"""Of a text that are read for each token."""
SHOWN = 10
"""Layers with the largest errors that are printed."""


_FOLDER = click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
_OUT = click.option(
    "-o", "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write."
)
_KV = click.option(
    "--kv", type=Formats(), help="Keys and values that a packed folder names: int8, int8/int4. Default: 16 bits."
)
_DTYPE = click.option(
    "--dtype", type=click.Choice(["f16", "bf16"]), help="Of activations. Default: the model's, or f16."
)
_TARGET = click.option(
    "--target", type=TargetName(), help="Architecture to pack for, as sm_90a. Default: the device's."
)
_VERIFY = click.option(
    "--verify", is_flag=True, help="Compare all bytes of FOLDER with those that a stopped run began with."
)


@click.command(cls=Command)
@_FOLDER
@_OUT
@click.option(
    "--format",
    "form",
    default="w4a16-g128",
    show_default=True,
    help="As w4a16-g64, w4a16-gK-sym, w4a8, w4a8-e4m3, w4ax, mxfp4, mxfp4-e4m3, mxfp4-mxfp8, nvfp4, nf4, w8a16, w8a8, "
    "w8a8-e4m3, fp8.",
)
@click.option(
    "--method",
    type=click.Choice(["rtn", "gptq", "awq", "autoround"]),
    default="rtn",
    show_default=True,
    help="rtn rounds to the nearest, with searched ranges. Others run llm-compressor (terrazzo config quantizer) and "
    "need --calibration.",
)
@click.option(
    "--write",
    type=click.Choice(["compressed-tensors", "packed"]),
    help="Form of the folder. Default: compressed-tensors, which vLLM reads too, where format and model have it and "
    "neither --kv nor --target is given.",
)
@_KV
@click.option("--device", help="Where weights are quantized. Default: cuda where there is a GPU.")
@_DTYPE
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text file that the float model reads: ranges and orders of codes, smooth vectors, scales of --kv fp8.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1, MOST_TOKENS),
    default=4096,
    show_default=True,
    help="Of the text that are read, in sequences of up to 512.",
)
@_TARGET
@TRUST
@_VERIFY
@json_option
def quantize(
    folder: Path, out: Path, form: str, method: str, dtype: str | None, calibration: Path | None, tokens: int,
    as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Quantize a float Hugging Face model, layer by layer, to a folder that terrazzo.load reads.

    Where the format is a published one, vLLM and transformers read the folder, too.

    Of a folder in 4-bit integers, as GPTQ makes them, --format w4a8 makes W4A8, and prints what that adds in error.

    A run that was stopped goes on where it was when it is started again. Where stderr is no terminal, lines there say
    how far it is.
    """
    from terrazzo.integrations import llm_compressor
    from terrazzo.nn.quantizing import quantize_folder

    if calibration is None and _is_given("tokens"):
        raise click.UsageError("--tokens is of the text that --calibration names; give both")
    with ExitStack() as stack:
        trusted = options["trust_remote_code"]
        text = None if calibration is None else _tokens_of(folder, calibration, tokens, trusted)
        options |= dict(dtype=_dtype(dtype), calibration=text)
        options["progress"] = layers_progress(stack, quiet=as_json)
        if method == "rtn":
            errors = quantize_folder(folder, out, form, **options)
        else:
            kept = {name: options.pop(name) for name in ("kv", "target", "write")}
            if kept["write"] == "packed":
                remedy = "leave --write out, and pack that folder with terrazzo pack"
                raise click.UsageError(f"--method {method} writes compressed-tensors and no packed folder; {remedy}")
            if named := [name for name in ("kv", "target") if kept[name] is not None]:
                raise click.UsageError(f"--{named[0]} is of packed folders, which --method {method} does not write")
            errors = llm_compressor.quantize_folder(folder, out, form, method, **options)
    written = _method_of(out)
    if as_json:
        return print_json({"out": str(out), "format": form, "method": method, "written": written, "errors": errors})
    worst = sorted(errors.items(), key=lambda item: -item[1])
    print_table(("layer", "error %"), [(name, round(100 * error, 2)) for name, error in worst[:SHOWN]])
    shown = f"the {min(SHOWN, len(worst))} with the largest errors above"
    click.echo(f"{len(errors)} layers in {out}, {written}, {shown}")


@click.command(cls=Command)
@_FOLDER
@_OUT
@_KV
@click.option("--device", help="Where weights are packed. Default: cuda where there is a GPU.")
@_DTYPE
@_TARGET
@TRUST
@_VERIFY
@json_option
def pack(folder: Path, out: Path, dtype: str | None, as_json: bool, **options: Any) -> None:
    """Pack a quantized folder, layer by layer, to one that terrazzo.load reads faster: a cache of FOLDER.

    Weights are those of FOLDER. A run that was stopped goes on where it was when it is started again.
    """
    from terrazzo.nn.quantizing import quantize_folder

    with ExitStack() as stack:
        options["dtype"] = _dtype(dtype)
        layers = quantize_folder(folder, out, None, **options, progress=layers_progress(stack, quiet=as_json))
    if as_json:
        return print_json({"out": str(out), "layers": list(layers)})
    click.echo(f"{len(layers)} layers in {out}, {_method_of(out)}")


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    return {"f16": torch.float16, "bf16": torch.bfloat16, None: None}[name]


def _method_of(folder: Path) -> str:
    """How the folder's weights are written, in words."""
    from terrazzo.lowering.data_files import read_json

    stated = read_json(folder / "config.json", "config.json", "quantize again")["quantization_config"]
    return "packed for terrazzo.load" if stated["quant_method"] == "terrazzo" else f"{stated['quant_method']}"


def _is_given(name: str) -> bool:
    """Whether an option stands on the command line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _tokens_of(folder: Path, path: Path, most: int, trust_remote_code: bool) -> torch.Tensor:
    """Token numbers [sequences, length] of a text file by the model's tokenizer."""
    import torch
    from terrazzo.lowering import data_files
    from terrazzo.lowering.errors import ArgumentError
    from terrazzo.nn import foreign
    from terrazzo.nn.config_fields import positions
    from terrazzo.nn.reading import read_config

    tokenizer = foreign.tokenizer_of(folder, trust_remote_code)
    text = data_files.read_start(path, "--calibration", "name a file of text", LETTERS * most)
    found = foreign.tokens_of(tokenizer, text)[:most]
    length = min(512, len(found), positions(read_config(folder, None, trust_remote_code)[1]) or 512)
    if not length:
        raise ArgumentError("--calibration", str(path), "holds no token", "name a file of text")
    rows = len(found) // length
    return torch.tensor(found[: rows * length]).view(rows, length)
