"""`terrazzo quantize`: a float model's folder to a packed one."""

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


@click.command(cls=Command)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write.")
@click.option(
    "--format",
    "form",
    default="w4a16-g128",
    show_default=True,
    help="As w4a16-g64, w4a16-gK-sym, w4a8, mxfp4, nvfp4, w8a16, fp8.",
)
@click.option("--kv", type=Formats(), help="Keys and values that the folder names: int8, int8/int4. Default: 16 bits.")
@click.option("--device", help="Where weights are quantized. Default: cuda where there is a GPU.")
@click.option("--dtype", type=click.Choice(["f16", "bf16"]), help="Of activations. Default: the model's, or f16.")
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
@click.option("--target", type=TargetName(), help="Architecture to pack for, as sm_90a. Default: the device's.")
@TRUST
@click.option("--verify", is_flag=True, help="Compare all bytes of FOLDER with those that a stopped run began with.")
@json_option
def quantize(
    folder: Path, out: Path, form: str, dtype: str | None, calibration: Path | None, tokens: int, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Quantize a float Hugging Face model, layer by layer, to a folder that terrazzo.load reads.

    A run that was stopped goes on where it was when it is started again. Where stderr is no terminal, lines there say
    how far it is.
    """
    import torch
    from terrazzo.nn.quantizing import quantize_folder

    if calibration is None and _is_given("tokens"):
        raise click.UsageError("--tokens is of the text that --calibration names; give both")
    kind = {"f16": torch.float16, "bf16": torch.bfloat16, None: None}[dtype]
    with ExitStack() as stack:
        trusted = options["trust_remote_code"]
        text = None if calibration is None else _tokens_of(folder, calibration, tokens, trusted)
        options |= dict(dtype=kind, calibration=text)
        errors = quantize_folder(folder, out, form, **options, progress=layers_progress(stack, quiet=as_json))
    if as_json:
        return print_json({"out": str(out), "format": form, "errors": errors})
    worst = sorted(errors.items(), key=lambda item: -item[1])
    print_table(("layer", "error %"), [(name, round(100 * error, 2)) for name, error in worst[:SHOWN]])
    click.echo(f"{len(errors)} layers in {out}, the {min(SHOWN, len(worst))} with the largest errors above")


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
