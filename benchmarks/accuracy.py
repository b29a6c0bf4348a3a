"""Accuracy of weights x activations x KV formats: kernels, a simulation of the same numbers, and the float model.

    python -m benchmarks.accuracy MODEL DATA                     every row; writes results/accuracy_<name>_<gpu>.json
    python -m benchmarks.accuracy MODEL DATA --rows f16+int4/int4,w4a8-g64+float16/float16 --windows 8
    python -m benchmarks.accuracy MODEL DATA --paths simulated   without a GPU: no kernel runs
    python -m benchmarks.accuracy SMALL DATA --held-out --rows ...  of benchmarks.train_small, on what it has not seen

MODEL is a Hugging Face folder (benchmarks.accuracy_data makes one of DATA, benchmarks.train_small another); the word
`smollm2` names the first. Windows of `--length` tokens overlap by half; the later half of each is scored, in the first
one all of it. Kernels decode token by token, so that each reads the cache as it is stored: a prefill would hide the
cache's format, since it reads new tokens as they are. A window's loss is compared with the float model's on the same
window (paired): `ratio` of perplexities and its standard error over windows; `kl` is the mean Kullback-Leibler
divergence of a token's distribution from the float model's, in nats. `tasks` is the share of items of benchmarks.tasks
that are answered exactly, for a model that was trained on them. `w4a8-g64*` is calibrated on the speeches.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import report, tasks

FLOAT = "f16+float16/float16"
KV_ROWS = (
    "int8/int8", "int8/int4", "int4_hadamard/int4", "int4_channel64/int4", "int4_channel128/int4", "int4/int4",
    "int2_hadamard/int2_hadamard", "int2_channel64/int2",
)  # fmt: skip
WEIGHT_ROWS = (
    "w8a16-g128", "fp8", "w8a8", "w8a8-e4m3", "w8a8-e4m3-g128", "mxfp4", "nvfp4",
    "w4a16-g128", "w4a16-g128*", "w4a16-g64", "w4a16-g32", "w4a8-g64", "w4a8-g64*", "w4a8-g32",
    "w4a8-e4m3-g128", "w4a8-e4m3-g128*", "w4a8-e4m3-g64", "w4ax", "w4ax*",
)  # fmt: skip
CALIBRATED, CALIBRATION, CALIBRATION_TOKENS = "*", "speeches", 16384
"""After a weight format: its quantizer has seen what the float model's layers read of that text."""
ONLY = "@f16"
"""After a weight format: its weights under activations that are not quantized, which only the simulation has."""
HEAD = "^"
"""Between the layers' format and that of the head, which is in 16 bits without it: f16^w4a16-g64."""
ROWS = (
    *(f"f16+{kv}" for kv in KV_ROWS),
    *(f"{weights}+float16/float16" for weights in WEIGHT_ROWS),
    "w4a16-g64+int4_channel64/int4",
    "w4a8-g64+int8/int8",
)
TEXTS = ("news", "novel")
PATHS = ("simulated", "kernels")
TASK_ROWS, TASK_SEED = 32, 1_000_003
"""Of each task of benchmarks.tasks; the seed is none that a model was trained with."""
Forward = Callable[[Any, int], Any]
"""Logits [B, T - first, vocabulary] of tokens [B, T] and the first place whose logits are asked for."""


def parse_row(text: str) -> tuple[str, str, str]:
    """(weights, keys, values) of "w4a8+int8/int4"; weights "f16" stay float, "w4a8@f16" leave activations float, and
    "f16^w4a16-g64" have a head in that format."""
    found = re.fullmatch(r"([\w-]+\*?(?:@f16)?(?:\^[\w-]+)?)\+(\w+)/(\w+)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text}: write weights+keys/values, as w4a16-g64+int4_channel64/int4")
    return found[1], found[2], found[3]


def windows(tokens: int, length: int, most: int) -> Iterator[tuple[int, int]]:
    """(first token, first scored position) of at most `most` windows that overlap by half."""
    for index in range(most):
        first = index * (length // 2)
        if first + length > tokens:
            return
        yield first, (length // 2 if index else 1)


def window_scores(
    forward: Forward, ids: Any, length: int, most: int, batch: int, base: list[Any] | None = None
) -> tuple[list[float], list[float], list[Any]]:
    """(mean loss in nats of the scored tokens of each window of ids [tokens]; mean divergence from the logits of
    `base`, empty without it; logits of the windows)."""
    import torch

    cuts, losses, apart, kept = list(windows(len(ids), length, most)), [], [], []
    for at in range(0, len(cuts), batch):
        part = cuts[at : at + batch]
        rows = torch.stack([ids[first : first + length] for first, _ in part])
        begin = min(scored for _, scored in part) - 1
        for row, logits, (_, scored) in zip(rows, forward(rows, begin), part):
            logits = logits[scored - 1 - begin : -1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, row[scored:]).item())
            if base is None:
                kept.append(logits.half())
                continue
            wanted, found = (x.float().log_softmax(-1) for x in (base[len(apart)], logits))
            apart.append((wanted.exp() * (wanted - found)).sum(-1).mean().item())
    return losses, apart, kept


def compare(losses: list[float], base: list[float]) -> dict[str, float]:
    """Perplexity, its ratio to the base's, and the standard error of that ratio over windows."""
    gaps = [a - b for a, b in zip(losses, base, strict=True)]
    ratio = math.exp(statistics.fmean(gaps))
    spread = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    perplexity = math.exp(statistics.fmean(losses))
    return {"perplexity": round(perplexity, 4), "ratio": round(ratio, 5), "error": round(ratio * spread, 5)}


# -- the three models --------------------------------------------------------------------------------------------------
def float_forward(folder: Path, device: str) -> Forward:
    """The float16 model of transformers."""
    model = _float(folder, device)
    return _without_cache(model)


def _without_cache(model: Any) -> Forward:
    return lambda rows, first: model(input_ids=rows, use_cache=False, logits_to_keep=rows.shape[1] - first).logits


def _float(folder: Path, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16, trust_remote_code=False).to(device).eval()


def simulated_forward(folder: Path, row: tuple[str, str, str], device: str) -> Forward:
    """The float16 model of transformers with simulated products and a simulated cache."""
    from benchmarks import simulated

    (weights, _, head), keys, values = row[0].partition(HEAD), *row[1:]
    model = _float(folder, device)
    if head:
        quantize_head(model, head)
    if weights != "f16":
        loaded = loaded_model(folder, (weights.removesuffix(ONLY), keys, values), device)
        simulated.simulate_linears(model, loaded, activations=not weights.endswith(ONLY))
    if (keys, values) != ("float16", "float16"):
        simulated.simulate_cache(model, keys, values)
    return _without_cache(model)


def quantize_head(model: Any, form: str) -> None:
    """The numbers of the head's codes in the place of its weight; an embedding that is tied to it keeps its own."""
    import torch
    from terrazzo.nn import Format

    packed = Format.parse(form).quantize(model.lm_head.weight.detach())
    model.lm_head.weight = torch.nn.Parameter(packed.dequantize().to(model.lm_head.weight), requires_grad=False)


def loaded_model(folder: Path, row: tuple[str, str, str], device: str) -> Any:
    """`terrazzo.load` of the folder in a row's formats; calibrated ones were written into `calibrated` before."""
    import terrazzo
    import torch

    (weights, _, head), *kv = row[0].partition(HEAD), *row[1:]
    quantize = None if weights == "f16" or weights.endswith(CALIBRATED) else weights
    folder = calibrated(folder, weights) if weights.endswith(CALIBRATED) else folder
    facts = dict(quantize=quantize, lm_head=head or None)
    return terrazzo.load(folder, device=device, dtype=torch.float16, kv=tuple(kv), **facts)


def calibrated(folder: Path, weights: str, text: Path | None = None) -> Path:
    """The folder that `terrazzo quantize --calibration` makes of a format, below `folder`; made once, of `text`."""
    made = folder / f"calibrated-{weights.removesuffix(CALIBRATED)}"
    if not (made / "config.json").exists():
        command = [sys.executable, "-m", "terrazzo", "quantize", str(folder), "-o", str(made)]
        command += ["--format", weights.removesuffix(CALIBRATED), "--dtype", "f16", "--write", "packed"]
        command += ["--calibration", str(text), "--tokens", str(CALIBRATION_TOKENS)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return made


def compile_rows(folder: Path, rows: list[tuple[str, str, str]], batch: int, length: int) -> None:
    """Compile the kernels of `kernel_forward` in parallel, before the first row asks for one after another."""
    from transformers import AutoConfig

    from benchmarks import decode_step

    c = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    dim = getattr(c, "head_dim", None) or c.hidden_size // heads
    shapes = {
        "qkv": ((heads + 2 * kv_heads) * dim, c.hidden_size), "o": (c.hidden_size, heads * dim),
        "gate_up": (2 * c.intermediate_size, c.hidden_size), "down": (c.hidden_size, c.intermediate_size),
    }  # fmt: skip
    layers = [
        (row[0].partition(HEAD)[0].rstrip(CALIBRATED), *row[1:]) for row in rows
    ]  # a head's kernels are compiled when it is met
    asked = [decode_step.Row(batch, length, *row) for row in layers if not row[0].endswith(ONLY)]
    decode_step.compile_all(asked, shapes, (heads, kv_heads, dim))


def kernel_forward(folder: Path, row: tuple[str, str, str], device: str) -> Forward:
    """The loaded model token by token over its cache; on a GPU one graph for each step."""
    from terrazzo.nn.generation import DecodeStep

    model = loaded_model(folder, row, device)

    def forward(rows: Any, first: int) -> Any:
        count, length = rows.shape
        cache = model.new_cache(count, length)
        batch = cache.extend({cache.new(): 1 for _ in range(count)}, reserve=length - 1)
        step, found = DecodeStep(model, batch), None
        for at in range(length):
            step.tokens.copy_(rows[:, at])
            logits = step()
            if at >= first:
                found = logits.new_empty(count, length - first, logits.shape[-1]) if found is None else found
                found[:, at - first] = logits
        return found

    return forward


# -- running -----------------------------------------------------------------------------------------------------------
def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("model", help="Hugging Face folder, or smollm2 for the one of DATA")
    parser.add_argument("data", type=Path, help="folder of benchmarks.accuracy_data")
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated, weights+keys/values")
    parser.add_argument("--paths", default=",".join(PATHS), help=f"of {', '.join(PATHS)}")
    parser.add_argument("--texts", default=",".join(TEXTS))
    parser.add_argument("--windows", type=int, default=48, help="of each text")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--batch", type=int, default=48, help="windows at a time")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds after which no further row is begun")
    parser.add_argument("--compile-only", action="store_true", help="compile the rows' kernels, and stop")
    parser.add_argument("--held-out", action="store_true", help="score only what benchmarks.train_small left out")
    parser.add_argument("--name", help="of the result file; the model folder's own unless given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    o = parser.parse_args(argv)
    try:
        o.rows = [(text, parse_row(text)) for text in o.rows.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    o.paths, o.texts = o.paths.split(","), o.texts.split(",")
    for given, known in ((o.paths, PATHS), (o.texts, TEXTS)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(known)}")
    return o


def folder_of(o: argparse.Namespace) -> Path:
    """The model's folder."""
    from benchmarks import accuracy_data

    return accuracy_data.hf_folder(o.data) if o.model == "smollm2" else Path(o.model)


class Run:
    """Measures rows one after another and writes the file after each."""

    def __init__(self, o: argparse.Namespace) -> None:
        import torch
        from terrazzo.nn.config_fields import check_length, positions
        from transformers import AutoConfig, AutoTokenizer

        from benchmarks import train_small

        self.o, self.start, self.folder = o, time.perf_counter(), folder_of(o)
        config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        check_length(o.length, 0, positions(config.get_text_config()), "--length")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and "kernels" in o.paths:
            compile_rows(self.folder, [row for _, row in [(FLOAT, parse_row(FLOAT)), *o.rows]], o.batch, o.length)
        tokenizer = AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        self.ids = {}
        for name in o.texts:
            own = self.folder / f"{name}.txt"  # code.txt, which benchmarks.train_small kept back
            text = (own if own.is_file() else o.data / own.name).read_text(encoding="utf-8")
            text = train_small.held_out(text) if o.held_out and not own.is_file() else text
            text = text[: 8 * o.length * o.windows]  # a token has fewer than 8 characters here, on average 4
            self.ids[name] = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0].to(self.device)
        self.result = self._header() | {"model": o.name or self.folder.name, "length": o.length, "rows": []}
        training = self.folder / "training.json"
        if training.is_file():
            self.result["training"] = json.loads(training.read_text(encoding="utf-8"))
        self.items = self._items(tokenizer) if self.result.get("training", {}).get("tasks") else {}
        self.logits: dict[str, list[Any]] = {}
        self.base = self._losses(float_forward(self.folder, self.device), self.result.setdefault("float", {}))

    def _header(self) -> dict[str, Any]:
        if self.device == "cuda":
            from terrazzo.autotune import gemm_bench
            from terrazzo.ops.attention.cache import launch

            return gemm_bench.header(launch.detect(), self.o.commit)
        return {"gpu": "none", "commit": self.o.commit}

    def _items(self, tokenizer: Any) -> dict[str, tasks.Rows]:
        import torch

        made, generator = tasks.Tasks(tokenizer), torch.Generator().manual_seed(TASK_SEED)
        return {name: made.make(task, TASK_ROWS, length, generator) for name, (task, length) in tasks.EVALUATED.items()}

    def _losses(self, forward: Forward, facts: dict[str, Any]) -> dict[str, list[float]]:
        """Losses of every window by text; divergences and shares of right items go into `facts`."""
        import torch

        o, found, apart = self.o, {}, []
        with torch.no_grad():
            for name, ids in self.ids.items():
                scores = window_scores(forward, ids, o.length, o.windows, o.batch, self.logits.get(name))
                found[name], divergences, kept = scores
                self.logits.setdefault(name, kept)
                apart += divergences
            for name, rows in self.items.items():
                first = int(rows.answers.min()) - 1
                share = tasks.exact(forward(rows.tokens.to(self.device), first), rows, first)
                facts.setdefault("tasks", {})[name] = round(share, 4)
        if apart:
            facts["kl"] = round(statistics.fmean(apart), 6)
        return found

    def rows(self) -> None:
        """All rows, simulated and by kernels."""
        float_row = [(FLOAT, parse_row(FLOAT))] * (FLOAT not in dict(self.o.rows))
        for text, row in float_row + self.o.rows:
            for path in self.o.paths:
                if (path == "simulated" and text == FLOAT) or (path == "kernels" and row[0].endswith(ONLY)):
                    continue  # that is the base itself; no kernel does that
                if time.perf_counter() - self.start > self.o.budget:
                    print(f"{text:36} {path:10} left out: the budget is spent", flush=True)
                    continue
                self.row(text, row, path)

    def row(self, text: str, row: tuple[str, str, str], path: str) -> None:
        """One row, into the result."""
        began = time.perf_counter()
        facts = {"row": text, "weights": row[0], "k_format": row[1], "v_format": row[2], "path": path}
        make = simulated_forward if path == "simulated" else kernel_forward
        try:
            if CALIBRATED in row[0]:
                calibrated(self.folder, row[0], self.o.data / f"{CALIBRATION}.txt")
            losses = self._losses(make(self.folder, row, self.device), facts)
        except (
            RuntimeError,
            ValueError,
            subprocess.CalledProcessError,
        ) as error:  # of Terrazzo, or memory: it costs the row, not the run
            self.result["rows"].append(facts | {"failure": f"{type(error).__name__}: {str(error)[:300]}"})
            print(f"{text:36} {path:10} FAILED {' '.join(str(error).split())[:200]}", flush=True)
            return
        every, base = ([loss for n in losses for loss in found[n]] for found in (losses, self.base))
        by_text = {name: compare(losses[name], self.base[name]) for name in losses}
        found = facts | compare(every, base) | {"windows": len(every), "texts": by_text, "losses": losses}
        self.result["rows"].append(found)
        took = time.perf_counter() - began
        print(f"{text:36} {path:10} {found['ratio']:8.4f} +- {found['error']:.4f}  {took:6.1f} s", flush=True)
        self.write()

    def write(self) -> None:
        """The file, if there is a GPU or a name for it."""
        o, gpu = self.o, self.result["gpu"]
        out = o.out or (report.RESULTS / report.file_name(f"accuracy_{self.result['model']}", gpu))
        if o.out or self.device == "cuda":
            self.result["seconds"] = round(time.perf_counter() - self.start, 1)
            self.result["float"] |= {n: round(math.exp(statistics.fmean(x)), 4) for n, x in self.base.items()}
            out.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    o = arguments(argv)
    if o.compile_only:
        compile_rows(folder_of(o), [row for _, row in o.rows], o.batch, o.length)
        return 0
    run = Run(o)
    run.rows()
    failed = sum("failure" in row for row in run.result["rows"])
    print(f"{len(run.result['rows'])} rows, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
