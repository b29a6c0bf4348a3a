"""How the command speaks: its own words in errors, "did you mean", and the kinds of arguments that verbs share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import click
from terrazzo.lowering import errors
from terrazzo.lowering.data_files import MOST
from terrazzo.lowering.errors import ArgumentError, TargetError
from terrazzo.lowering.spelling import closest as closest
from terrazzo.lowering.spelling import did_you_mean

_PARAMETERS = {
    "group_size": "group", "m": "ms", "n": "shapes", "k": "shapes", "kv_heads": "heads", "k_format": "kv",
    "v_format": "kv", "page_size": "page", "operator": "op", "model": "models", "format": "form",
}  # fmt: skip
"""Argument of the library -> parameter of the commands that name it otherwise."""
_LONG = 500  # characters of a value, of which only the ends are shown
_CALLS = re.compile(r"\b\w+(\.\w+)*\([^)]*\)")
"""A remedy that speaks of calls is no remedy on a command line."""


def option_of(command: click.Command, argument: str) -> click.Parameter | None:
    """The parameter of a command that an argument of the library comes from."""
    names = (argument, f"{argument}s", argument.removesuffix("s"), _PARAMETERS.get(argument))
    by_name = {parameter.name: parameter for parameter in command.params}
    return next((by_name[name] for name in names if name in by_name), None)


def in_its_words(command: click.Command, error: ArgumentError) -> str:
    """An error of the library as somebody who typed a command reads it."""
    remedy = error.remedy
    if _CALLS.search(remedy) or "=" in remedy:
        remedy = f"see `{command.name} --help`" if command.name else "see --help"
    parameter = option_of(command, error.argument)
    if isinstance(error, TargetError) and error.value is None and parameter is not None:  # none given, none seen
        option = parameter.opts[0]
        return f"{option} is needed: {error.constraint}; name a GPU's architecture, as {option} sm_90a"
    if parameter is None:
        name = f"{error.argument} {shown(error.value)}"
    else:
        option = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
        own = error.argument in (parameter.name, parameter.name.removesuffix("s")) or error.argument == "group_size"
        own = own or f"--{error.argument}" in parameter.opts
        value = "" if error.value is None and own else f" {shown(error.value)}"
        name = f"{option}{value}" if own else f"{option}: {error.argument}{value}"
    return f"{name}: {error.constraint}; {remedy}"


def shown(value: object) -> str:
    """A value as it is typed."""
    if isinstance(value, list | tuple):
        return ",".join(map(shown, value)) or "(none)"
    try:
        text = str(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits
        return errors.shown(value)
    if len(text) > _LONG:
        return errors.shown(text)
    return repr(text) if not text or re.search(r"\s", text) or not text.isprintable() else text


class Command(click.Command):
    """A verb whose errors name its options."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ArgumentError as error:
            raise click.UsageError(in_its_words(self, error), ctx) from error


class Group(click.Group):
    """Verbs below a verb, with "did you mean" for one that is not there."""

    command_class = Command
    group_class = type

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            hint = did_you_mean(args[0], self.list_commands(ctx))
            ctx.fail(f"No such command {args[0]!r}: {hint}{ctx.command_path} has {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class Number(click.FloatRange):
    """A float between two bounds, which NaN is not."""

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = super().convert(value, param, ctx)
        return found if not math.isnan(found) else self.fail(f"{value!r} is no number", param, ctx)


COUNT, AMOUNT = click.IntRange(1, MOST), click.IntRange(0, MOST)


class Shape(click.ParamType):
    """NxK, for example 28672x4096."""

    name = "NxK"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"\s*(\d{1,18})\s*[xX,]\s*(\d{1,18})\s*", value, re.ASCII)
        if not found or not all(int(part) for part in found.groups()):
            self.fail(f"{brief(value)} is no shape: write N x K as two positive numbers, as 28672x4096", param, ctx)
        return int(found.group(1)), int(found.group(2))


class Counts(click.ParamType):
    """Positive integers separated by commas."""

    name = "M,M,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(re.fullmatch(r"0*[1-9]\d{0,17}", part, re.ASCII) for part in parts):
            self.fail(f"{brief(value)} is no list of positive numbers: write for example 1,16,256", param, ctx)
        return tuple(dict.fromkeys(map(int, parts)))


class TargetName(click.ParamType):
    """An architecture, sm_90a, or a GPU by its TVM tag, nvidia/nvidia-h100."""

    name = "TARGET"

    def __init__(self, auto: bool = False, only_arch: bool = False) -> None:
        self.auto, self.only_arch = auto, only_arch

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from terrazzo.lowering.targets import CAPABILITIES, TARGET_NAMES, Target

        if self.auto and value == "auto":
            return value
        known = tuple(CAPABILITIES) if self.only_arch else TARGET_NAMES
        try:
            arch = Target.parse(value).arch
        except TargetError:
            hint = did_you_mean(value, known)
            self.fail(f"{brief(value)} is no target: {hint}use {' or '.join(self._choices(known))}", param, ctx)
        return arch if self.only_arch else value

    def _choices(self, known: tuple[str, ...]) -> list[str]:
        architectures = [name for name in known if "/" not in name]
        tags = [] if self.only_arch else ["a tag such as nvidia/nvidia-h100"]
        return [", ".join(architectures + ["auto"] * self.auto), *tags]


class Targets(TargetName):
    """Targets separated by commas."""

    name = "TARGET,TARGET,..."

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        named = list(filter(None, map(str.strip, value.split(","))))
        if not named:
            self.fail("name at least one target, for example sm_90a", param, ctx)
        return tuple(super(Targets, self).convert(name, param, ctx) for name in named)


class Dtype(click.ParamType):
    """f16, bf16 (f32 for scales), or the long names."""

    name = "dtype"

    def __init__(self, *allowed: str) -> None:
        self.allowed = {short: _DTYPES[short] for short in allowed}

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known = {**self.allowed, **{name: name for name in self.allowed.values()}}
        if value not in known:
            self.fail(f"{brief(value)} is no dtype here: use {' or '.join(self.allowed)}", param, ctx)
        return known[value]


class Formats(click.ParamType):
    """Formats of keys and values as `terrazzo.load` takes them, int8 or int4_channel64/int4.

    Args:
        none: whether the word "none" is one, which becomes NO_CACHE.
    """

    name = "KEYS/VALUES"

    def __init__(self, none: bool = False) -> None:
        self.none = none

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        from terrazzo.ops.attention.pairs import pair_of
        from terrazzo.ops.products.kv import FORMATS

        if isinstance(value, tuple):
            return value
        if self.none and value == "none":
            return NO_CACHE
        try:
            return pair_of(value)
        except ArgumentError as error:
            if error.value in FORMATS or (error.value == value != "" and "/" in value):
                self.fail(f"{brief(value)}: {error.constraint}; {error.remedy}", param, ctx)
            none = ", or none" if self.none else ""
            self.fail(f"{brief(error.value)} is no format of keys or values: {error.remedy}{none}", param, ctx)


NO_CACHE = ("", "")
_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}


class Choice(click.ParamType):
    """One of some names that are looked up when an argument is read."""

    def __init__(self, what: str, known: Iterable[str]) -> None:
        self.name, self.what, self.known = what.split()[0], what, known

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        known = list(self.known())
        if value not in known:
            hint = did_you_mean(value, known)
            self.fail(f"{brief(value)} is no {self.what}: {hint}known are {', '.join(known)}", param, ctx)
        return value


def models() -> Iterable[str]:
    from terrazzo.schedules.models import MODELS

    return MODELS


def operators() -> Iterable[str]:
    from terrazzo.ops.registry import REGISTRY

    return dict.fromkeys(support.operator for support in REGISTRY)


def tuned_operators() -> Iterable[str]:
    from terrazzo.autotune.operators import OPERATORS

    return OPERATORS


def linear_operators() -> Iterable[str]:
    from terrazzo.ops.products.table import BY_RECORD

    return list(BY_RECORD)


def instances() -> Iterable[str]:
    from terrazzo.layouts.instances import INSTANCES

    return sorted(INSTANCES)


NUMERICS = Choice("numerics", lambda: ("auto", "exact", "fused", "post"))
DEQUANTIZATION = Choice("dequantization", lambda: ("auto", "xor", "unsigned", "e4m3"))
MODEL = Choice("model", models)
OPERATOR = Choice("operator", operators)
TUNED_OPERATOR = Choice("operator that can be tuned", tuned_operators)
INSTANCE = Choice("instance", instances)
TRUST = click.option(
    "--trust-remote-code", is_flag=True, help="Run Python code of the folder: its config's, its tokenizer's."
)


def brief(value: str) -> str:
    """A value in quotes, cut where it is long."""
    return repr(value if len(value) <= 60 else f"{value[:57]}...")
