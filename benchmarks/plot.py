"""Plots of result files: `python -m benchmarks.plot [FILE ...]` writes an SVG beside each; without names, anew."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.headline import NAMES
from benchmarks.linear import FORMATS

INK, GRID = "#22303C", "#DADFE3"
OURS, RIVALS = "#A83E26", ("#3F77A8", "#BF8336", "#4E9160", "#9C5E8C", "#6A7783", "#1F9AA0", "#C2A500", "#7A5236")
BARS = ("#8A949C", "#BF8336", "#D9B56C", "#9CB7D3", "#3F77A8", "#4E9160", "#A83E26", "#9C5E8C")


def draw(result: Mapping[str, Any], path: Path) -> Path:
    """Left: geometric mean of the speed-up over cuBLAS by M, of ours and of peers. Right: each shape of ours.

    Returns:
        The file written, `path` with the suffix .svg.

    Raises:
        ValueError: no row has both a time and a baseline.
    """
    plt = _pyplot()
    rows = report.timed(result)
    if not rows:
        raise ValueError(f"{path}: no row has a time and one of cuBLAS in 16 bits")
    figure, (means, shapes) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    ours = report.speedups(result)
    ms = list(ours)
    for name, color in zip(report.peer_names(result), itertools.cycle(RIVALS)):
        table = report.speedups(result, name)
        means.plot(list(table), list(table.values()), "o-", color=color, markersize=4, linewidth=1.2, label=name)
    means.plot(ms, list(ours.values()), "o-", color=OURS, linewidth=2.2, label="terrazzo")
    means.set_title(f"geometric mean over {len({(r['n'], r['k']) for r in rows})} shapes", fontsize=10)
    means.set_ylabel("speed-up over cuBLAS in 16 bits")
    sizes = list(dict.fromkeys((row["n"], row["k"]) for row in rows))
    for index, (n, k) in enumerate(sizes):
        own = [row for row in rows if (row["n"], row["k"]) == (n, k)]
        shade = plt.get_cmap("viridis")(0.95 * index / max(1, len(sizes) - 1))
        ratios = [report.baseline(row) / row["us"] for row in own]
        shapes.plot([row["m"] for row in own], ratios, ".-", color=shade, linewidth=1, label=f"{n} x {k}")
    shapes.set_title("each shape (N x K)", fontsize=10)
    for axes, columns in ((means, 1), (shapes, 2)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ms, [str(m) for m in ms], fontsize=8)
        axes.set_xlabel("M (tokens)")
        axes.axhline(1, color=INK, linewidth=0.8)
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7.5, frameon=False, ncols=columns)
        axes.spines[["top", "right"]].set_visible(False)
    setting = rows[0]
    where = f"on {result['gpu']}, {result['date']}"
    name = next((form.title for name, form in FORMATS.items() if path in report.files(name)), path.stem)
    title = f"{name} ({setting['dtype']}) {where}"
    return _write(figure, title, path)


def draw_decode(result: Mapping[str, Any], path: Path) -> Path:
    """Of a file of `attention`: by cache, bars of the speed-up over torch's fastest f16, of packages and of ours.

    One new token. Keys and values are of one format, contiguous where a file has both kinds of cache. Of peers that
    differ in their pages alone the fastest counts.

    Returns, Raises:
        As `draw`.
    """
    page = min((row["page"] for row in result["rows"]), default=0)
    bars: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        of_torch = [us for name, us in row["peers"].items() if name.startswith("sdpa_")]
        if not row["us"] or row["page"] != page or row["q_len"] > 1 or not of_torch:
            continue
        cache = f"{row['batch']} x {row['q_heads']}/{row['kv_heads']}\n{row['kv_len'] // 1024}K tokens"
        times = [(NAMES.get(name, name), us) for name, us in row["peers"].items() if not name.startswith("sdpa_")]
        if row["v_format"] == row["k_format"].split("_")[0]:
            times.append((f"terrazzo {row['k_format'].replace('_', ' ')}", row["us"]))
        for name, us in times:
            cells = bars.setdefault(name, {})
            cells[cache] = max(cells.get(cache, 0.0), min(of_torch) / us)
    if not bars:
        raise ValueError(f"{path}: no row has a time and one of torch's f16 attention")
    figure, axes = _pyplot().subplots(figsize=(10.5, 4), layout="constrained")
    caches = list(dict.fromkeys(cache for cells in bars.values() for cache in cells))
    rivals = [name for name in bars if not name.startswith("terrazzo ")]
    ours = sorted((name for name in bars if name not in rivals), key=lambda name: max(bars[name].values()))
    shades = _pyplot().get_cmap("OrRd")([0.3 + 0.6 * i / len(ours) for i in range(len(ours))])
    colors = (*RIVALS[: len(rivals)], *shades)
    heights = {name: [bars[name].get(cache) for cache in caches] for name in (*rivals, *ours)}
    _bars(axes, caches, heights, "", colors)
    axes.set_ylabel("speed-up over torch's fastest f16")
    title = f"Decode attention of one token, sequences x query/KV heads, on {result['gpu']}, {result['date']}"
    return _write(figure, title, path)


def _bars(
    axes: Any, groups: list[str], heights: Mapping[str, list[float | None]], unit: str, colors: Sequence[Any] = BARS
) -> None:
    """Groups of bars with their heights above them; one that is missing leaves its place empty."""
    width = 0.84 / len(heights)
    for index, (name, values) in enumerate(heights.items()):
        places = [group + (index - (len(heights) - 1) / 2) * width for group in range(len(groups))]
        bars = axes.bar(places, [v or 0 for v in values], width * 0.94, color=colors[index % len(colors)], label=name)
        texts = ["" if v is None else f"{v:.2f}{unit}" for v in values]
        axes.bar_label(bars, texts, fontsize=6, color=INK, rotation=90, padding=2)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.axhline(1, color=INK, linewidth=0.8)
    axes.grid(color=GRID, linewidth=0.6, axis="y")
    axes.set_axisbelow(True)
    axes.margins(y=0.16)
    axes.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "terrazzo"
    import matplotlib.pyplot

    return matplotlib.pyplot


def _write(figure: Any, title: str, path: Path) -> Path:
    figure.suptitle(title, fontsize=11, color=INK)
    written = path.with_suffix(".svg")
    figure.savefig(written, metadata={"Date": None})
    _pyplot().close(figure)
    return written


PLOTS = {
    "attention_h*.json": draw_decode,
}
"""Names of result files that are not of linear layers -> their plot."""


def kind_of(path: Path) -> Callable[[Mapping[str, Any], Path], Path]:
    """What draws a file."""
    return next((draws for pattern, draws in PLOTS.items() if fnmatch(path.name, pattern)), draw)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="result files; default: those that have a plot")
    every = [path for name in FORMATS for path in report.files(name)]
    every += [path for pattern in PLOTS for path in sorted(report.RESULTS.glob(pattern))]
    drawn = [path for path in every if path.with_suffix(".svg").is_file()]
    for path in parser.parse_args(argv).files or drawn:
        draws = kind_of(path)
        try:
            result = report.load(path) if draws is draw else json.loads(path.read_text(encoding="utf-8"))
            print(draws(result, path))
        except (ValueError, OSError) as error:
            print(f"benchmarks.plot: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
