"""Plots of a result file: `python -m benchmarks.plot [FILE ...]` writes a PNG and an SVG beside each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.readme import LINEAR

INK, GRID = "#22303C", "#DADFE3"
OURS, RIVALS = "#A83E26", ("#3F77A8", "#BF8336", "#4E9160", "#9C5E8C", "#6A7783")


def draw(result: Mapping[str, Any], path: Path) -> list[Path]:
    """Left: geometric mean of the speed-up over cuBLAS f16 by M, peers and goals beside it. Right: each shape of ours.

    Returns:
        The files written, `path` with the suffixes .png and .svg.

    Raises:
        ValueError: no row has both a time and a baseline.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report.timed(result)
    if not rows:
        raise ValueError(f"{path}: no row has a time and a {report.BASELINE} time")
    matplotlib.rcParams["svg.hashsalt"] = "terrazzo"
    figure, (means, shapes) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained", sharey=True)
    ours = report.speedups(result)
    ms = list(ours)
    wanted = report.goals_of(result)
    goals = [m for m in ms if m in wanted]
    means.plot(goals, [wanted[m] for m in goals], "_", color=INK, markersize=16, label="goal")
    for name, color in zip(report.peer_names(result), RIVALS):
        table = report.speedups(result, name)
        means.plot(list(table), list(table.values()), "o-", color=color, markersize=4, linewidth=1.2, label=name)
    means.plot(ms, list(ours.values()), "o-", color=OURS, linewidth=2.2, label="terrazzo")
    means.set_title(f"geometric mean over {len({(r['n'], r['k']) for r in rows})} shapes", fontsize=10)
    means.set_ylabel("speed-up over cuBLAS f16")
    for index, (n, k) in enumerate(dict.fromkeys((row["n"], row["k"]) for row in rows)):
        own = [row for row in rows if (row["n"], row["k"]) == (n, k)]
        shade = plt.get_cmap("viridis")(index / 12)
        ratios = [row["peers"][report.BASELINE] / row["us"] for row in own]
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
    title = f"{report.operator(result).upper()} ({setting['dtype']}, group {setting['group']}) {where}"
    figure.suptitle(title, fontsize=11, color=INK)
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    figure.savefig(written[0], dpi=144, metadata={"Software": None})
    figure.savefig(written[1], metadata={"Date": None})
    plt.close(figure)
    return written


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="result files; default: all of benchmarks/results")
    for path in parser.parse_args(argv).files or [path for op in LINEAR for path in report.files(op)]:
        try:
            for written in draw(report.load(path), path):
                print(written)
        except (ValueError, OSError) as error:
            print(f"benchmarks.plot: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
