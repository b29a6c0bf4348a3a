"""Tuned schedules: tables of measured records, and the one question that an operator asks them before its heuristic.

A table belongs to one GPU: its name and number of SMs. It ships as schedules/tuned/<gpu>.json; further tables come from
`use`, a program of the user's, or the environment variable TERRAZZO_TUNED (the path of a table, or "off" for none at
all). A record answers for its own M, else for the nearest M of the same bucket; otherwise the heuristic decides. A
table of another GPU serves operators of `SHARED` alone, a record of other versions none; `explain` says why.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from terrazzo.lowering.data_files import MOST, is_count, is_number, is_text, read_json
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import package_version
from terrazzo.schedules import tile_costs

SCHEMA = 1
FOLDER = Path(__file__).parent / "tuned"
VARIABLE = "TERRAZZO_TUNED"
_SMALLEST_BUCKET, _LARGEST_BUCKET = 8, 8192
_PADDING = 1.12  # a tile that pads a neighbouring M by more than this is no longer the tuned one
_FEW_WIDTHS = ("multistage", "persistent")
"""Programs on mma.sync, whose tiles have few widths: a record serves other M that they pad as little."""
TIMES_US = (1e-3, 1e12)
"""What a time is within: a nanosecond, some days."""
_SIZES = ("n", "k", "experts", "rows", "tokens", "head_dim")
"""Facts that are at least 1."""


def is_time(value: object) -> bool:
    """Whether a value from a file is a time in microseconds."""
    return is_number(value, *TIMES_US)


def is_facts(value: object) -> bool:
    """Whether a value from a file is the facts of a problem: text, bools and integers by name."""
    return isinstance(value, dict) and all(
        is_text(name) and (type(it) is bool or is_text(it) or is_count(it, name in _SIZES))
        for name, it in value.items()
    )


def is_schedule(value: object) -> bool:
    """Whether a value from a file is the fields of a schedule: integers (and bools) by name."""
    return isinstance(value, dict) and all(
        is_text(name) and (type(it) is bool or is_count(it, -MOST)) for name, it in value.items()
    )


def _optional(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_RECORD: dict[str, tuple[Callable[[Any], bool], str]] = {
    "op": (is_text, "the name of an operator"),
    "facts": (is_facts, f"an object of text, bools and sizes up to {MOST}"),
    "m": (lambda value: is_count(value, 1), f"an integer from 1 to {MOST}"),
    "program": (is_text, "the name of a program"),
    "schedule": (is_schedule, f"an object of integers up to {MOST}"),
    "us": (is_time, "a time in microseconds"),
    "heuristic_us": (_optional(is_time), "a time in microseconds"),
    "spread": (_optional(lambda value: is_number(value, 0, 1e6)), "a share of the time"),
}
_RECORD |= {
    name: (_optional(is_text), "text")
    for name in ("arch", "driver", "cuda", "torch", "tilelang", "terrazzo", "sources", "date")
}


@dataclass(frozen=True)
class Choice:
    """A schedule that a record (or a tuner) names, not yet checked against the problem.

    Attributes:
        program: name of the operator's program. params: the schedule's fields.
        m: tokens that it was measured with. us: its time then, microseconds, 0 if unknown.
        how: "exact", "bucket" or "forced".
    """

    program: str
    params: Mapping[str, int]
    m: int
    us: float = 0.0
    how: str = "exact"


def bucket(m: int) -> int:
    """The power of two that m falls under, 8 at least, 8192 for everything above."""
    return min(_LARGEST_BUCKET, max(_SMALLEST_BUCKET, 1 << (m - 1).bit_length()))


def slug(gpu: str) -> str:
    """ "NVIDIA H200" -> "h200", "NVIDIA H100 80GB HBM3" -> "h100": the name of a GPU's table, its memory left out."""
    words = gpu.lower().replace("-", " ").replace("/", " ").split()
    return "_".join(word for word in words if not _LEFT_OUT.fullmatch(word)) or "gpu"


_LEFT_OUT = re.compile(r"nvidia|geforce|rtx|\d+gb|hbm\d\w*")


SHARED: Mapping[str, Mapping[str, Sequence[str]]] = {"NVIDIA H100 80GB HBM3": {"NVIDIA H200": ("w4a16",)}}
"""GPU -> another one of as many SMs -> operators whose records of that one serve it where it has none of its own. Each
was compared: docs/tuning.md has how far from the best the records are, and the heuristic."""

SAME_SCHEDULES = ("0.1", "0.2")
"""Minor versions of terrazzo, to the present one, whose schedules mean the same: a record of one serves all of them. A
version in which a field of a schedule means something else begins anew."""


def versions() -> dict[str, str]:
    """What a record must have been made with to be used: terrazzo's minor version, or one of `SAME_SCHEDULES` with it,
    and TileLang's patch version."""
    return {
        "terrazzo": ".".join((package_version("terrazzo") or "").split(".")[:2]),
        "tilelang": ".".join((package_version("tilelang") or "").split(".")[:3]),
    }


def key(op: str, facts: Mapping[str, Any]) -> str:
    """What a record of an operator must share with a problem, besides M."""
    return json.dumps([op, dict(facts)], sort_keys=True)


class Table:
    """The records of one GPU.

    Args:
        data: the object of a table file: schema, gpu, sms, records. source: its name in reasons.

    Raises:
        ArgumentError: not such an object; the message says which field is wrong.
    """

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.source = source
        if not isinstance(data, Mapping) or data.get("schema") != SCHEMA:
            seen = data.get("schema") if isinstance(data, Mapping) else type(data).__name__
            raise ArgumentError("schema", seen, f"{source} must be a table of schema {SCHEMA}", "export it again")
        self.gpu, self.sms, records = data.get("gpu"), data.get("sms"), data.get("records")
        if not is_text(self.gpu) or not is_count(self.sms, 1) or not isinstance(records, list):
            seen, constraint = (self.gpu, self.sms, type(records).__name__), "must name gpu, sms and a list of records"
            raise ArgumentError("gpu, sms, records", seen, f"{source} {constraint}", "export it again")
        self.rows: dict[str, dict[int, Mapping[str, Any]]] = {}
        for index, row in enumerate(records):
            if not isinstance(row, dict):
                raise ArgumentError(f"records[{index}]", row, f"is no object in {source}", "export it again")
            for name, (check, what) in _RECORD.items():
                if not check(row.get(name)):
                    seen = f"is not {what} in {source}"
                    raise ArgumentError(f"records[{index}].{name}", row.get(name), seen, "export it again")
            self.rows.setdefault(key(row["op"], row["facts"]), {})[row["m"]] = row

    @staticmethod
    def read(path: Path | str) -> Table:
        """A table file.

        Raises:
            ArgumentError: it cannot be read, or is no table.
        """
        if not isinstance(path, str | os.PathLike):
            raise ArgumentError("table", path, "must be the path of a table", "name a file of `tune export`")
        return Table(read_json(path, "table", "name a file of `tune export`"), str(path))

    def refusal(self, target: Target, op: str = "") -> str:
        """Why no record of this table, or none of an operator, may serve the GPU, or ""."""
        if (self.gpu, self.sms) == (target.name, target.sms):
            return ""
        shared = SHARED.get(target.name, {}).get(self.gpu, ()) if self.sms == target.sms else ()
        if op in shared:
            return ""
        also = f"; shared are those of {', '.join(shared)}" if shared else ""
        made = f"{self.source}: measured on {self.gpu} with {self.sms} SMs"
        return f"{made}, this is {target.name} with {target.sms}{also}"

    def find(self, op: str, facts: Mapping[str, Any], m: int) -> tuple[Choice | None, str]:
        """(the record for m, or for the nearest m of its bucket; or None, why not)."""
        rows = self.rows.get(key(op, facts), {})
        usable = {at: row for at, row in rows.items() if not _outdated(row)}
        near = [at for at in usable if at == m or (bucket(at) == bucket(m) and _fits(usable[at], at, m, self.sms))]
        if near:
            at = min(near, key=lambda at: (abs(math.log(at / m)), at))
            row = usable[at]
            how = "exact" if at == m else "bucket"
            return Choice(row["program"], row["schedule"], at, float(row["us"]), how), ""
        old = [f"M = {at}: {_outdated(row)}" for at, row in rows.items() if at not in usable]
        seen = "; ".join(old) or (
            f"has M = {', '.join(map(str, sorted(rows)))}" if rows else "no record of this weight"
        )
        return None, f"{self.source}: {seen}"

    def tokens(self, op: str, facts: Mapping[str, Any]) -> list[int]:
        """The M of the usable records of a weight."""
        return sorted(at for at, row in self.rows.get(key(op, facts), {}).items() if not _outdated(row))


def _outdated(row: Mapping[str, Any]) -> str:
    here = versions()
    for name, wanted in here.items():
        made = str(row.get(name, ""))
        same = SAME_SCHEDULES if name == "terrazzo" and wanted in SAME_SCHEDULES else (wanted,)
        if wanted and not any(f"{made}.".startswith(f"{one}.") for one in same):
            return f"made with {name} {made or '(unknown)'}, this is {wanted}"
    return ""


def _fits(row: Mapping[str, Any], at: int, m: int, sms: int) -> bool:
    """Whether a record's kernel holds m tokens, and its tile pads m about as little as the m that it was measured with:
    a tile of tokens (of each expert), or a wave of the CTAs that serve (sequence, kv head) pairs, and an SM's share.
    Programs that have tiles of many widths are asked for the bucket of `tile_costs` that m falls in, and no other."""
    schedule, experts = row["schedule"], row["facts"].get("experts", 1)
    at, m, tile = -(-at // experts), -(-m // experts), schedule.get("block_tokens")
    if schedule.get("row_tiles", 1) < 1:
        return False  # damaged
    if m > (schedule.get("tokens") or m):
        return False
    if isinstance(tile, int) and tile > 0:
        at, m = tile_costs.bucket(at), tile_costs.bucket(m)
        return at == m or (row["program"] in _FEW_WIDTHS and _padded(m, tile) <= _PADDING * _padded(at, tile))
    step = tile
    if isinstance(schedule.get("min_blocks"), int):
        groups = -(-row["facts"].get("rows", 1) // (8 * schedule.get("row_tiles", 1)))
        step, tile = max(1, sms // groups), sms * schedule["min_blocks"] // groups
    if not isinstance(tile, int) or tile < 1:
        return True
    if m <= tile and at <= tile:  # one wave, in which SMs have as many CTAs as each other, or one more
        tile = step
    return (m <= tile and at <= tile) or _padded(m, tile) <= _PADDING * _padded(at, tile)


def _padded(tokens: int, tile: int) -> float:
    """Tokens of the tiles that hold so many, as a multiple of them."""
    return -(-tokens // tile) * tile / tokens


Tuner = Callable[[str, Mapping[str, Any], int, Target], "Choice | None"]

_used: list[Table] = []
_forced: ContextVar[Mapping[str, Choice]] = ContextVar("forced", default=MappingProxyType({}))
_tuners: list[Tuner] = []
_forget: list[Callable[[], None]] = []


def on_change(forget: Callable[[], None]) -> None:
    """Call `forget` whenever an answer of `pick` may change: an operator drops its plans."""
    _forget.append(forget)


def changed() -> None:
    """Tell operators that answers may differ from now on."""
    for forget in _forget:
        forget()


@cache
def _shipped(gpu: str) -> Table | None:
    path = FOLDER / f"{slug(gpu)}.json"
    return Table.read(path) if path.is_file() else None


@cache
def _from_environment(value: str) -> Table | None:
    return Table.read(value) if value and value != "off" else None


def tables(gpu: str) -> list[Table]:
    """The tables that are asked for a GPU, in this order: used ones, the last first; the environment's; the shipped;
    the shipped ones of GPUs whose records it shares."""
    named = os.environ.get(VARIABLE, "")
    if named == "off":
        return []
    shipped = map(_shipped, (gpu, *SHARED.get(gpu, ())))
    return [*reversed(_used), *filter(None, (_from_environment(named), *shipped))]


def use(table: Table) -> None:
    """Ask this table before those that were there.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(table, Table):
        raise ArgumentError("table", table, "must be a Table", "read a file with Table.read")
    _used.append(table)
    changed()


def clear() -> None:
    """Forget the tables of `use`."""
    _used.clear()
    changed()


def pick(op: str, facts: Mapping[str, Any], m: int, target: Target) -> Choice | None:
    """The recorded choice for a problem on a GPU, or None for the heuristic. Operators keep the answer with their plan.

    Args:
        facts: what besides M tells problems of an operator apart (N, K, format).
    """
    if op in _forced.get():
        return _forced.get()[op]
    found, _ = explain(op, facts, m, target)
    if found is None and _tuners:
        return _tuners[-1](op, facts, m, target)
    return found


def explain(op: str, facts: Mapping[str, Any], m: int, target: Target) -> tuple[Choice | None, list[str]]:
    """What the tables say of a problem, and why each table before the answer had none."""
    reasons = []
    for table in tables(target.name):
        refused = table.refusal(target, op)
        found, reason = (None, refused) if refused else table.find(op, facts, m)
        if found is not None:
            return found, reasons
        reasons.append(reason)
    return None, reasons


def tokens(op: str, facts: Mapping[str, Any], target: Target) -> Sequence[int]:
    """The M of all records that may serve a weight on a GPU: their kernels are needed where every M is asked for."""
    found = (table.tokens(op, facts) for table in tables(target.name) if not table.refusal(target, op))
    return sorted({m for some in found for m in some})


@contextmanager
def forced(op: str, program: str, params: Mapping[str, int]) -> Iterator[None]:
    """Inside, `pick` answers with this schedule, in this thread: how a tuner measures one through the public call.

    Plans that operators keep are not touched: call `changed` inside and after, or bypass them.
    """
    token = _forced.set({**_forced.get(), op: Choice(program, params, 0, how="forced")})
    try:
        yield
    finally:
        _forced.reset(token)


@contextmanager
def tuning(tuner: Tuner) -> Iterator[None]:
    """Inside, `tuner` is asked where no record answers."""
    _tuners.append(tuner)
    changed()
    try:
        yield
    finally:
        _tuners.remove(tuner)
        changed()
