"""What a tuning job is to do: from a job file (TOML) or from flags, with one clear line for what is wrong with it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from terrazzo.autotune.database import Problem
from terrazzo.autotune.operators import DTYPES, get_operator
from terrazzo.autotune.search import STRATEGIES
from terrazzo.lowering.errors import ArgumentError

TOKENS = {"w4a16": (8, 16, 32, 64, 128, 256, 1024, 4096), "w4a8": (8, 16, 32, 64, 128, 256, 1024, 4096)}
"""M that a job tunes when it names none: one of each bucket that kernels tell apart."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_SHORT = {"f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Job:
    """A tuning job.

    Attributes:
        ops: operators. models: names of schedules/models.py. shapes: further weights (N, K). extra: weights with tokens
            of their own, (N, K, tokens). m: numbers of tokens; empty takes `TOKENS`.
        dtype: of activations and output. group: input channels for each scale; None takes each operator's usual one.
        symmetric: without zero points.
        target: "auto", or what `Target.parse` takes; a job measures on the GPU that is there, so another target is
            refused unless it is a dry run.
        strategy: see autotune/search.py. trials: of one problem, at most; 0 for no limit. patience: trials without
            progress after which a problem ends; 0 for never. seed: of the strategy.
        budget_s: seconds for all of it, 0 for no limit. budget_trials: trials for all of it, 0 for no limit.
        confirm: best schedules of each problem that are measured again beside the heuristic's in the end.
        measure_ms: GPU time of one trial. most: schedules of a problem's space. peers: time cuBLAS too.
    """

    ops: tuple[str, ...] = ("w4a16",)
    models: tuple[str, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()
    m: tuple[int, ...] = ()
    dtype: str = "float16"
    group: int | None = None
    symmetric: bool = False
    target: str = "auto"
    strategy: str = "learned"
    trials: int = 0
    patience: int = 24
    seed: int = 0
    budget_s: float = 0.0
    budget_trials: int = 0
    confirm: int = 2
    measure_ms: float = 15.0
    most: int = 160
    peers: bool = True
    extra: tuple[tuple[int, int, tuple[int, ...]], ...] = field(default=())

    def __post_init__(self) -> None:
        for op in self.ops:
            get_operator(op)
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("dtype", self.dtype, DTYPES)
        for name in ("trials", "patience", "budget_s", "budget_trials", "confirm", "seed"):
            if getattr(self, name) < 0:
                raise ArgumentError(name, getattr(self, name), "must not be negative", "0 means no limit")
        if self.measure_ms <= 0 or self.most < 1:
            raise ArgumentError("measure_ms", self.measure_ms, "must be positive, and most at least 1", "leave it out")
        if any(m < 1 for m in self.m):
            raise ArgumentError("m", self.m, "must be numbers of tokens, at least 1", "write [1, 16, 256]")

    def problems(self) -> list[Problem]:
        """Operators times weights times tokens, each once, those of one weight side by side.

        Raises:
            ArgumentError: no weight is named, or an unknown model.
        """
        from terrazzo.schedules.models import shapes

        weights = {**dict.fromkeys(shapes(list(self.models))), **dict.fromkeys(self.shapes)}
        if not weights and not self.extra:
            raise ArgumentError(
                "models", self.models, "no weight is named", "name a model, a shape NxK or a shapes file"
            )
        found: dict[Problem, None] = {}
        for op in self.ops:
            every = [(n, k, self.m or TOKENS[op]) for n, k in weights]
            every += [(n, k, m or self.m or TOKENS[op]) for n, k, m in self.extra]
            for n, k, tokens in every:
                facts = get_operator(op).facts(n, k, dtype=self.dtype, group=self.group, symmetric=self.symmetric)
                found |= dict.fromkeys(Problem.of(op, facts, m) for m in tokens)
        return list(found)


def _one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ArgumentError(name, value, f"must be one of {', '.join(known)}", f"leave {name} out")


def seconds(text: str | int | float) -> float:
    """ "90s", "10m", "1.5h" or a number of minutes -> seconds.

    Raises:
        ArgumentError: something else.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", str(text))
    if not found or float(found.group(1)) <= 0:
        raise ArgumentError("budget", text, "is no time", "write 90s, 10m or 1h, or a number of trials as '200 trials'")
    return float(found.group(1)) * _UNITS[found.group(2) or "m"]


def budget(text: str | int | float) -> dict[str, float | int]:
    """ "10m" or "200 trials" -> the fields of a job."""
    found = re.fullmatch(r"\s*(\d+)\s*trials?\s*", str(text))
    if found and int(found.group(1)) > 0:
        return {"budget_trials": int(found.group(1))}
    return {"budget_s": seconds(text)}


def shape(text: str) -> tuple[int, int]:
    """ "28672x4096" -> (28672, 4096).

    Raises:
        ArgumentError: something else.
    """
    found = re.fullmatch(r"\s*(\d+)\s*[xX,]\s*(\d+)\s*", text) if isinstance(text, str) else None
    if not found or not int(found.group(1)) or not int(found.group(2)):
        raise ArgumentError("shapes", text, "is no shape", "write N x K as 28672x4096")
    return int(found.group(1)), int(found.group(2))


def read_shapes(path: Path) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Lines "NxK" or "NxK M M ..." of a file; # begins a comment. (n, k, tokens), no tokens where none stand there.

    Raises:
        ArgumentError: the file cannot be read, or a line is none of these; the message has its number.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("shapes", str(path), f"cannot be read: {error}", "name a text file") from error
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        if not all(word.isdigit() and int(word) for word in words[1:]):
            raise ArgumentError(f"{path}:{number}", line.strip(), "has tokens that are no numbers", "write NxK M M ...")
        found.append((*shape(words[0]), tuple(map(int, words[1:]))))
    if not found:
        raise ArgumentError("shapes", str(path), "holds no shape", "write a line NxK for each weight")
    return tuple(found)


_LISTS = {"op": str, "models": str, "shapes": str, "m": int}
_SCALARS = {
    "dtype": str,
    "group": int,
    "symmetric": bool,
    "target": str,
    "strategy": str,
    "trials": int,
    "patience": int,
    "seed": int,
    "confirm": int,
    "measure_ms": (int, float),
    "most": int,
    "peers": bool,
    "budget": (str, int, float),
    "shapes_file": str,
}


def read_job(path: Path) -> Job:
    """A job from a TOML file: the fields of `Job`, with `op` for ops, `budget` for both budgets, `shapes_file`.

    Raises:
        ArgumentError: it cannot be read, has an unknown field or a value of another kind.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError("job", str(path), f"cannot be read: {error}", "name a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError("job", str(path), f"is no TOML: {error}", "see docs/tuning.md for an example") from error
    return job_of(data, str(path), path.parent)


def job_of(data: Mapping[str, Any], source: str, folder: Path = Path()) -> Job:
    """A job from the object of a job file. `shapes_file` is relative to `folder`."""
    made: dict[str, Any] = {}
    for name, value in data.items():
        if name in _LISTS:
            values = value if isinstance(value, list) else [value]
            if not values or not all(type(it) is _LISTS[name] for it in values):
                kind = "numbers" if _LISTS[name] is int else "strings"
                raise ArgumentError(f"{source}: {name}", value, f"must be a list of {kind}", "see docs/tuning.md")
            made["ops" if name == "op" else name] = tuple(map(shape, values) if name == "shapes" else values)
        elif name in _SCALARS:
            kind = _SCALARS[name]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                kinds = kind if isinstance(kind, tuple) else (kind,)
                wanted = " or ".join(it.__name__ for it in kinds)
                raise ArgumentError(f"{source}: {name}", value, f"must be {wanted}", "see docs/tuning.md")
            if name == "budget":
                made |= budget(value)
            elif name == "shapes_file":
                made["extra"] = read_shapes(folder / value)
            else:
                made[name] = _SHORT.get(value, value) if name == "dtype" else value
        else:
            known = ", ".join(sorted({*_LISTS, *_SCALARS}))
            raise ArgumentError(f"{source}: {name}", value, "is no field of a job", f"use one of {known}")
    return Job(**made)


def override(job: Job, **given: Any) -> Job:
    """The job with the fields that are given (None and empty ones are not)."""
    known = {item.name for item in fields(Job)}
    return replace(job, **{name: value for name, value in given.items() if name in known and value not in (None, ())})
