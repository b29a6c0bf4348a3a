"""One self-contained HTML page of a database: rooflines, gains, search curves, what is slow and why.

Drawings are SVG inside the page; nothing is loaded from elsewhere, and a phone shows it in one column.
"""

from __future__ import annotations

import html
import importlib
import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from itertools import cycle
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from terrazzo.autotune.database import Best, Database, Problem, Trial, best
from terrazzo.autotune.jobs import Job
from terrazzo.autotune.operators import OPERATORS
from terrazzo.lowering.errors import ArgumentError, CacheError, TerrazzoError, ToolchainError
from terrazzo.lowering.targets import TARGET_NAMES, Target
from terrazzo.schedules import records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EXTRA = "pip install 'terrazzo[tune]'"
SLOWEST = 12
GOAL = 1.10
"""Heuristic / tuned best, geometric mean."""
_OPTIONAL = {"scales": str}
"""Facts that only some of an operator's problems have."""
_PALETTE = ("#1f6feb", "#bf5700", "#8250df", "#0a7ea4", "#9a6700", "#bf3989", "#1a7f37", "#cf222e", "#6e7781")
_COLORS = dict(zip(OPERATORS, cycle(_PALETTE)))
_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 46rem; padding: 0.8rem; color: #1b1f24; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin: 2rem 0 0.4rem; }
p { margin: 0.4rem 0; } svg { width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.85rem; width: 100%; }
th, td { padding: 0.2rem 0.5rem 0.2rem 0; text-align: right; vertical-align: top; border-top: 1px solid #d8dee4; }
th { border-color: #57606a; vertical-align: bottom; } td { white-space: nowrap; }
.text { text-align: left; white-space: normal; overflow-wrap: break-word; } small, .more { color: #57606a; }
td.more { border-top: 0; font-size: 0.75rem; } summary { cursor: pointer; padding: 0.2rem 0; }
@media (max-width: 30rem) { table { font-size: 0.75rem; } }
"""


@dataclass(frozen=True)
class Point:
    """One problem's best schedule compared with its bounds.

    Attributes:
        us, heuristic_us, peer_us: microseconds, None where not measured. peer: whose, "" of none.
        bound, bound_us: the resource that the roofline names, and its time alone.
        flop, nbytes: of the problem.
    """

    best: Best
    us: float
    heuristic_us: float | None
    peer_us: float | None
    peer: str
    bound: str
    bound_us: float
    flop: float
    nbytes: float

    @property
    def problem(self) -> Problem:
        return self.best.trial.problem


def write_report(database: Database, path: Path, png: Path | None = None, gpu: str | None = None) -> int:
    """Write the page (and its overview as a PNG); returns the number of problems on it.

    Raises:
        ArgumentError: no times of such a GPU. ToolchainError: matplotlib is not installed. CacheError: it cannot be
            written.
    """
    trials = database.trials(gpu=gpu, status=None)
    timed = [it for it in trials if it.status == "ok"]
    if not timed:
        known = ", ".join(sorted({it.machine.gpu for it in database.trials()})) or "none"
        raise ArgumentError(
            "gpu", gpu, f"the database has no times of it; it knows {known}", "run `terrazzo tune` first"
        )
    gpu = gpu or timed[-1].machine.gpu
    trials = [it for it in trials if it.machine.gpu == gpu]
    target, points = target_of(trials[-1]), points_of(trials, database.peers(gpu))
    figures = [_draw(draw, points, trials, target) for draw in (roofline, gains, curves)]
    try:
        path.write_text(page(points, trials, target, figures), encoding="utf-8")
        if png is not None:
            _draw_png(points, trials, target, png)
    except OSError as error:
        raise CacheError(
            f"{error.filename or path} cannot be written: {error.strerror}; choose another file"
        ) from error
    return len(points)


def target_of(trial: Trial) -> Target:
    """The device that a trial was measured on, by its name, else its architecture's."""
    named = [target for target in map(Target.parse, TARGET_NAMES) if target.name == trial.machine.gpu]
    return named[-1] if named else Target.parse(trial.machine.arch or "sm_90a")


def points_of(trials: Sequence[Trial], peers: dict[tuple[Problem, str], float]) -> list[Point]:
    """The best of each problem, with what it is compared with: its heuristic, and the fastest of others."""
    other = {problem: (us, name) for (problem, name), us in sorted(peers.items(), key=lambda it: -it[1])}
    found = []
    for it in best(trials):
        problem, target = it.trial.problem, target_of(it.trial)
        if not understands(problem):  # of another version
            continue
        roof = OPERATORS[problem.op].roofline(problem, target)
        flop = OPERATORS[problem.op].flop(problem)
        nbytes = roof.load_us * target.dram_gb_s * 1e3
        peer_us, peer = other.get(problem, (None, ""))
        found.append(Point(it, it.trial.us, it.heuristic_us, peer_us, peer, roof.bound, roof.us, flop, nbytes))
    return found


@cache
def _kinds(op: str) -> dict[str, type]:
    """The facts of an operator's problems."""
    example = OPERATORS[op].problems(Job(ops=(op,), shapes=((512, 1024),)))[0]
    return {name: type(value) for name, value in example.facts}


def understands(problem: Problem) -> bool:
    """Whether a problem of a database is one of this version's: its operator is there, and takes its facts."""
    facts = dict(problem.facts)
    if problem.op not in OPERATORS or not records.is_facts(facts):
        return False
    kinds, given = _kinds(problem.op), {name: type(value) for name, value in facts.items()}
    if {**given, **_OPTIONAL} != {**kinds, **_OPTIONAL}:
        return False
    operator, target = OPERATORS[problem.op], Target.parse("sm_90a")
    try:
        for asks in (operator.roofline, operator.plan):  # they raise where a fact has a value that no kernel knows
            asks(problem, target)
        return bool(operator.space(problem).heuristic(target, problem.m))
    except (TerrazzoError, ArithmeticError):  # a group of 0, say
        return False


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean, or None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(statistics.fmean(logs)) if logs else None


def _pyplot() -> ModuleType:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise ToolchainError(f"the report draws with matplotlib: {EXTRA}") from error
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


_RC = {"font.size": 11, "svg.fonttype": "none", "axes.grid": True, "grid.alpha": 0.3}
Draw = Callable[[Any, Sequence[Point], Sequence[Trial], Target], None]


def roofline(axes: Axes, points: Sequence[Point], trials: Sequence[Trial], target: Target) -> None:
    """Achieved TFLOP/s over FLOP per byte, below the ceilings of memory and tensor cores."""
    intensity = [point.flop / point.nbytes for point in points]
    span = [min(intensity) / 2, max(max(intensity) * 2, 1e3)]
    for op in sorted({point.problem.op for point in points}):
        rate = target.tflops(OPERATORS[op].rate)
        line = [min(rate, at * target.dram_gb_s / 1e3) for at in (span[0], rate * 1e3 / target.dram_gb_s, span[1])]
        at = [span[0], rate * 1e3 / target.dram_gb_s, span[1]]
        axes.plot(at, line, color=_COLORS.get(op, "black"), linewidth=1)
        own = [point for point in points if point.problem.op == op]
        xs, ys = zip(*((point.flop / point.nbytes, point.flop / point.us / 1e6) for point in own))
        axes.scatter(xs, ys, s=14, alpha=0.6, linewidths=0, color=_COLORS.get(op, "black"), label=op)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    _legend(axes)


def gains(axes: Axes, points: Sequence[Point], trials: Sequence[Trial], target: Target) -> None:
    """Heuristic / best and 16-bit peer / best over M."""
    styles = {"heuristic": ("-", lambda point: point.heuristic_us), "16-bit peer": ("--", lambda point: point.peer_us)}
    found = set()
    for op in sorted({point.problem.op for point in points}):
        own, label = [point for point in points if point.problem.op == op], op
        for name, (style, of) in styles.items():
            if table := by_m(own, of):
                color = _COLORS.get(op, "black")
                axes.plot(list(table), list(table.values()), style, marker="o", color=color, label=label)
                label = None  # one entry for each operator
                found.add(name)
    for name in (name for name in styles if name in found):
        axes.plot([], [], styles[name][0], color="black", label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    tokens = sorted({point.problem.m for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, map(str, tokens), rotation=45)
    axes.set(xlabel="M", ylabel="time / best time")
    _legend(axes)


def curves(axes: Axes, points: Sequence[Point], trials: Sequence[Trial], target: Target) -> None:
    """Best so far / best in the end, over the trials: what half, 90 % and 99 % of the problems are within."""
    lines = list(search_curves(trials).values())
    longest = max(map(len, lines), default=0)
    columns = [sorted(line[min(at, len(line) - 1)] for line in lines) for at in range(longest)]
    for share, color, width in ((0.5, "#cf222e", 2.0), (0.9, "#57606a", 1.5), (0.99, "#8c959f", 1.0)):
        line = [column[math.ceil(share * len(column)) - 1] for column in columns]
        label = "median" if share == 0.5 else f"{share:.0%} of problems"
        axes.plot(range(1, longest + 1), line, marker=".", color=color, linewidth=width, label=label)
    axes.set(xlabel="trials", ylabel="best so far / best")
    _legend(axes)


def _legend(axes: Axes) -> None:
    """Below the drawing, where it hides nothing; none where nothing is drawn, of which matplotlib would warn."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncol=2, fontsize=8, frameon=False)


def search_curves(trials: Sequence[Trial]) -> dict[Problem, list[float]]:
    """Problem -> best so far as a multiple of the best in the end, after each trial that has a result.

    Imported records are the end of searches elsewhere: they are no trials here.
    """
    times: dict[Problem, list[float]] = {}
    for it in trials:
        if it.role == "confirm" or it.imported:
            continue
        before = times.setdefault(it.problem, [])
        last = before[-1] if before else math.inf
        before.append(min(last, it.us if it.us is not None else math.inf))
    return {
        problem: [us / line[-1] for us in line if us < math.inf]
        for problem, line in times.items()
        if line[-1] < math.inf
    }


def by_m(points: Sequence[Point], of: Callable[[Point], float | None]) -> dict[int, float]:
    """M -> geometric mean of another time / the best one, over the problems that have both."""
    found: dict[int, list[float]] = {}
    for point in points:
        us = of(point)
        if us:
            found.setdefault(point.problem.m, []).append(us / point.us)
    return {m: geomean(values) for m, values in sorted(found.items())}


def _draw(draw: Draw, points: Sequence[Point], trials: Sequence[Trial], target: Target) -> str:
    """One drawing as SVG text, wide enough to be read on a phone."""
    plots = _pyplot()
    out = io.StringIO()
    with plots.rc_context(_RC):
        figure, axes = plots.subplots(figsize=(5.0, 4.4), layout="constrained")
        draw(axes, points, trials, target)
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
        plots.close(figure)
    text = out.getvalue()
    return text[text.index("<svg") :]


def _draw_png(points: Sequence[Point], trials: Sequence[Trial], target: Target, path: Path) -> None:
    plots = _pyplot()
    with plots.rc_context(_RC):
        figure, panels = plots.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
        for axes, draw in zip(panels, (roofline, gains, curves)):
            draw(axes, points, trials, target)
        figure.savefig(path, format="png", dpi=120, bbox_inches="tight")
        plots.close(figure)


def page(points: Sequence[Point], trials: Sequence[Trial], target: Target, figures: Sequence[str]) -> str:
    """The page's text."""
    machine, last = trials[-1].machine, datetime.fromtimestamp(trials[-1].created, timezone.utc)
    failed = {it.status for it in trials} - {"ok"}
    counts = ", ".join(f"{sum(it.status == status for it in trials)} {status}" for status in ["ok", *sorted(failed)])
    gain = geomean(point.heuristic_us / point.us for point in points if point.heuristic_us)
    head = f"{len(points)} problems, {len(trials)} trials ({counts})."
    if gain:
        head += f" The heuristic's schedules take {gain:.3f}x the tuned ones' time (geometric mean, goal {GOAL:.2f}x)."
    versions = f"driver {machine.driver}, CUDA {machine.cuda}, torch {machine.torch}, TileLang {machine.tilelang}"
    named = sorted({point.peer for point in points if point.peer})
    others = f" Peers, in 16 bits: {', '.join(named)}." if named else ""
    slow = sorted(points, key=lambda point: point.us / point.bound_us, reverse=True)[:SLOWEST]
    parts = [
        f"<h1>Tuned schedules, {_text(machine.gpu)}</h1><p>{_text(head)}</p>",
        f"<p><small>{_text(versions)}, terrazzo {_text(machine.terrazzo)}, {last:%Y-%m-%d}</small></p>",
        _table(("operator", "problems", "heuristic / best", "worst", "peer / best"), summary_rows(points)),
        "<p><small>Problems are those whose heuristic was timed. M is the number of tokens; for attention, of "
        f"sequences times kv heads.{_text(others)}</small></p>",
        "<h2>Roofline</h2><p>Each point is a problem's best schedule; the lines are the datasheet's memory bandwidth "
        "and tensor rate.</p>" + figures[0],
        "<h2>Best against heuristic and peer</h2><p>Geometric mean over weights of the other time divided by the "
        "best one.</p>" + figures[1] + _table(("operator", "M", "heuristic / best", "peer / best"), _gain_rows(points)),
        "<h2>Search</h2><p>The best time so far as a multiple of the final one: what half, 90 % and 99 % of the "
        f"{len(search_curves(trials))} problems that were searched here are within.</p>" + figures[2],
        "<h2>Slowest against their bound</h2><p>The bound is the time that one resource alone needs: loading, "
        "dequantization or the tensor cores.</p>"
        + _table(("problem", "M", "us", "bound", "bound us", "times bound"), map(_slow_row, slow)),
        "<h2>All problems</h2><p>The best schedule of each; an operator's name opens its list.</p>",
        *_lists(points),
    ]
    title = f"Tuned schedules, {_text(machine.gpu)}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def summary_rows(points: Sequence[Point]) -> list[tuple]:
    """For each operator: problems whose heuristic was timed, heuristic / best of them (geometric mean and worst), and
    peer / best."""
    rows = []
    for op in sorted({point.problem.op for point in points}):
        own = [point for point in points if point.problem.op == op]
        ratios = [point.heuristic_us / point.us for point in own if point.heuristic_us]
        peers = geomean(point.peer_us / point.us for point in own if point.peer_us)
        rows.append((op, len(ratios), geomean(ratios), max(ratios, default=None), peers))
    return rows


def _gain_rows(points: Sequence[Point]) -> list[tuple]:
    rows = []
    for op in sorted({point.problem.op for point in points}):
        own = [point for point in points if point.problem.op == op]
        ours, theirs = by_m(own, lambda point: point.heuristic_us), by_m(own, lambda point: point.peer_us)
        rows += [(op, m, ours.get(m), theirs.get(m)) for m in sorted({point.problem.m for point in own})]
    return rows


def _slow_row(point: Point) -> tuple:
    problem = point.problem
    ratio = point.us / point.bound_us
    return f"{problem.op} {problem.what}", problem.m, point.us, point.bound, point.bound_us, ratio


def _lists(points: Sequence[Point]) -> list[str]:
    """For each operator a list of its problems by size, folded up: a table has hundreds."""
    columns, found = ("problem", "M", "us", "heuristic us", "peer us", "tried", "failed"), []
    for op in sorted({point.problem.op for point in points}):
        own = sorted((point for point in points if point.problem.op == op), key=_size)
        rows = _table(columns, map(_best_row, own), more=1)
        found.append(f"<details><summary>{_text(op)}, {len(own)} problems</summary>{rows}</details>")
    return found


def _size(point: Point) -> tuple:
    facts = dict(point.problem.facts)
    sizes = (facts.get(name, 0) for name in ("experts", "n", "k", "tokens", "rows"))
    return *sizes, point.problem.what, point.problem.m


def _best_row(point: Point) -> tuple:
    problem, it = point.problem, point.best
    schedule = " ".join([it.trial.program, *(f"{name}={value}" for name, value in it.trial.params)])
    times = (point.us, point.heuristic_us, point.peer_us)
    return problem.what, problem.m, *times, it.tried, it.failed, schedule


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]], more: int = 0) -> str:
    """A table; the last `more` cells of a row stand below it over its whole width."""
    kept = list(rows)
    kind = ['class="text"' if any(isinstance(row[at], str) for row in kept) else "" for at in range(len(columns))]
    head = "".join(f"<th {kind[at]}>{_text(name)}</th>" for at, name in enumerate(columns))
    body = ""
    for row in kept:
        cells = (f"<td {kind[at]}>{_cell(value)}</td>" for at, value in enumerate(row[: len(row) - more]))
        body += "<tr>" + "".join(cells) + "</tr>"
        for value in row[len(row) - more :]:
            body += f'<tr><td class="text more" colspan="{len(columns)}">{_cell(value)}</td></tr>'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return _text(value)


def _text(value: object) -> str:
    return html.escape(str(value))
