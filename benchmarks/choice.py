"""docs/choosing-a-format.md: formats of weights by accuracy and speed, as a table and as a picture of it.

python -m benchmarks.choice      draws docs/choosing.svg anew
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import report
from benchmarks.linear import TUNED

PICTURE = Path(__file__).parents[1] / "docs" / "choosing.svg"
SIZES = (4, 16, 64, 256, 1024)
"""Tokens whose speed the table has; W4A8's files begin at 4."""
FILES = {
    "w4a16-g128": "w4a16", "w4a8-g128": "w4a8", "w4a8-e4m3-g128": "w4afp8", "w4ax": "w4ax", "mxfp4": "mxfp4",
    "nvfp4": "nvfp4", "w8a16-g128": "w8a16_g128", "w8a8": "w8a8", "w8a8-e4m3": "w8a8_fp8",
    "w8a8-e4m3-g128": "w8a8_blocks",
}  # fmt: skip
"""Format -> its result files, those of layers that records were tuned on. Formats of accuracy files alone come last."""
UNKNOWN = "not measured yet"


@dataclass
class Format:
    """What is known of one format of weights.

    Attributes:
        bits: of a weight, parameters included; None where no product was timed.
        accuracy: model -> (perplexity over that of 16 bits, its standard error), with the kernels.
        speed: tokens -> speed-up over cuBLAS in 16 bits, geometric mean over shapes. gpu: where.
    """

    bits: float | None = None
    accuracy: dict[str, tuple[float, float]] = field(default_factory=dict)
    speed: dict[int, float] = field(default_factory=dict)
    gpu: str = ""


def formats() -> dict[str, Format]:
    """Every format of weights that a result file has, keys and values in 16 bits."""
    found = {name: Format() for name in FILES}
    for path in sorted(report.RESULTS.glob("accuracy_*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        for row in result["rows"]:
            whole = not {"^", "@"} & set(row["weights"])
            if whole and row["path"] == "kernels" and row["k_format"] == "float16" and "failure" not in row:
                made = found.setdefault(row["weights"], Format())
                made.accuracy[result["model"]] = row["ratio"], row["error"]
    found.pop("f16", None)
    for name, linear in FILES.items():
        tuned = [path for path in report.files(linear) if "_held_out_" not in path.name]
        for path in tuned[-1:]:  # one GPU for each format
            _speed(found[name], json.loads(path.read_text(encoding="utf-8")), name)
    return {name: it for name, it in found.items() if it.accuracy or it.speed}


def _speed(made: Format, result: Mapping, name: str) -> None:
    group = int(name.rpartition("-g")[2]) if "-g" in name else None
    timed = (row for row in report.timed(result) if (row["n"], row["k"]) in TUNED)  # older files have more layers
    rows = [row for row in timed if group in (None, row["group"])]
    made.speed = report.means((row["m"], report.baseline(row) / row["us"]) for row in rows)
    if rows:
        largest = max(rows, key=lambda row: row["n"] * row["k"])
        made.bits = 8 * largest["bytes"] / largest["n"] / largest["k"]
        made.gpu = result["gpu"].removeprefix("NVIDIA ").split()[0]


def table() -> str:
    """The table of the page."""
    every = formats()
    models = list(dict.fromkeys(model for it in every.values() for model in it.accuracy))
    said = lambda it, model: "{:.3f} ± {:.3f}".format(*it.accuracy[model]) if model in it.accuracy else UNKNOWN
    lines = [
        (
            f"`{name}`", f"{it.bits:.2f}" if it.bits else "", *(said(it, model) for model in models),
            *(f"{it.speed[m]:.2f}x" if m in it.speed else "" for m in SIZES), it.gpu,
        )
        for name, it in every.items()
    ]  # fmt: skip
    head = ("weights", "bits", *models, *(f"{m} tokens" for m in SIZES), "GPU")
    return report.markdown(head, lines, range(1, len(head) - 1))


def draw(path: Path = PICTURE) -> Path:
    """Left the perplexity that a format adds, right how many times as fast as cuBLAS it is; a line for each format."""
    from benchmarks.plot import GRID, INK, OURS, RIVALS, _pyplot

    every = {name: it for name, it in formats().items() if it.speed and it.accuracy}
    model = next(iter(next(iter(every.values())).accuracy))
    figure, (left, right) = _pyplot().subplots(
        1, 2, figsize=(8, 0.55 * len(every) + 1.3), layout="constrained", sharey=True
    )
    places = {name: -index for index, name in enumerate(every)}
    for name, it in every.items():
        if model in it.accuracy:
            ratio, error = it.accuracy[model]
            left.errorbar(100 * (ratio - 1), places[name], xerr=100 * error, fmt="o", color=OURS, capsize=3)
            place = 100 * (ratio + error - 1), places[name]
            text = f"{100 * (ratio - 1):.2f} %"
            left.annotate(text, place, (6, 0), textcoords="offset points", va="center", fontsize=8, color=INK)
    for m, color in zip((4, 64, 1024), (OURS, *RIVALS)):
        points = [(it.speed[m], places[name]) for name, it in every.items() if m in it.speed]
        right.plot(*zip(*points), "o", color=color, label=f"{m} tokens")
    left.set_yticks(list(places.values()), list(places), fontsize=9)
    left.set_xlabel(f"perplexity added, % ({model})", fontsize=9)
    left.margins(x=0.2, y=0.25)
    left.set_xlim(left=0)
    right.set_xlabel("times as fast as cuBLAS in 16 bits", fontsize=9)
    right.axvline(1, color=INK, linewidth=0.8)
    right.set_xlim(left=0)
    right.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=3)
    for axes in (left, right):
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    _pyplot().close(figure)
    return path


if __name__ == "__main__":
    print(draw())
    sys.exit(0)
