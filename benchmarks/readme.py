"""The generated parts of README.md and of docs/, and pictures of layouts.

    python -m benchmarks.readme            rewrite them
    python -m benchmarks.readme --check    exit 1 and name what is out of date

A part stands between `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import choice, gpu_tests, headline, kv_choice, papers, report, shared_records, tables, tile_examples
from benchmarks.linear import FORMATS, command

ROOT = Path(__file__).parents[1]
LAYERS = {
    "layer_kernels_*.json": "Kernels between products",
    "grouped_*.json": "Experts",
}
"""Files of other layers -> their heading in docs/results.md."""
PICTURES = ("w4a16", "w4a8_wgmma", "kv2_wgmma")
"""Layouts that docs/layouts.md explains, each in a docs/layout_<instance>.svg."""


def operators() -> str:
    """The registry as a table: operator x format x target."""
    from terrazzo.ops.registry import STATUS, rows

    found = rows()
    targets = list(dict.fromkeys(row["target"] for row in found))
    merged: dict[tuple[str, str], dict] = {}
    for row in found:
        entry = merged.setdefault((row["operator"], row["format"]), {**row, "status": {}})
        entry["status"][row["target"]] = row["status"]
    table = report.markdown(
        ("operator", "weights from", "groups", "zero points", "x and y", *targets, "notes"),
        [
            (
                f"`{row['operator']}`",
                f"`{row['format']}`",
                ", ".join(row["groups"]),
                ", ".join(row["zeros"]),
                ", ".join(row["activations"]),
                *(row["status"].get(arch, "") for arch in targets),
                row["notes"],
            )
            for row in merged.values()
        ],
    )
    used = [status for status in STATUS if any(row["status"] == status for row in found)]
    return table + "\n\n" + "\n".join(f"- {status}: {STATUS[status]}." for status in used)


def products() -> str:
    """One table for each result file of linear layers, with the plot that belongs to it."""
    parts = []
    for name, form in FORMATS.items():
        found = []
        for path in report.files(name):
            result = report.load(path)
            if report.timed(result):
                again = result.get("command") or command(name, "held-out" if "_held_out_" in path.name else "tuned")
                found.append(report.summary_markdown(result, path.relative_to(ROOT).as_posix(), form.title, again))
            found += picture(path, "speed-up by M")
        parts += [f"## {form.title}", *found] * bool(found)
    return "\n\n".join(parts) or "No result file is in benchmarks/results yet; `make bench` writes one on a GPU."


def figures() -> str:
    """Tables of what stands between products, and of experts."""
    parts = []
    for pattern, heading in LAYERS.items():
        found = tables_of({pattern: tables.LAYERS[pattern]})
        parts += [f"### {heading}", *found] * bool(found)
    return "\n\n".join(parts) or "No result file is in benchmarks/results yet."


def tables_of(makers: Mapping[str, tables.Table]) -> list[str]:
    """The tables of the result files that match, each with its plot if there is one."""
    parts = []
    for pattern, table in makers.items():
        for path in sorted(report.RESULTS.glob(pattern)):
            if tables.owner(path.name) == pattern:
                parts.append(table(json.loads(path.read_text(encoding="utf-8")), path.relative_to(ROOT).as_posix()))
                parts += picture(path, "these figures as bars")
    return parts


def picture(path: Path, text: str) -> list[str]:
    """The plot of a result file, if there is one."""
    plot = path.with_suffix(".svg")
    return [f"![{text}]({plot.relative_to(ROOT).as_posix()})"] if plot.is_file() else []


def of(
    makers: Mapping[str, tables.Table], none: str = "No such result file is in benchmarks/results yet."
) -> Callable[[], str]:
    """The part that holds these tables, or says that there are none."""
    return lambda: "\n\n".join(tables_of(makers)) or none


def shared() -> str:
    """What another GPU's records are worth, for docs/tuning.md."""
    files = sorted(report.RESULTS.glob("shared_records_*.json"))
    parts = [
        shared_records.table(json.loads(path.read_text(encoding="utf-8")), path.relative_to(ROOT).as_posix())
        for path in files
    ]
    return "\n\n".join(parts) or "Not measured yet."


def models() -> str:
    """The table of models that `--model` knows."""
    from terrazzo.schedules.models import MODELS

    return report.markdown(
        ("model", "layers (N x K)"),
        [
            (f"`{name}`", ", ".join(f"{layer.name} {layer.n} x {layer.k}" for layer in layers))
            for name, layers in MODELS.items()
        ],
    )


PARTS: dict[str, Callable[[], str]] = {
    "headline": lambda: headline.table("H100"),
    "headline-all": headline.table,
    "choice": choice.table,
    "kv-choice": kv_choice.table,
    "kv-agreement": kv_choice.agreement,
    "kv-appends": kv_choice.appends,
    "operators": operators,
    "products": products,
    "figures": figures,
    "attention": of(tables.ATTENTION),
    "whole-models": of(tables.MODELS),
    "engine": of({"engine_*.json": tables.engine}),
    "kv-engine": of({"kv_engine_*.json": tables.kv_engine}, "Tokens/s inside vLLM: not measured yet."),
    "served": of({"served_*.json": tables.served}, ""),
    "models": models,
    "shared-records": shared,
    "tile-examples": tile_examples.shown,
    "gpu-tests": gpu_tests.recorded,
    "papers": papers.table,
}
PAGES = (
    "operators",
    "choosing-a-format",
    "results",
    "results-products",
    "results-attention",
    "results-models",
    "benchmarks",
    "serving",
    "tuning",
    "kv-formats",
    "gpu-tests",
    "papers",
    "tile-programs",
)
DOCUMENTS = ("README.md", *(f"docs/{name}.md" for name in PAGES))


def fill(text: str, folder: str = "") -> str:
    """A document with every generated part as it should be; `folder` is where it lies, "docs" or the root.

    Raises:
        ValueError: a marker without its end, or of an unknown name.
    """
    opened = re.findall(r"<!-- generated: (\S+) -->", text)
    for name in opened:
        if name not in PARTS or f"<!-- end: {name} -->" not in text:
            raise ValueError(f"marker {name!r} is unknown or has no end; known: {', '.join(PARTS)}")
    for name in opened:
        pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
        body = PARTS[name]().replace("](benchmarks/", "](../benchmarks/" if folder else "](benchmarks/")
        text = pattern.sub(lambda match, body=body: f"{match.group(1)}\n{body}\n\n{match.group(2)}", text)
    return text


def filled(name: str) -> str:
    """A document as it should be, by its path from the root."""
    return fill((ROOT / name).read_text(encoding="utf-8"), name.rpartition("/")[0])


def drawn() -> dict[str, str]:
    """Pictures by path: layouts."""
    from terrazzo.layouts.picture import render_svg

    return {f"docs/layout_{name}.svg": render_svg(name) for name in PICTURES}


def stale() -> dict[str, str]:
    """Document -> difference, for everything that is not as it would be generated now."""
    wanted = {name: filled(name) for name in DOCUMENTS} | drawn()
    found = {}
    for name, text in wanted.items():
        seen = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).is_file() else ""
        if seen != text:
            lines = difflib.unified_diff(seen.splitlines(), text.splitlines(), name, f"{name}, generated", lineterm="")
            found[name] = "\n".join(list(lines)[:40])
    return found


def git(*words: str) -> str:
    """What git says, "" where it fails or is not there."""
    try:
        done = subprocess.run(("git", *words), cwd=ROOT, capture_output=True, encoding="utf-8", check=False)
    except OSError:
        return ""
    return done.stdout.strip() if not done.returncode else ""


def unknown_commits() -> list[str]:
    """Result files of GPUs whose commit is neither in the history nor in `report.LOST`; none where git cannot tell."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        return []
    found = []
    for path in sorted(report.RESULTS.glob("*_h*00.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        commit = result.get("commit_on_main") or result["commit"]
        if not report.lost(result) and not git("merge-base", commit, "HEAD").startswith(commit):
            found.append(f"{path.name}: its commit {commit[:12]} is in no history of HEAD; measure again on main")
    return found


def missing_files(texts: Mapping[str, str]) -> list[str]:
    """Links of documents to results that are no files."""
    linked = re.compile(r"\]\((?:\.\./)?(benchmarks/\S+?)\)")
    links = {(name, link) for name, text in texts.items() for link in linked.findall(text)}
    return [f"{name}: {link} is no file" for name, link in sorted(links) if not (ROOT / link.split("#")[0]).exists()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(argv)
    texts = {name: filled(name) for name in DOCUMENTS}
    if problems := [*unknown_commits(), *missing_files(texts)]:
        print(*problems, sep="\n", file=sys.stderr)
        return 1
    if options.check:
        found = stale()
        for name, difference in found.items():
            print(f"{name} is out of date; run `make docs`\n{difference}", file=sys.stderr)
        return 1 if found else 0
    for name, text in (texts | drawn()).items():
        (ROOT / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
