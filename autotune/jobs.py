"""What a tuning job is to do: from a job file (TOML) or from flags, with one clear line for what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from terrazzo.autotune.adapter import DTYPES
from terrazzo.autotune.database import Problem
from terrazzo.autotune.operators import get_operator
from terrazzo.autotune.search import STRATEGIES, usual
from terrazzo.lowering.data_files import MOST, is_count, is_number, read_text, read_toml
from terrazzo.lowering.errors import ArgumentError
from terrazzo.schedules import spaces

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_LONGEST_MS = 60_000.0
_SHORT = {"f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Job:
    """A tuning job.

    Attributes:
        ops: operators. models: names of schedules/models.py. shapes: further weights (N, K). extra: weights with tokens
            of their own, (N, K, tokens). m: numbers of tokens; empty takes `adapter.TOKENS`.
        experts: numbers of experts of the grouped operators, for `shapes` and `extra`; models name their own.
        caches, formats, q_len, pages, head_dim: of attention: batches "8x32/8x32k", formats "int4/int4" of keys and
            values, new tokens of a step, tokens of a page (0: contiguous); empty ones take the operator's usual.
        dtype: of activations and output. group: input channels for each scale; None takes each operator's usual one.
        symmetric: without zero points.
        target: "auto", or what `Target.parse` takes; a job measures on the GPU that is there, so another target is
            refused unless it is a dry run.
        strategy: see autotune/search.py; "auto" becomes "learned" where its extra is installed, else "top-k". seed: of
            the strategy. trials: of one problem, at most; 0 for no limit. patience: trials without progress after
            which a problem ends; 0 for never.
        budget_s: seconds for all of it, 0 for no limit. budget_trials: trials for all of it, 0 for no limit.
        confirm: best schedules of each problem that are measured again together with the heuristic's in the end.
        measure_ms: GPU time of one trial. peers: time cuBLAS too.
        most, within, wide: of a problem's space, see `spaces.Space.candidates`. sample: of that, only the heuristic's
            schedule and a random choice of so many in all; 0 for everything.
        tables: files of records, of another GPU too, whose schedules are tried right after the heuristic's.
        parts: jobs that name further problems; only the fields that name problems are theirs.
    """

    ops: tuple[str, ...] = ("w4a16",)
    models: tuple[str, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()
    m: tuple[int, ...] = ()
    dtype: str = "float16"
    group: int | None = None
    symmetric: bool = False
    target: str = "auto"
    strategy: str = "auto"
    trials: int = 0
    patience: int = 24
    seed: int = 0
    budget_s: float = 0.0
    budget_trials: int = 0
    confirm: int = 2
    measure_ms: float = 15.0
    most: int = spaces.MOST
    within: float = spaces.WITHIN
    wide: bool = False
    sample: int = 0
    peers: bool = True
    extra: tuple[tuple[int, int, tuple[int, ...]], ...] = field(default=())
    experts: tuple[int, ...] = (8,)
    caches: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    q_len: tuple[int, ...] = (1,)
    pages: tuple[int, ...] = (0,)
    head_dim: int = 128
    tables: tuple[str, ...] = ()
    parts: tuple[Job, ...] = ()

    def __post_init__(self) -> None:
        for name in ("ops", "extra", *(name for name in _LISTS if name != "op")):
            values = getattr(self, name)
            if not isinstance(values, tuple | list):
                raise ArgumentError(name, values, "must be a tuple", "write one value as (value,)")
            if name in ("ops", "models", "caches", "formats", "tables") and not all(
                isinstance(it, str) for it in values
            ):
                raise ArgumentError(name, values, "must be strings", "write names as a job file has them")
        for name in (it.name for it in fields(self) if it.name in _KINDS and it.name not in ("group", "target")):
            _check_kind(name, getattr(self, name), _KINDS[name])
        for op in self.ops:
            get_operator(op)
        _one_of("strategy", self.strategy, ("auto", *STRATEGIES))
        if self.strategy == "auto":
            object.__setattr__(self, "strategy", usual())
        _one_of("dtype", self.dtype, DTYPES)
        for name in ("trials", "patience", "budget_s", "budget_trials", "confirm", "seed", "sample"):
            if not is_number(getattr(self, name), 0, MOST):
                raise ArgumentError(name, getattr(self, name), f"must not be negative or above {MOST}", "0: none")
        for name in ("most", "within"):
            if not getattr(self, name) >= 1:
                raise ArgumentError(name, getattr(self, name), "must be at least 1", "leave it out")
        if not (is_number(self.measure_ms, 0, _LONGEST_MS) and self.measure_ms):
            constraint = f"must be positive, at most {_LONGEST_MS:.0f}"
            raise ArgumentError("measure_ms", self.measure_ms, constraint, "leave it out")
        if not is_count(self.head_dim, 1):
            raise ArgumentError("head_dim", self.head_dim, "must be 64, 128 or 256", "leave it out for 128")
        for name, least, most in (("m", 1, MOST), ("experts", 1, MOST), ("pages", 0, MOST), ("q_len", 1, 8)):
            if not all(is_count(it, least, most) for it in getattr(self, name)):
                constraint = f"must be integers, at least {least} and at most {most}"
                raise ArgumentError(name, getattr(self, name), constraint, "write a list of them, or leave it out")
        counts = lambda found: isinstance(found, tuple) and all(is_count(it, 1) for it in found)
        for size in self.shapes:
            if not counts(size) or len(size) != 2:
                raise ArgumentError("shapes", size, "must be (N, K), positive integers", "write (28672, 4096)")
        for it in self.extra:
            if not isinstance(it, tuple) or len(it) != 3 or not counts(it[:2]) or not counts(it[2]):
                constraint = "must be (N, K, tokens), positive integers"
                raise ArgumentError("extra", it, constraint, "write (28672, 4096, (16, 64))")
        if self.group is not None and not is_count(self.group, 1):
            raise ArgumentError("group", self.group, "must be 32, 64 or 128, or K for one group", "leave it out")
        self._check_caches()

    def _check_caches(self) -> None:
        from terrazzo.autotune.attention_bench import Shape

        for text in self.caches:
            found = Shape.parse(text)
            if found.heads % found.kv_heads:
                constraint = "query heads must be a multiple of the kv heads"
                raise ArgumentError("caches", text, constraint, "write 8x32/8x32k")

    def problems(self) -> list[Problem]:
        """What the job and its parts name, each once, those with the same data side by side.

        Raises:
            ArgumentError: nothing is named, or an unknown model.
        """
        found: dict[Problem, None] = {}
        own = () if self.parts and not self.named else (self,)
        for part in (*own, *self.parts):
            for op in part.ops:
                found |= dict.fromkeys(get_operator(op).problems(part))
        if not found:
            raise ArgumentError(
                "models", self.models, "no weight is named", "name a model, a shape NxK or a shapes file"
            )
        return list(found)

    @property
    def named(self) -> bool:
        """Whether the job itself names something."""
        return bool(self.models or self.shapes or self.extra or self.caches)


def _one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ArgumentError(name, value, f"must be one of {', '.join(known)}", f"leave {name} out")


def _check_kind(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise ArgumentError(name, value, f"must be {' or '.join(it.__name__ for it in kinds)}", "see docs/tuning.md")


def _text(value: str | int | float) -> str:
    """A budget as it may have been written: an integer of 5,000 digits has no text."""
    return value if isinstance(value, str) else str(value) if is_number(value, 0, MOST) else ""


def seconds(text: str | int | float) -> float:
    """ "90s", "10m", "1.5h" or a number of minutes -> seconds.

    Raises:
        ArgumentError: something else.
    """
    found = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([smh]?)\s*", _text(text))
    if not found or float(found.group(1)) <= 0:
        raise ArgumentError("budget", text, "is no time", "write 90s, 10m or 1h, or a number of trials as '200 trials'")
    return float(found.group(1)) * _UNITS[found.group(2) or "m"]


def budget(text: str | int | float) -> dict[str, float | int]:
    """ "10m" or "200 trials" -> the fields of a job."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*trials?\s*", _text(text))
    if found and int(found.group(1)) > 0:
        return {"budget_trials": int(found.group(1))}
    return {"budget_s": seconds(text)}


def shape(text: str) -> tuple[int, int]:
    """ "28672x4096" -> (28672, 4096).

    Raises:
        ArgumentError: something else.
    """
    found = re.fullmatch(r"\s*(\d+)\s*[xX,]\s*(\d+)\s*", text) if isinstance(text, str) else None
    size = tuple(map(_count, found.groups())) if found else ()
    if not size or not all(size):
        raise ArgumentError("shapes", text, "is no shape", "write N x K as 28672x4096")
    return size


def _count(digits: str) -> int:
    """The number that digits write; 0 if they are none, or more than 32 bits hold."""
    number = int(digits) if digits.isdecimal() and len(digits) <= 10 else 0
    return number if is_count(number) else 0


def read_shapes(path: Path) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Lines "NxK" or "NxK M M ..." of a file; # begins a comment. (n, k, tokens), no tokens where none stand there.

    Raises:
        ArgumentError: the file cannot be read, or a line is none of these; the message has its number.
    """
    lines, found = read_text(path, "shapes", "name a text file").splitlines(), []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].replace(",", " ").split()
        if not words:
            continue
        tokens = tuple(map(_count, words[1:]))
        if not all(tokens):
            raise ArgumentError(f"{path}:{number}", line.strip(), "has tokens that are no numbers", "write NxK M M ...")
        found.append((*shape(words[0]), tokens))
    if not found:
        raise ArgumentError("shapes", str(path), "holds no shape", "write a line NxK for each weight")
    return tuple(found)


_LISTS = {
    "op": str,
    "models": str,
    "shapes": str,
    "m": int,
    "experts": int,
    "caches": str,
    "formats": str,
    "q_len": int,
    "pages": int,
    "tables": str,
}
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
    "within": (int, float),
    "wide": bool,
    "sample": int,
    "peers": bool,
    "head_dim": int,
    "budget": (str, int, float),
    "shapes_file": str,
}
_KINDS = {**_SCALARS, "budget_s": (int, float), "budget_trials": int}
"""Of the fields of `Job` that hold one value."""


_INHERITED = ("op", "m", "dtype", "group", "symmetric")
"""Fields that a part has from the job unless it has its own."""
_NAMING = {*(set(_LISTS) - {"tables"}), "dtype", "group", "symmetric", "head_dim", "shapes_file"}


def read_job(path: Path | str) -> Job:
    """A job from a TOML file: the fields of `Job`, with `op` for ops, `budget` for both budgets, `shapes_file`.

    Paths in it are relative to the file.

    Raises:
        ArgumentError: it cannot be read, has an unknown field or a value of another kind.
    """
    remedy = "name a TOML file; docs/tuning.md has an example"
    return job_of(read_toml(path, "job", remedy), str(path), Path(path).parent)


def job_of(data: Mapping[str, Any], source: str, folder: Path = Path()) -> Job:
    """A job from the object of a job file. `shapes_file` is relative to `folder`.

    Raises:
        ArgumentError: an unknown field or a value that none can have; the message begins with `source`.
    """
    if not isinstance(data, Mapping):
        raise ArgumentError(source, data, "is no table of a job's fields", "see docs/tuning.md")
    try:
        return _job_of(data, source, folder)
    except ArgumentError as error:
        if error.argument.startswith(source):
            raise
        raise ArgumentError(f"{source}: {error.argument}", error.value, error.constraint, error.remedy) from error


def _job_of(data: Mapping[str, Any], source: str, folder: Path) -> Job:
    made: dict[str, Any] = {}
    for name, value in data.items():
        if name == "part":
            made["parts"] = _parts(data, value, source, folder)
        elif name in _LISTS:
            values = value if isinstance(value, list) else [value]
            if not values or not all(type(it) is _LISTS[name] for it in values):
                kind = "numbers" if _LISTS[name] is int else "strings"
                raise ArgumentError(name, value, f"must be a list of {kind}", "see docs/tuning.md")
            if name == "tables":
                values = [str(folder / value) for value in values]
            made["ops" if name == "op" else name] = tuple(map(shape, values) if name == "shapes" else values)
        elif name in _SCALARS:
            _check_kind(name, value, _SCALARS[name])
            if name == "budget":
                made |= budget(value)
            elif name == "shapes_file":
                made["extra"] = read_shapes(folder / value)
            else:
                made[name] = _SHORT.get(value, value) if name == "dtype" else value
        else:
            known = ", ".join(sorted({*_LISTS, *_SCALARS, "part"}))
            raise ArgumentError(name, value, "is no field of a job", f"use one of {known}")
    return Job(**made)


def _parts(data: Mapping[str, Any], parts: object, source: str, folder: Path) -> tuple[Job, ...]:
    """The tables [[part]] of a job file, with what they have from the job."""
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise ArgumentError("part", parts, "must be tables [[part]]", "see docs/tuning.md")
    common, found = {name: data[name] for name in _INHERITED if name in data}, []
    for at, part in enumerate(parts, 1):
        odd = sorted(set(part) - _NAMING)
        if odd:
            constraint = "is no field of a part, which only names problems"
            raise ArgumentError(f"{source}: part {at}: {odd[0]}", part[odd[0]], constraint, "move it above the parts")
        found.append(job_of({**common, **part}, f"{source}: part {at}", folder))
    return tuple(found)


def override(job: Job, **given: object) -> Job:
    """The job with the fields that are given (None and empty ones are not). Of its parts, `ops` keeps these operators.

    Raises:
        ArgumentError: the parts, all that names problems, have none of `ops`.
    """
    known = {item.name for item in fields(Job)}
    made = replace(job, **{name: value for name, value in given.items() if name in known and value not in (None, ())})
    if not job.parts or not given.get("ops"):
        return made
    parts = [replace(part, ops=tuple(op for op in part.ops if op in made.ops)) for part in job.parts]
    kept = tuple(part for part in parts if part.ops)
    if not kept and not made.named:
        has = ", ".join(dict.fromkeys(op for part in job.parts for op in part.ops))
        raise ArgumentError("op", ", ".join(made.ops), "is in no part of the job", f"name one of {has}")
    return replace(made, parts=kept)
