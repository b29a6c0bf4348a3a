"""docs/kv-formats.md: formats of keys and values by bits, accuracy and decode time, as a table and as a picture of it.

python -m benchmarks.kv_choice      draws docs/kv-formats.svg anew
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report

PICTURE = Path(__file__).parents[1] / "docs" / "kv-formats.svg"
PAGE = 128
"""Tokens of a page, in the rows of decode times that count."""
BASE = ("int4", "int4")
"""Times are over those of this pair, which every file of decode times has."""
ACCURACY = ("accuracy_*.json", "kv_formats_accuracy_*.json")
TIMES = ("kv_formats_h*.json", "attention_h*.json")
NAMES = {"kv_formats": "llama-27m, held out", "kv_formats_d128": "llama-27m of head_dim 128, held out"}
"""What a model is called here, where its file calls it otherwise."""


@dataclass
class Pair:
    """What is known of a format of keys and one of values.

    Attributes:
        accuracy: model -> (perplexity over that of 16 bits, its standard error, who computed it).
        time: GPU -> time of decode over that of `BASE` in the same run, geometric mean over caches.
    """

    accuracy: dict[str, tuple[float, float, str]] = field(default_factory=dict)
    time: dict[str, float] = field(default_factory=dict)


def bits(k_format: str, v_format: str, head_dim: int = 128) -> float:
    """Bits of a packed value, parameters included, mean of keys and values; f16 tokens beside them are not counted."""
    from terrazzo.ops.attention import CacheLayout

    layout = CacheLayout(k_format, v_format, head_dim)
    return 32 * layout.block_words / layout.block_tokens / (2 * head_dim)


def pairs() -> dict[tuple[str, str], Pair]:
    """Every pair of formats that a result file has, by bits, the most first. Kernels count before simulations."""
    found: dict[tuple[str, str], Pair] = {}
    for result in _results(ACCURACY):
        rows = [row for row in result["rows"] if row["weights"] == "f16" and "failure" not in row]
        for row in rows if any(row["k_format"] != "float16" for row in rows) else ():
            model = NAMES.get(result["model"], result["model"])
            known = found.setdefault((row["k_format"], row["v_format"]), Pair()).accuracy
            if row["path"] == "kernels" or model not in known:
                known[model] = row["ratio"], row["error"], row["path"]
    for result in _results(TIMES):
        times: dict[tuple, dict[tuple[str, str], float]] = {}
        for row in result["rows"]:
            if row["us"] and row["page"] == PAGE:
                cache = tuple(row[name] for name in ("batch", "q_heads", "kv_heads", "kv_len", "q_len"))
                times.setdefault(cache, {})[row["k_format"], row["v_format"]] = row["us"]
        gpu = result["gpu"].removeprefix("NVIDIA ").split()[0]
        for pair in dict.fromkeys(pair for of_cache in times.values() for pair in of_cache):
            ratios = [it[pair] / it[BASE] for it in times.values() if pair in it and BASE in it]
            if ratios:
                found.setdefault(pair, Pair()).time.setdefault(gpu, report.geomean(ratios))
    return dict(sorted(found.items(), key=lambda it: -bits(*it[0])))


def _results(patterns: tuple[str, ...]) -> Iterator[Mapping[str, Any]]:
    for pattern in patterns:
        for path in sorted(report.RESULTS.glob(pattern)):
            yield json.loads(path.read_text(encoding="utf-8"))


def table() -> str:
    """The table of the page."""
    every = pairs()
    models = list(dict.fromkeys(model for it in every.values() for model in it.accuracy))
    gpus = list(dict.fromkeys(gpu for it in every.values() for gpu in it.time))

    def said(it: Pair, model: str) -> str:
        if model not in it.accuracy:
            return ""
        ratio, error, path = it.accuracy[model]
        return f"{ratio:.4f} ± {error:.4f}" + (" (simulated)" if path == "simulated" else "")

    lines = [
        (
            f"`{k} / {v}`", f"{bits(k, v):.2f}", *(said(it, model) for model in models),
            *(f"{it.time[gpu]:.2f}" if gpu in it.time else "" for gpu in gpus),
        )
        for (k, v), it in every.items()
        if it.accuracy
    ]  # fmt: skip
    head = ("keys / values", "bits", *models, *(f"time, {gpu}" for gpu in gpus))
    return report.markdown(head, lines, range(1, len(head)))


def agreement() -> str:
    """Perplexities over the float model's, by kernels and by the simulation, where a file has both."""
    found: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for result in _results(ACCURACY[1:]):
        for row in result["rows"]:
            if "failure" not in row and row["k_format"] != "float16":
                at = found.setdefault((row["k_format"], row["v_format"]), {})
                at[NAMES.get(result["model"], result["model"]), row["path"]] = (
                    f"{row['ratio']:.4f} ± {row['error']:.4f}"
                )
    columns = [
        (model, path)
        for model in dict.fromkeys(model for it in found.values() for model, _ in it)
        for path in ("kernels", "simulated")
    ]
    lines = [
        (f"`{k} / {v}`{_f16_tokens(k)}", *(found[k, v].get(column, "") for column in columns))
        for k, v in sorted(found, key=lambda pair: -bits(*pair))
        if len({path for _, path in found[k, v]}) == 2
    ]
    head = ("keys / values", *(f"{model}: {path}" for model, path in columns))
    return report.markdown(head, lines, range(1, len(head)))


def _f16_tokens(k_format: str) -> str:
    from terrazzo.ops.attention.cache.format import kept_in_f16
    from terrazzo.ops.products.kv import get_format

    newest, first = kept_in_f16(k_format)
    kind = "block" if get_format(k_format).group else "ring"
    return (f", {kind} {newest}" if newest else "") + (f", first {first}" if first else "")


STEPS = {
    "plain": "nothing is packed",
    "full": "every sequence packs a tile",
    "mean": "mean of 16 steps",
}
"""Kinds of benchmarks.attention_write, as the page says them."""


def appends() -> str:
    """What an append adds to a decode step, by format and kind of step."""
    parts = []
    for result in _results(("kv_formats_write_*.json",)):
        rows = [row for row in result["rows"] if row["op"] == "attention_append" and "failure" not in row]
        name = lambda row: f"{row['batch']} x {row['kv_heads']} x {row['kv_len'] // 1024}K"
        shapes = list(dict.fromkeys(map(name, rows)))
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for row in rows:
            pair = f"`{row['k_format']} / {row['v_format']}`", STEPS[row["kind"]]
            lines.setdefault(pair, {})[name(row)] = f"{row['us'] - row['decode_us']:.1f} us, {100 * row['added']:.1f} %"
        head = ("keys / values", "step", *shapes)
        cells = [(*pair, *(it.get(shape, "") for shape in shapes)) for pair, it in lines.items()]
        where = f"One {result['gpu']}, commit {result['commit'][:7]}, copies {result['copy_gb_s']:.0f} GB/s."
        parts.append(f"{where}\n\n{report.markdown(head, cells, range(2, len(head)))}")
    return "\n\n".join(parts)


def draw(path: Path = PICTURE) -> Path:
    """A line for each pair: its bits, the perplexity that it adds to each model, and its decode time on each GPU."""
    from benchmarks.plot import GRID, INK, OURS, RIVALS, _pyplot

    every = {pair: it for pair, it in pairs().items() if it.accuracy}
    places = {pair: -index for index, pair in enumerate(every)}
    figure, axes = _pyplot().subplots(1, 3, figsize=(10, 0.32 * len(every) + 1.2), layout="constrained", sharey=True)
    for pair, place in places.items():
        axes[0].barh(place, bits(*pair), color=GRID, height=0.6)
        axes[0].annotate(f"{bits(*pair):.2f}", (bits(*pair), place), (3, 0), textcoords="offset points", va="center",
                         fontsize=7.5, color=INK)  # fmt: skip
    models = list(dict.fromkeys(model for it in every.values() for model in it.accuracy))
    for model, color in zip(models, (OURS, *RIVALS)):
        seen = [(places[pair], *it.accuracy[model][:2]) for pair, it in every.items() if model in it.accuracy]
        at, ratios, errors = zip(*seen)
        added, error = [100 * (ratio - 1) for ratio in ratios], [100 * it for it in errors]
        axes[1].errorbar(added, at, xerr=error, fmt="o", color=color, markersize=4, capsize=2, label=model)
    gpus = list(dict.fromkeys(gpu for it in every.values() for gpu in it.time))
    for gpu, color in zip(gpus, (OURS, *RIVALS)):
        seen = [(it.time[gpu], places[pair]) for pair, it in every.items() if gpu in it.time]
        axes[2].plot(*zip(*seen), "o", color=color, markersize=4, label=gpu)
    names = [k if k == v else f"{k} / {v}" for k, v in places]
    axes[0].set_yticks(list(places.values()), names, fontsize=8)
    axes[1].set_xscale("symlog", linthresh=1)
    axes[1].set_xticks([-10, -1, 0, 1, 10, 100], ["-10", "-1", "0", "1", "10", "100"])
    labels = ("bits of a packed value", "perplexity added, %", f"decode time over that of {' / '.join(BASE)}")
    for place, (at, label) in enumerate(zip(axes, labels)):
        at.set_xlabel(label, fontsize=8)
        at.tick_params(labelsize=8)
        at.grid(color=GRID, linewidth=0.6)
        at.set_axisbelow(True)
        at.spines[["top", "right"]].set_visible(False)
        if place:
            at.axvline(place - 1, color=INK, linewidth=0.8)
            at.legend(fontsize=7.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.13), ncols=4)
    axes[0].set_xlim(0, 18)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    _pyplot().close(figure)
    return path


if __name__ == "__main__":
    print(draw())
    sys.exit(0)
