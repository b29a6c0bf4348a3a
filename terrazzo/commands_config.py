"""`terrazzo config`: what is kept for all processes of a user."""

from __future__ import annotations

from pathlib import Path

import click
from terrazzo.command_line import Group
from terrazzo.console import json_option, print_json


@click.group("config", cls=Group)
def config_group() -> None:
    """Settings of this user, in ~/.config/terrazzo/config.json."""


@config_group.command("compiler")
@click.argument("python", required=False, type=click.Path(dir_okay=False, path_type=Path), metavar="[PATH]")
@click.option("--unset", is_flag=True, help="Let each environment compile its own kernels again.")
@json_option
def compiler_command(python: Path | None, unset: bool, as_json: bool) -> None:
    """Which environment compiles cold kernels: show it, or name the Python at PATH.

    A process beside a serving engine has the engine's own tilelang, with which kernels cannot be compiled. The Python
    of an environment with terrazzo[compile] of the same version compiles for it. TERRAZZO_COMPILER, where it is set,
    counts first.
    """
    from terrazzo.lowering import compilers

    if python is not None and unset:
        raise click.UsageError("PATH names a compiler and --unset forgets it; give one")
    if python is not None:
        compilers.set_compiler(python)
    elif unset:
        compilers.set_compiler(None)
    report = compilers.compiler_report()
    if as_json:
        return print_json(report)
    for line in describe(report):
        click.echo(line)
    if report["problem"] or report["missing"]:
        raise click.exceptions.Exit(1)


@config_group.command("quantizer")
@click.argument("python", required=False, type=click.Path(dir_okay=False, path_type=Path), metavar="[PATH]")
@click.option("--unset", is_flag=True, help="Name none.")
@json_option
def quantizer_command(python: Path | None, unset: bool, as_json: bool) -> None:
    """Which environment quantizes by GPTQ, AWQ and AutoRound: show it, or name the Python at PATH.

    It has llm-compressor, which pins other releases than engines have, and needs no terrazzo. TERRAZZO_QUANTIZER, where
    it is set, counts first.
    """
    from terrazzo.integrations import llm_compressor

    if python is not None and unset:
        raise click.UsageError("PATH names a quantizer and --unset forgets it; give one")
    if python is not None or unset:
        llm_compressor.set_quantizer(python)
    report = llm_compressor.report()
    if as_json:
        return print_json(report)
    if report["python"] is None and report["problem"] is None:
        return click.echo(f"none is named; these two lines set one up:\n{llm_compressor.INSTALL}")
    if report["python"] is not None:
        click.echo(f"{report['python']}, named by {report['named_by']}")
    if report["problem"]:
        click.echo(report["problem"])
        raise click.exceptions.Exit(1)
    click.echo(", ".join(f"{name} {version}" for name, version in report["releases"].items()))


def describe(report: dict) -> list[str]:
    """A compiler's report as lines of text, the first one saying who compiles."""
    lines = ["this environment compiles" if report["python"] is None else report["python"]]
    if report["python"] is None and (report["missing"] or report["problem"]):
        lacks = ", ".join(report["missing"] or ()) or "a compiler that works"
        lines = [f"none: this environment lacks {lacks}, and runs kernels that are ready"]
    if report["named_by"] is not None:
        lines[0] += f", named by {report['named_by']}"
    if report["toolchain"] is not None:
        known = {name.replace("_", "-"): version for name, version in report["toolchain"].items() if version}
        lines.append(", ".join(f"{name} {version}" for name, version in known.items()) or "no compiler was found")
    if report["missing"] and report["python"] is not None:
        lines.append(f"missing: {', '.join(report['missing'])}")
    if report["problem"]:
        lines.append(report["problem"])
    return lines
