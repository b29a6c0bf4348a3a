"""The `terrazzo` command.

    terrazzo info | ops | layout | compile | cache list|clear|verify | tune | demo | bench

Exit codes: 0 done, 1 something that was asked for failed (a kernel that does not compile, a damaged cache entry), 2 bad
input, with one line on stderr that says what is wrong and what to do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click
from terrazzo import __version__
from terrazzo.commands_compile import cache_group, compile_command
from terrazzo.commands_info import info, layout, ops
from terrazzo.commands_run import bench, demo
from terrazzo.commands_tune import tune_group
from terrazzo.lowering.errors import TerrazzoError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="terrazzo")
def terrazzo() -> None:
    """Mixed-precision operators for LLM inference, with layouts derived from tensor-core fragments."""


for _command in (info, ops, layout, compile_command, cache_group, tune_group, demo, bench):
    terrazzo.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. Never shows a traceback for bad input."""
    try:
        code = terrazzo.main(args=argv, prog_name="terrazzo", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as asked:
        click.echo(asked.format_message())
        return 0
    except (click.Abort, KeyboardInterrupt):
        click.echo("terrazzo: stopped", err=True)
        return 130
    except click.ClickException as error:
        return _refuse(error.format_message())
    except TerrazzoError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has gone; keep Python's exit quiet
        return 141
    except OSError as error:  # a file or folder that cannot be read or written
        named = f"{error.filename}: " if error.filename else ""
        return _refuse(f"{named}{error.strerror or error}; name another file or folder")
    return code if isinstance(code, int) else 0  # click hands over the code of an Exit


def _refuse(message: str) -> int:
    click.echo(f"terrazzo: {' '.join(message.split())}", err=True)
    return 2
