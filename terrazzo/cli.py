"""The `terrazzo` command.

    terrazzo info | ops | layout | compile | cache list|clear|verify | config compiler | tune | quantize | pack |
    generate | chat | serve-check | demo | bench

Exit codes: 0 done, 1 something that was asked for failed (a kernel that does not compile, a damaged cache entry), 2 bad
input, with one line on stderr that says what is wrong and what to do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence

import click
from terrazzo import __version__
from terrazzo.command_line import Group
from terrazzo.commands_cache import cache_group
from terrazzo.commands_compile import compile_command
from terrazzo.commands_config import config_group
from terrazzo.commands_generate import chat, generate
from terrazzo.commands_info import info, layout, ops
from terrazzo.commands_quantize import pack, quantize
from terrazzo.commands_run import bench, demo
from terrazzo.commands_serve_check import serve_check
from terrazzo.commands_tune import tune_group
from terrazzo.lowering.errors import TerrazzoError


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="terrazzo")
def terrazzo() -> None:
    """Mixed-precision operators for LLM inference, with layouts derived from tensor-core fragments."""


for _command in (
    info,
    ops,
    layout,
    compile_command,
    cache_group,
    config_group,
    tune_group,
    quantize,
    pack,
    generate,
    chat,
    serve_check,
    demo,
    bench,
):
    terrazzo.add_command(_command)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. Never shows a traceback for bad input."""
    _open_streams()
    code = 0
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()  # what a closed pipe or a full disk refuses is noticed here, not at the end of Python
    except BrokenPipeError:
        return _give_up_stdout()
    except OSError as error:
        _give_up_stdout()
        return code or _refuse(_unwritten(error))  # where there is a code, its line was said
    return code


def _run(argv: list[str]) -> int:
    with contextlib.suppress(ValueError):  # only the main thread may
        signal.signal(signal.SIGTERM, _stop)
    if any("\0" in word for word in argv):
        return _refuse("an argument has a zero byte in it, which no name or number has; leave it out")
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
    except UnicodeEncodeError as error:
        return _refuse(f"{error.object!r} is no text, which a name of a GPU or a format must be; write it again")
    except BrokenPipeError:
        raise
    except OSError as error:  # a file or folder that cannot be read or written
        if not isinstance(error.filename, str | bytes):
            return _refuse(_unwritten(error))
        return _refuse(f"{os.fsdecode(error.filename)}: {error.strerror or error}; name another file or folder")
    return code if isinstance(code, int) else 0  # click hands over the code of an Exit


def _unwritten(error: OSError) -> str:
    return f"what is printed or saved cannot be written: {error.strerror or error}; make room, or name another place"


def _stop(*_: object) -> None:
    """SIGTERM ends a command as Ctrl-C does: what it began is removed."""
    raise KeyboardInterrupt


def _open_streams() -> None:
    """Give a process that was started with closed standard streams empty ones: files that are opened later would take
    their numbers, and what is printed would go into them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))
        if number and hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")  # names of files may be no text


def _give_up_stdout() -> int:
    """Let what is left in the buffer of standard output go nowhere; exit code as of a process ended by SIGPIPE."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _refuse(message: str) -> int:
    line = f"terrazzo: {' '.join(message.split())}"
    click.echo(line.encode(errors="backslashreplace").decode(), err=True)
    return 2
