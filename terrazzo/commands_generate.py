"""`terrazzo generate` and `terrazzo chat`: text of a folder's model, printed while it comes."""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from terrazzo.command_line import AMOUNT, COUNT, TRUST, Command, Dtype, Formats, Number
from terrazzo.console import layers_progress

LEAVE, ANEW = ("/exit", "/quit", "/bye"), "/new"
"""What somebody types in a chat to end it, and to begin it again."""
HEAT, SHARE = Number(0, 1e6), Number(0, 1, min_open=True)
SEED = click.IntRange(-(1 << 63), (1 << 64) - 1)
_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
_LOADING = ("kv", "quantize", "device", "dtype", "trust_remote_code")


def _options(command: Callable[..., None]) -> Callable[..., None]:
    """The folder, and what both verbs say of loading and sampling."""
    for add in reversed(
        (
            click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path)),
            click.option(
                "--kv", type=Formats(), help="Keys and values: int8, int8/int4. Default: 16 bits, or as saved."
            ),
            click.option("--quantize", help="Packs layers that the folder has in float, as w4a16-g128."),
            click.option("--device", help="cuda, cuda:1 or cpu. Default: cuda where there is a GPU."),
            click.option("--dtype", type=Dtype("f16", "bf16"), help="Of activations. Default: the model's, or f16."),
            click.option("--max-new-tokens", type=COUNT, default=256, show_default=True, help="Of an answer, at most."),
            click.option(
                "--temperature", type=HEAT, default=0.0, show_default=True, help="0 takes the most likely token."
            ),
            click.option("--top-k", type=AMOUNT, default=0, show_default=True, help="Tokens to draw from; 0 for all."),
            click.option(
                "--top-p", type=SHARE, default=1.0, show_default=True, help="Share of probability to draw from."
            ),
            click.option(
                "--min-p", type=Number(0, 1), default=0.0, show_default=True, help="Of the likeliest token's, at least."
            ),
            click.option(
                "--repetition-penalty", type=Number(1e-3, 1e3), default=1.0, show_default=True, help="1 for none."
            ),
            click.option("--stop", multiple=True, help="Text at which an answer ends; may be given more than once."),
            click.option("--seed", type=SEED, help="Of sampling. Default: another one each time."),
            TRUST,
        )
    ):
        command = add(command)
    return command


@click.command(cls=Command)
@_options
@click.argument("prompt")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Put the prompt into the chat template, or not. Default: where the folder has one.",
)
def generate(folder: Path, prompt: str, chat: bool | None, **options: object) -> None:
    """Print what the model in FOLDER writes after PROMPT, while it comes. PROMPT - reads standard input."""
    prompt = sys.stdin.read() if prompt == "-" else prompt
    answer, template = _model(folder, options)
    answer(prompt, chat=template if chat is None else chat)


@click.command(cls=Command)
@_options
@click.option("--system", help="A first message that says how to answer.")
def chat(folder: Path, system: str | None, **options: object) -> None:
    """Talk with the model in FOLDER: a line is a message. /new begins again, /exit or Ctrl-D ends it."""
    from terrazzo.lowering.errors import ArgumentError

    answer, _ = _model(folder, options, talks=True)
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    while (line := _line()) is not None:
        if line in LEAVE:
            break
        if line == ANEW:
            messages = list(first)
        elif line:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                said = answer(asked, chat=True)
            except ArgumentError as error:  # too long a talk, say: it can go on without this message
                click.echo(f"terrazzo: {error}; {ANEW} begins again", err=True)
                continue
            messages = [*asked, {"role": "assistant", "content": said}]


def _line() -> str | None:
    """The next message, None at the end of the input. A prompt is shown to people alone."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


def _model(folder: Path, options: dict[str, Any], talks: bool = False) -> tuple[Callable[..., str], bool]:
    """What answers a prompt and prints it meanwhile, and whether there is a chat template; `talks`: it must."""
    import torch
    from terrazzo.nn.foreign import tokenizer_of
    from terrazzo.nn.loading import load
    from terrazzo.nn.text import generate

    tokenizer = tokenizer_of(folder, options["trust_remote_code"])  # before the weights: what lacks is said at once
    template = bool(getattr(tokenizer, "chat_template", None))
    if talks and not template:
        raise click.UsageError(f"{folder} has no chat template: `terrazzo generate {folder} TEXT` needs none")
    given = {name: options[name] for name in _LOADING}
    if given["dtype"] is not None:
        given["dtype"] = getattr(torch, given["dtype"])
    with ExitStack() as stack:
        model = load(folder, **given, progress=layers_progress(stack))
    sampling = {name: options[name] for name in _SAMPLING}
    stop = list(options["stop"]) or None
    made = functools.partial(generate, model, tokenizer=tokenizer, stream=True, stop=stop, **sampling)

    def answer(prompt: str | list[dict[str, str]], chat: bool) -> str:
        seed = secrets.randbelow(1 << 31) if options["seed"] is None else options["seed"]  # torch's own is always alike
        return made(prompt, chat=chat, seed=seed)[0]

    return answer, template
