"""Digests of choices: what every heuristic, and every tuned record, answers over a wide grid of problems.

    python tests/tools/schedule_choices.py                compare with tests/data/schedule_choices.json; 1: one differs
    python tests/tools/schedule_choices.py --write        write that file anew
    python tests/tools/schedule_choices.py --only 'w4a8*' some of them
    python tests/tools/schedule_choices.py --text FOLDER  keep the lines, to compare those that differ

A line is a problem, the kernel's name and parameters, and the sizes of its launch. "search" lines are what the tuner
would try, in its order, with predicted microseconds. Needs torch, and neither TileLang nor a GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from terrazzo.autotune.database import Problem
from terrazzo.autotune.operators import OPERATORS
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching
from terrazzo.ops.products.codes import WIDE
from terrazzo.ops.products.table import of_codes
from terrazzo.schedules import records
from terrazzo.schedules.models import MODELS, shapes

GOLDEN = Path(__file__).parents[1] / "data" / "schedule_choices.json"
ODD = ((1000, 1096), (64, 128), (200, 136), (129280, 7168))
"""Shapes of no model: ragged, a single block, and a large head."""
TARGETS = ("sm_80", "sm_89", "sm_90a")
FEW = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 28672), *ODD[:2])
"""Shapes of the settings that vary one thing."""
_WITHOUT = {
    "w4a8_fp8": ("sm_80",),
    "mxfp4_fp8": ("sm_80",),
    "mxfp4_mxfp8": ("sm_80",),
    "w8a8": ("sm_80", "sm_89"),
    "w8a8_fp8": ("sm_80", "sm_89"),
}
"""Operator -> targets without a program of it."""
Lines = Iterator[str]


def groups() -> Iterator[tuple[str, Callable[[], Lines]]]:
    """(label, lines) of each group of choices."""
    every = (*shapes(list(MODELS)), *ODD)
    experts = sorted({(it.n, it.k, it.count) for model in MODELS.values() for it in model if it.count > 1})
    experts += [(4096, 4096, 4), (1000, 1096, 64)]
    for target in TARGETS:
        for name, settings in _settings():
            if name.endswith("_grouped"):
                if target == "sm_90a" or name in ("w4a16_grouped", "w4a8_grouped"):
                    yield f"{name} {target}{_text(settings)}", partial(_chosen, name, settings, target, experts)
            elif target not in _WITHOUT.get(name, ()):
                wide = every if "plain" in settings else FEW
                yield f"{name} {target}{_text(settings)}", partial(_chosen, name, settings, target, wide)
        for name in _names(target):
            yield f"{name} {target} search", partial(_searched, name, target, False)
            yield f"{name} {target} wide search", partial(_searched, name, target, True)
    for gpu in ("nvidia/nvidia-h100", "nvidia/nvidia-h200"):
        yield f"records {Target.parse(gpu).name}", partial(_recorded, gpu)


def _names(target: str) -> list[str]:
    names = [name for name in OPERATORS if not name.startswith("attention")]
    return [
        name
        for name in names
        if target == "sm_90a" or not (name.endswith("_grouped") or target in _WITHOUT.get(name, ()))
    ]


def _settings() -> Iterator[tuple[str, dict]]:
    """Operators and the settings of `Job` that their facts follow from; "plain": over all shapes."""
    for suffix in ("", "_grouped"):
        yield f"w4a16{suffix}", {"plain": True}
        yield f"w4a16{suffix}", {"group": 32, "symmetric": True}
        yield f"w4a16{suffix}", {"group": 64, "dtype": "bfloat16"}
        yield f"w4a16{suffix}", {"scale_dtype": "float32"}
        yield f"w4a16{suffix}", {"scale_dtype": "float32", "group": 32}
        yield f"w4a16{suffix}", {"group": 0}
        yield f"w4a8{suffix}", {"plain": True}
        yield f"w4a8{suffix}", {"group": 128}
        yield f"w4a8{suffix}", {"group": 32, "out_dtype": "int32"}
        yield f"w4a8_fp8{suffix}", {"plain": True}
        yield f"w4a8_fp8{suffix}", {"group": 32}
    for form in WIDE.values():
        yield from ((f"{of_codes(form).record}{suffix}", {}) for suffix in ("", "_grouped") if form.values)
    yield "w8a8", {"plain": True}
    yield "w8a8_fp8", {"plain": True}
    yield "w8a8_fp8", {"group": 128}
    yield "w4ax", {"plain": True}
    yield "w4ax_grouped", {"plain": True}
    yield "w4ax", {"scales": None}
    yield "w4ax", {"blocks8": 0, "out_dtype": "float32"}


def _text(settings: dict) -> str:
    return "".join(f" {name}={value}" for name, value in settings.items() if name != "plain")


def _problem(name: str, settings: dict, n: int, k: int, experts: int, m: int) -> Problem:
    operator, own = OPERATORS[name], dict(settings)
    plain = dict(dtype=own.pop("dtype", "float16"), group=own.pop("group", None) or None, symmetric=False)
    if "symmetric" in own and not name.startswith("w4a8"):
        plain["symmetric"] = own.pop("symmetric")
    own.pop("plain", None)
    facts = operator.facts(n, k, *([experts] if experts else []), **plain)
    if settings.get("group") == 0:
        facts["group"] = 0
    if settings.get("scale_dtype") == "float32" and "numerics" in facts:
        own["numerics"] = "post"
    facts = {**facts, **own}
    return Problem.of(name, {key: value for key, value in facts.items() if value is not None}, m)


def _chosen(name: str, settings: dict, target: str, wanted: Iterable[tuple[int, ...]]) -> Lines:
    at, operator = Target.parse(target), OPERATORS[name]
    for n, k, *more in wanted:
        experts = more[0] if more else 0
        few = [1 << power for power in range((experts - 1).bit_length())] if experts else []
        for m in (*few, *(tokens * max(experts, 1) for tokens in launching.ALL_TOKENS)):
            problem = _problem(name, settings, n, k, experts, m)
            yield f"{n} {k} {experts} {m}: {_described(operator, problem, at)}"


def _described(operator, problem: Problem, at: Target) -> str:
    try:
        plan = operator.plan(problem, at)
    except ArgumentError as error:
        return str(error)
    request = plan.request
    sizes = f"{plan.workspace} {plan.semaphores} {plan.scalars}"
    return f"{request.name} {dict(sorted(request.params))} {sizes}"


def _searched(name: str, target: str, wide: bool) -> Lines:
    at, operator = Target.parse(target), OPERATORS[name]
    for n, k in (FEW[0], FEW[3], FEW[4]):
        for m in (1, 8, 24, 64, 200, 1024):
            problem = _problem(name, {}, n, k, 8 if name.endswith("_grouped") else 0, m)
            space = operator.space(problem)
            yield f"{n} {k} {m}: heuristic {_cost(space.heuristic(at, m), space, at, m)}"
            for it in space.candidates(at, m, most=400, within=3.0, wide=wide):
                yield f"  {it.program} {sorted(it.params.items())} {it.us:.6g}"


def _cost(pair: tuple, space, at: Target, m: int) -> str:
    return f"{pair[0]} {space.cost(*pair, at, m):.6g}"


def _recorded(gpu: str) -> Lines:
    """Every record of the tables that ship for a GPU, and of those it shares, at its own M and at neighbours."""
    del os.environ[records.VARIABLE]
    records.clear()
    at = Target.parse(gpu)
    found = ((table, row) for table in records.tables(at.name) for rows in table.rows.values() for row in rows.values())
    for table, row in found:
        if row["op"].startswith("attention") or table.refusal(at, row["op"]):
            continue
        operator = OPERATORS[row["op"]]
        for m in sorted({row["m"], max(1, row["m"] * 7 // 8), row["m"] * 9 // 8}):
            problem = Problem.of(row["op"], row["facts"], m)
            yield f"{problem.text} {m}: {_described(operator, problem, at)}"


def digests(patterns: Iterable[str], text: Path | None = None) -> Iterator[tuple[str, str]]:
    """(label, SHA-256 of its lines) of the groups that match a pattern."""
    for label, lines in groups():
        if any(fnmatch.fnmatchcase(label, pattern) for pattern in patterns):
            with mock.patch.dict(os.environ, {records.VARIABLE: "off"}):
                records.clear()
                found = "\n".join(lines())
            records.clear()
            if text:
                text.mkdir(parents=True, exist_ok=True)
                (text / f"{label.replace(' ', '_')}.txt").write_text(found + "\n")
            yield label, hashlib.sha256(found.encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--text", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    found, differ = {}, 0
    for label, digest in digests(asked.only or ["*"], asked.text):
        found[label] = digest
        same = asked.write or golden.get(label) == digest
        differ += not same
        print(f"{digest[:16]}  {label}{'' if same else '  DIFFERS'}", flush=True)
    if asked.write:
        GOLDEN.write_text(json.dumps(dict(sorted({**golden, **found}.items())), indent=1) + "\n")
    if differ:
        print(f"{differ} of {len(found)} groups of choices differ", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
