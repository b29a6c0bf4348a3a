"""Tables of result files that are no grid of layers and numbers of tokens. No torch here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any

from benchmarks import report

HASH = re.compile(r"\b([0-9a-f]{7})[0-9a-f]{33}\b")
"""A commit; prose has its beginning, the file of results all of it."""


def setting(result: Mapping[str, Any], source: str) -> str:
    """Where, when and with what a file was measured, and what is to be known of it."""
    notes = "".join(f" {note}." for note in result.get("notes", ()))
    copies = f"copies reach {result['copy_gb_s']:.0f} GB/s, " if result.get("copy_gb_s") else ""
    gpus = f"{result['gpus']} of" if result.get("gpus", 1) > 1 else "one"
    where = f"on {gpus} {result['gpu']}, {copies}torch {result['torch']}, {result['date']}, commit {result['commit']}"
    lost = " (in no history)" * bool(report.lost(result))
    return f"{_short(where)}{report.lost(result)}{lost}. Source: [{source}]({source}).{_short(notes)}"


def _short(text: str) -> str:
    return HASH.sub(r"\1", text)


def decode(result: Mapping[str, Any], source: str) -> str:
    """Decode attention: formats by cache shapes, time and ratio to the fastest other attention; times of packages."""
    page = min(row["page"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["us"] and row["page"] == page]
    shape = lambda row: (
        f"{row['batch']} x {row['q_heads']}/{row['kv_heads']} x {row['kv_len'] // 1024}K"
        f"{', q_len ' + str(row['q_len']) if row['q_len'] > 1 else ''}"
    )
    formats = list(dict.fromkeys(f"{row['k_format']}/{row['v_format']}" for row in rows))
    packages = sorted({name for row in rows for name in row["peers"] if not name.startswith("sdpa_")})
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        best = min(row["peers"].values()) if row["peers"] else None
        text = f"{row['us']:.1f}" + (f" ({best / row['us']:.2f}x)" if best else "")
        cells = lines.setdefault(shape(row), {})
        cells[f"{row['k_format']}/{row['v_format']}"] = text
        cells |= {name: f"{us:.1f}" for name, us in row["peers"].items() if name in packages}
    columns = (*formats, *packages)
    table = report.markdown(
        ("batch x heads x tokens", *(f"`{name}`" for name in columns)),
        [(name, *(cells.get(f, "") for f in columns)) for name, cells in lines.items()],
        range(1, 1 + len(columns)),
    )
    where = f" in pages of {page} tokens" if page else ""
    beside = "the fastest f16 attention of torch (flash or cuDNN)"
    if packages:
        beside = "the fastest other attention, of torch in f16 or of a package (times on the right),"
    return (
        f"Decode attention{where}, keys/values by format: microseconds, and how many times as fast as {beside} in the "
        f"same run, {setting(result, source)}\n\n{table}"
    )


def ragged(result: Mapping[str, Any], source: str) -> str:
    """Decode attention of ragged batches: time, that with as many splits for each sequence, ratio to torch's; or, where
    it was measured, that of sequences with new tokens of their own number."""
    own = any("own_us" in row for row in result["rows"])
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in (row for row in result["rows"] if row["us"]):
        best = min(row["peers"].values()) if row["peers"] else None
        text = f"{row['us']:.1f}, {row['even']:.1f}" + (f" ({best / row['us']:.2f}x)" if best else "")
        text += f", {row['own_us']:.1f}" if "own_us" in row else ""
        name = f"{row['batch']}{', q_len ' + str(row['q_len']) if row['q_len'] > 1 else ''}"
        place = name, str(row["mean"]), str(row["longest"])
        lines.setdefault(place, {})[f"{row['k_format']}/{row['v_format']}"] = text
    formats = list(dict.fromkeys(name for cells in lines.values() for name in cells))
    table = report.markdown(
        ("sequences", "mean length", "longest", *(f"`{name}`" for name in formats)),
        [(*place, *(cells.get(f, "") for f in formats)) for place, cells in lines.items()],
        range(1, 3 + len(formats)),
    )
    heads = ", ".join(dict.fromkeys(f"{row['q_heads']}/{row['kv_heads']}" for row in result["rows"]))
    page = f"pages of {result['rows'][0]['page']} tokens"
    last = "how many times as fast as torch's flash attention over such a batch (f16, one split for each sequence)"
    if own:
        last = "where the sequences of a batch have 1 to q_len new tokens in turn (`cu_seqlens`)"
    return (
        f"Decode attention of different lengths in a batch, {heads} heads, {page}, "
        "keys/values by format: microseconds with `mean_length` known, with as many splits for every sequence, and "
        f"{last}, {setting(result, source)} What the names of batches say: benchmarks/attention_ragged.py.\n\n{table}"
    )


def prefill(result: Mapping[str, Any], source: str) -> str:
    """Prefill attention: TFLOP/s and ratios to the fastest attention in f16 and, where it ran, in fp8."""
    every = {peer for row in result["rows"] for peer in row.get("peers") or ()}
    packages = any(not peer.startswith("sdpa_") for peer in every)
    columns = {f"over {'' if packages else 'torch '}f16": lambda peer: "fp8" not in peer}
    columns |= {"over fp8": lambda peer: "fp8" in peer} if any("fp8" in peer for peer in every) else {}
    lines = []
    for row in (row for row in result["rows"] if row["us"]):
        past = row["kv_len"] - row["new"]
        peers = row.get("peers") or {}
        best = [min((us for peer, us in peers.items() if of(peer)), default=None) for of in columns.values()]
        after = f" after {past}" if past else ""
        lines.append((
            f"{row['batch']} x {row['q_heads']}/{row['kv_heads']}, {row['new']} new{after}",
            f"`{row['k_format']}/{row['v_format']}`", row["mode"], f"{row['us']:.0f}", f"{row['tflops']:.0f}",
            *(f"{us / row['us']:.2f}x" if us else "" for us in best),
        ))  # fmt: skip
    heads = ("prompt", "keys/values", "new tokens", "us", "TFLOP/s", *columns)
    beside = "the fastest other attention, of torch or of a package" if packages else "torch's fastest f16 attention"
    table = report.markdown(heads, lines, range(3, len(heads)))
    return f"Prefill attention, causal, and {beside}, {setting(result, source)}\n\n{table}"


def grouped(result: Mapping[str, Any], source: str) -> str:
    """Grouped GEMM: time, share of the copy bandwidth, ratios to torch's bf16 grouped product and vLLM's experts, or
    to other ways to compute experts that are packed for another target."""
    rivals = {"torch_bf16": "over torch bf16", "vllm_marlin": "over Marlin", "humming": "over humming, indexed"}
    rivals |= {"humming_grouped": "over humming, grouped", "vllm_triton": "over vLLM's Triton"}
    rivals |= {"each_us": "over a gemm each"}
    rivals |= {"native_us": "over experts packed for this GPU", "dense_us": "over one weight"}
    packed_for = {row["packed_for"] for row in result["rows"] if "packed_for" in row}
    what = "Grouped GEMM (MoE) and torch's grouped bf16 product"
    if any("dense_us" in row for row in result["rows"]):
        what = "Grouped GEMM (MoE) and one weight of all experts' rows, with the tokens of one expert"
    if packed_for:
        what = f"Grouped GEMM of experts packed for {' and '.join(sorted(packed_for))}"
    rivals = {key: said for key, said in rivals.items() if any(row.get(key) for row in result["rows"])}
    lines = [
        (
            row["layer"], row["m"], f"`{row['op']}`", f"{row['us']:.1f}", f"{row['copy_share']:.0%}",
            *(f"{row[key] / row['us']:.2f}x" if row.get(key) else "" for key in rivals),
        )
        for row in result["rows"]
        if row["us"]
    ]  # fmt: skip
    heads = ("layer", "rows", "operator", "us", "of copy", *rivals.values())
    table = report.markdown(heads, lines, (1, *range(3, len(heads))))
    return f"{what}, {setting(result, source)}\n\n{table}"


def written(result: Mapping[str, Any], source: str) -> str:
    """What an append adds to a decode step, and packing a prompt compared with copying its bytes."""
    stored, steps, kinds = [], {}, []
    for row in (row for row in result["rows"] if row.get("us")):
        formats = f"`{row['k_format']}/{row['v_format']}`"
        if "kind" in row:
            kinds.append(row["kind"])
            place = f"{row['batch']} x {row['q_heads']}/{row['kv_heads']} x {row['kv_len'] // 1024}K"
            steps.setdefault((formats, place), {})[row["kind"]] = f"{row['decode_us']:.1f} + {row['added']:.0%}"
        else:
            stored.append(f"{formats} {row['of_copy_time']:.2f}")
    names = list(dict.fromkeys(kinds))
    lines = [(*place, *(cells.get(name, "") for name in names)) for place, cells in steps.items()]
    table = report.markdown(("keys/values", "batch x heads x tokens", *names), lines, range(2, 2 + len(names)))
    packing = f" A prompt of 128K tokens is packed in {', '.join(stored)} of the time to copy it." if stored else ""
    return (
        "A decode step in microseconds, and what the append of its token adds, where it completes nothing (plain), "
        "where it fills the residual block of every sequence (full), and over a block of steps (mean), "
        f"{setting(result, source)}{packing}\n\n{table}"
    )


ESTIMATES = {
    "w4a16-g128/float16": ((1, 1024, 2.44), (1, 8192, 2.75), (16, 1024, 3.16), (16, 8192, 8.09), (64, 1024, 5.69),
                           (64, 8192, 25.41)),
    "w4a16-g128/int4": ((1, 1024, 2.41), (1, 8192, 2.49), (16, 1024, 2.64), (16, 8192, 3.95), (64, 1024, 3.62),
                        (64, 8192, 8.86)),
    "w4a8-g64/int4": ((1, 1024, 2.34), (1, 8192, 2.42), (16, 1024, 2.51), (16, 8192, 3.82), (64, 1024, 3.20),
                      (64, 8192, 8.43)),
}  # fmt: skip
"""Weights and cache -> batch, context, and ms of a step on an H100 as estimated before the kernels between products
were written: measured products and attention, 2 us for each of four small kernels of a layer."""


def estimate(row: Mapping[str, Any]) -> float | None:
    """Of a row's `ms`; None where there is none."""
    known = {f"{batch}x{context}:{kind}": ms for kind, made in ESTIMATES.items() for batch, context, ms in made}
    return known.get(row["row"]) if row["layers"] == 32 else None


def decode_step(result: Mapping[str, Any], source: str) -> str:
    """A decode step of a whole model: time, floor by bytes, its parts, and transformers' own step."""
    rows = [row for row in result["rows"] if row["ms"]]
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    products = ("qkv", "o", "gate_up", "down")
    share = lambda row, *parts: f"{sum(row['parts'].get(name, 0) for name in parts):.2f}" if row.get("parts") else ""
    head_of = lambda row: f", head `{row['head']}`" if row.get("head", "f16") != "f16" else ""
    beside = lambda row: f"{estimate(row):.2f} ({row['ms'] / estimate(row):.2f})" if estimate(row) else ""
    lines = [
        (
            f"{row['batch']} x {row['context']}" + (f", {row['new']} new" if row["new"] > 1 else ""),
            f"`{row['weights']}`", f"`{row['k_format']}/{row['v_format']}`" + head_of(row), f"{row['ms']:.2f}",
            f"{row['floor_ms']:.2f}", beside(row), share(row, *products),
            *(share(row, name) for name in ("quantize", "attention", "append", "head")),
            share(row, "norm", "gate", "rope", "glue"),
            *(f"{row['peers'][n]:.2f}" if n in row["peers"] else "" for n in names),
        )
        for row in sorted(rows, key=lambda row: (row["new"], row["batch"] * row["context"]))
    ]  # fmt: skip
    head = ("batch x context", "weights", "keys/values", "ms", "floor", "estimate", "products", "quantizers",
            "attention", "append", "head", "glue")  # fmt: skip
    table = report.markdown((*head, *(f"`{name}`" for name in names)), lines, range(3, len(head) + len(names)))
    layers = ", ".join(str(n) for n in dict.fromkeys(row["layers"] for row in rows))
    return (
        f"A decode step of a model of Llama-3-8B's shapes ({layers} layers, random weights, f16 head unless said), one "
        "CUDA graph: milliseconds, its bytes' at the copy's speed, an estimate made before the kernels between "
        "products were written and in brackets the time over it, parts measured alone (glue is the rest: norms, "
        "rotations, gates, what launches cost), and transformers' f16 step with a static cache, "
        f"{setting(result, source)}\n\n{table}"
    )


def tensor_parallel(result: Mapping[str, Any], source: str) -> str:
    """Layers of Llama-3-70B on several GPUs and on one: products, all-reduces, steps."""
    shown = lambda one, many: f"{one:.2f} -> {many:.2f} ({many / one:.2f})"
    lines = [
        (
            f"`{row['weights']}`", str(row["batch"]), str(row["world"]),
            shown(row["products_one_80_ms"], row["products_80_ms"]), f"{row['all_reduce_80_ms']:.2f}",
            shown(row["step_one_80_ms"], row["step_80_ms"]),
        )
        for row in result["rows"]
        if "failure" not in row
    ]  # fmt: skip
    head = ("weights", "batch", "GPUs", "products", "all-reduces", "step")
    layers = ", ".join(str(n) for n in dict.fromkeys(row["layers"] for row in result["rows"]))
    return (
        f"The 80 layers of Llama-3-70B on several GPUs and on one: {layers} layers were timed, and the figures are "
        "theirs times 80 over that. Milliseconds on one GPU, on all, and the ratio. All-reduces by themselves are "
        f"NCCL's, two a layer. A step has no embedding and no head, {setting(result, source)}\n\n"
        f"{report.markdown(head, lines, range(1, len(head)))}"
    )


def accuracy(result: Mapping[str, Any], source: str) -> str:
    """Perplexity over the float model's, of kernels and of a simulation of the same numbers."""
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in result["rows"]:
        if "failure" not in row:
            rows.setdefault(row["row"], {})[row["path"]] = row
    shown = lambda row: f"{row['ratio']:.4f} ± {row['error']:.4f}" if row else ""
    lines = []
    for paths in rows.values():
        first = next(iter(paths.values()))
        formats = f"`{first['k_format']}/{first['v_format']}`"
        pair = (shown(paths.get("kernels")), shown(paths.get("simulated")))
        weights = f"`{first['weights']}`".replace("@f16`", "`, f16 activations").replace("^", "`, head `")
        lines.append((weights, formats, *pair, first["windows"]))
    names = ", ".join(f"{name} {value:.1f}" for name, value in result["float"].items())
    table = report.markdown(("weights", "keys/values", "kernels", "simulated", "windows"), lines, range(2, 5))
    return (
        f"Perplexity of {result['model']} over that of the float16 model ({names}), windows of {result['length']} "
        f"tokens that overlap by half, paired, with its standard error, {setting(result, source)}\n\n{table}"
    )


def load_time(result: Mapping[str, Any], source: str) -> str:
    """Seconds from a packed folder to a model."""
    rows = [row for row in result["rows"] if row["seconds"]]
    lines = [
        (
            f"`{row['weights']}`", f"{row['bytes'] / 1e9:.2f}", f"{row['seconds']:.2f}", f"{row['gb_s']:.1f}",
            f"{row['import_seconds']:.1f}", f"{row['peak_gb'] - row['model_gb']:.3f}",
        )
        for row in rows
    ]  # fmt: skip
    head = ("weights", "GB", "seconds", "GB/s", "before it", "GB over the model")
    layers = ", ".join(str(n) for n in dict.fromkeys(row["layers"] for row in rows))
    return (
        f"`terrazzo.load` of a packed folder of Llama-3-8B's shapes ({layers} layers) from a warm disk, in a new "
        "process: seconds, those before it (Python, torch, transformers, the CUDA context), and the most GPU memory "
        f"that was held over the model, {setting(result, source)}\n\n{report.markdown(head, lines, range(1, 6))}"
    )


FEW, OVER_EMPTY_US, MANY, OF_COPY = 16, 0.4, 1024, 1.10
"""What kernels between products are to reach, with few rows and with many."""


def layer_kernels(result: Mapping[str, Any], source: str) -> str:
    """Kernels between products: over an empty kernel where rows are few, over a copy of the same bytes elsewhere."""
    rows = [row for row in result["rows"] if row["us"]]
    ms = sorted({row["m"] for row in rows})
    places = list(dict.fromkeys((row["kernel"], row["quant"], row["k"]) for row in rows))
    at = {(row["kernel"], row["quant"], row["k"], row["m"]): row for row in rows}

    def cell(row: Mapping[str, Any] | None) -> str:
        if row is None:
            return ""
        said = f"{row['over_empty_us']:+.2f} us" if row["resident"] else f"{row['of_copy']:.2f}"
        ratios = [
            f"{name} {row['peers'][name] / row['us']:.1f}x" for name in ("separate", "vllm") if name in row["peers"]
        ]
        return said + (f" ({', '.join(ratios)})" if ratios else "")

    few, many = ([row for row in rows if test(row["m"])] for test in (lambda m: m <= FEW, lambda m: m >= MANY))
    kept = sum(row["over_empty_us"] <= OVER_EMPTY_US for row in few), sum(row["of_copy"] <= OF_COPY for row in many)
    named = {"norm": "sum, RMSNorm", "act": "silu(gate) * up"}
    lines = [(named[p[0]], f"`{p[1]}`", p[2], *(cell(at.get((*p, m))) for m in ms)) for p in places]
    table = report.markdown(("kernel", "codes", "K", *(f"{m} rows" for m in ms)), lines, range(2, 3 + len(ms)))
    return (
        "Kernels between a layer's products: with few rows, which stay in L2, microseconds over an empty kernel in a "
        "chain; with many, time over a copy of the same bytes. Then the time of `separate` kernels of this "
        f"library and of vLLM's, over ours, {setting(result, source)} The aims: up to {FEW} rows at most "
        f"{OVER_EMPTY_US} us over an empty kernel, which {kept[0]} of {len(few)} cases reach; from {MANY} rows on at "
        f"most {OF_COPY:.2f} of a copy's time, which {kept[1]} of {len(many)} reach.\n\n{table}"
    )


def engine(result: Mapping[str, Any], source: str) -> str:
    """Time of an output token inside vLLM by kernels; what products gain, and what the engine does."""
    rows: dict[tuple, dict[str, Mapping[str, Any]]] = {}
    for row in result["rows"]:
        key = (row["shape"], row["layers"], row["weights"], row["kv"], row["batch"])
        rows.setdefault(key, {})[row["kernel"]] = row
    peers = sorted({row["kernel"] for row in result["rows"]} - {"terrazzo"})
    lines = []
    for (shape, layers, weights, kv, batch), found in sorted(rows.items()):
        ours = found.get("terrazzo")
        cells = [f"{ours['step_ms']:.2f} ({ours['tokens_s']:.0f})" if ours else ""]
        for peer in peers:
            row = found.get(peer)
            faster = f", {row['step_ms'] / ours['step_ms']:.2f}x" if row and ours else ""
            cells.append(f"{row['step_ms']:.2f} ({row['tokens_s']:.0f}){faster}" if row else "")
        lines.append((f"`{shape}`, {layers} layers", f"`{weights}`", f"`{kv}`", str(batch), *cells))
    first = result["rows"][0]
    text = (
        f"vLLM {result['vllm']}, prompts of {first['prompt']} tokens, {first['output']} new ones: milliseconds of an "
        f"output token after the last prefill, in brackets tokens/s from end to end, then how many times as fast ours "
        f"is, {setting(result, source)}"
    )
    head = ("model", "weights", "cache", "requests", "terrazzo", *peers)
    return text + "\n\n" + report.markdown(head, lines) + gains(result) + step_parts(result)


PLAIN = ("w4a16", "gptq")
"""Weights of 4 bits with activations of 16, which activations of 8 bits are compared with."""


def gains(result: Mapping[str, Any]) -> str:
    """How many times as fast products, a step and whole requests are, of ours over each other configuration of the
    same batches; "" where nothing stands next to ours."""
    place = lambda row: [row[name] for name in ("shape", "layers", "kv", "batch", "prompt", "output")]
    lines = []
    ordered = sorted(result["rows"], key=lambda row: (row["shape"], row["weights"], row["batch"], row["kernel"]))
    for ours in (row for row in ordered if row["kernel"] == "terrazzo"):
        for peer in (row for row in ordered if place(row) == place(ours)):
            fewer = ours["weights"] not in PLAIN and peer["weights"] in PLAIN and peer["kernel"] == "terrazzo"
            if not fewer and (peer["weights"] != ours["weights"] or peer is ours):
                continue
            beside = f"ours, `{peer['weights']}`" if fewer else peer["kernel"]
            spent = [parts(row)["products"] for row in (peer, ours) if "kernels_ms" in row]
            products = f"{spent[1]:.2f}, {spent[0] / spent[1]:.2f}x" if len(spent) == 2 else ""
            step, whole = peer["step_ms"] / ours["step_ms"], ours["tokens_s"] / peer["tokens_s"]
            where = (f"`{ours['shape']}`", f"`{ours['weights']}`", str(ours["batch"]), beside)
            lines.append((*where, products, f"{step:.2f}x", f"{whole:.2f}x"))
    if not lines:
        return ""
    head = ("model", "weights", "requests", "compared with", "products", "output token", "tokens/s")
    said = "What kernels gain, and what is left of it in the engine: "
    if any(products for *_, products, _, _ in lines):
        said += "milliseconds of our products in a step, and ratios."
    else:  # no row was profiled
        head, lines, said = (*head[:4], *head[5:]), [(*line[:4], *line[5:]) for line in lines], f"{said}ratios."
    return f"\n\n{said}\n\n{report.markdown(head, lines)}"


SERVED = {"none": "bfloat16", "fp8": "FP8 W8A8", "awq": "W4A16 (AWQ)", "w4a8": "W4A8 int8"}
"""Weights of a served model -> what a reader knows them by, in the order of the table."""


def served_table(result: Mapping[str, Any]) -> str:
    """Configurations below each other: milliseconds of an output token, tokens/s from end to end, room for tokens."""
    rows, order = {}, list(SERVED)
    for row in result["rows"]:
        own = (row["kernel"] == "terrazzo", order.index(row["weights"]), row["kv"])
        rows.setdefault(own, {})[row["batch"], row["prompt"]] = row
    cases = sorted({case for found in rows.values() for case in found})
    said = lambda row: "no room" if "failure" in row else f"{row['step_ms']:.2f} ({row['tokens_s']:.0f})"
    lines = []
    for (ours, at, kv), found in sorted(rows.items()):
        cache = "bfloat16" if kv == "auto" else kv.removesuffix("_per_token_head")
        room = max(row["kv_tokens"] for row in found.values()) / 1e6
        cells = (said(found[case]) if case in found else "" for case in cases)
        lines.append((SERVED[order[at]], cache, "ours" if ours else "vLLM's", *cells, f"{room:.2f} million"))
    head = ("weights", "cache", "kernels", *(f"{batch} x {prompt}" for batch, prompt in cases), "room for tokens")
    return report.markdown(head, lines, range(3, 4 + len(cases)))


def served(result: Mapping[str, Any], source: str) -> str:
    """A model inside vLLM in the configurations that a server chooses among."""
    first, timed = result["rows"][0], [row for row in result["rows"] if "failure" not in row]
    repeats, spread = min(row["repeats"] for row in timed), max(row["spread"] for row in timed)
    text = (
        f"`{first['shape']}` in vLLM {result['vllm']}, {first['output']} new tokens, requests x tokens of a prompt: "
        f"milliseconds of an output token after the last prefill, in brackets tokens/s from end to end; medians of "
        f"{repeats} runs, which differ by up to {spread:.1%}; {setting(result, source)} "
        f"`python -m benchmarks.engine_table {first['shape']}` measures it."
    )
    return f"{text}\n\n{served_table(result)}"


def kv_engine(result: Mapping[str, Any], source: str) -> str:
    """Caches inside vLLM compared with each other: requests that find room, an output token, tokens/s; first tokens."""
    rows: dict[tuple, dict[str, dict[tuple[int, int], Mapping[str, Any]]]] = {}
    for row in result["rows"]:
        cache = f"{row['kv'].removesuffix('_per_token_head')}, {'ours' if row['attention'] == 'terrazzo' else 'vLLM'}"
        of_model = rows.setdefault((row["shape"], row["layers"], row["weights"]), {})
        of_model.setdefault(cache, {})[row["batch"], row["prompt"]] = row
    cases = sorted({(row["batch"], row["prompt"]) for row in result["rows"]}, reverse=True)
    longest = max(row["prompt"] + row["output"] for row in result["rows"])
    lines, firsts = [], []
    for (shape, layers, weights), caches in sorted(rows.items()):
        plain = caches.get("auto, vLLM", {})
        for cache in sorted(caches, key=lambda name: (name[-4:] == "ours", name)):
            found = caches[cache]
            cells, times = [], []
            for case in cases:
                row, beside = found.get(case), plain.get(case)
                step, first = (
                    f", {beside[name] / row[name]:.2f}x" if beside and row and row is not beside else ""
                    for name in ("step_ms", "first_s")
                )
                cells.append(f"{row['step_ms']:.2f}{step} ({row['tokens_s']:.0f})" if row else "")
                times.append(f"{row['first_s']:.3f}{first}" if row else "")
            place = (f"`{shape}`, {layers} layers", f"`{weights}`", cache)
            lines.append((*place, str(max(row["kv_tokens"] for row in found.values()) // longest), *cells))
            firsts.append((*place, *times))
    text = (
        f"vLLM {result['vllm']}, {result['rows'][0]['output']} new tokens, requests x tokens of a prompt: milliseconds "
        f"of an output token after the last prefill, then how many times as fast as vLLM's own cache in the model's "
        f"dtype, in brackets tokens/s from end to end; and how many requests of {longest} tokens find room, "
        f"{setting(result, source)}"
    )
    named = [f"{batch} x {prompt}" for batch, prompt in cases]
    table = report.markdown(("model", "weights", "cache", "room", *named), lines)
    prefills = "Seconds until the last request has its first token, in the same runs:"
    return "\n\n".join(
        (text, table, prefills, report.markdown(("model", "weights", "cache", *named), firsts))
    ) + step_parts(result)


PARTS = {
    "attention": ("flash", "prepare_varlen", "reshape_and_cache"),
    "products": ("machete", "marlin", "humming", "GemmUniversal", "quant", "fused_moe", "moe_wna16"),
    "head": ("nvjet", "gemm", "cublas", "splitK"),
}
"""Part of a step -> what names of vLLM's kernels have in them; ours are called main_kernel. The rest is neither, as are
Inductor's kernels, whose names tell what stands next to them."""


def part_of(row: Mapping[str, Any], name: str) -> str:
    """Of a step, that a kernel belongs to."""
    if name.startswith("main_kernel"):
        return "products" if row["kernel"] == "terrazzo" else "attention"
    if name.startswith("triton_"):
        return "others"
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), "others")


def parts(row: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of a step in each part of it, of a row that was profiled."""
    spent = dict.fromkeys((*PARTS, "others"), 0.0)
    for name, each in row["kernels_ms"].items():
        spent[part_of(row, name)] += each
    return spent


def step_parts(result: Mapping[str, Any]) -> str:
    """Where the step of each row went that was profiled, "" where none was."""
    lines = []
    order = lambda row: (row["shape"], row["weights"], row["kv"], row["kernel"], row["batch"] * row["prompt"])
    for row in sorted((row for row in result["rows"] if "kernels_ms" in row), key=order):
        spent = parts(row)
        idle = max(0.0, row["step_ms"] - sum(spent.values()))
        cache = f"{row['kv']}, {'ours' if row.get('attention') == 'terrazzo' else 'vLLM'}"
        place = (f"`{row['shape']}`", f"`{row['weights']}`", row["kernel"], cache, f"{row['batch']} x {row['prompt']}")
        lines.append((*place, f"{row['step_ms']:.2f}", *(f"{each:.2f}" for each in spent.values()), f"{idle:.2f}"))
    if not lines:
        return ""
    head = ("model", "weights", "products", "cache", "requests x prompt", "step", *PARTS, "others", "no kernel")
    said = "Where a step's milliseconds go, by a profiler in a run of its own; the head is the product with all words:"
    return f"\n\n{said}\n\n{report.markdown(head, lines)}"


def attention_codes(result: Mapping[str, Any], source: str) -> str:
    """Decode whose outputs leave as codes: alone, with codes, with a quantizer after it."""
    lines: dict[tuple, dict[str, str]] = {}
    for row in (row for row in result["rows"] if row["us"]):
        size = f"{row['batch']} x {row['q_heads']}/{row['kv_heads']} x {row['kv_len'] // 1024}K"
        place = f"{size}, q_len {row['q_len']}" if row["q_len"] > 1 else size
        behind = f", {row['behind']:.1f}" if row["behind"] else ""
        lines.setdefault((place,), {})[row["quant"]] = f"{row['plain']:.1f}, {row['us']:.1f}{behind}"
    forms = list(dict.fromkeys(form for cells in lines.values() for form in cells))
    table = report.markdown(
        ("batch x heads x tokens", *(f"`{form}`" for form in forms)),
        [(*place, *(cells.get(form, "") for form in forms)) for place, cells in lines.items()],
        range(1, 1 + len(forms)),
    )
    first = result["rows"][0]
    return (
        f"Decode attention, `{first['k_format']}/{first['v_format']}`, whose outputs leave as codes: microseconds "
        "without codes, with them, and without them but with the quantizer of W4A8 after it, "
        f"{setting(result, source)}\n\n{table}"
    )


def prefill_parts(result: Mapping[str, Any], source: str) -> str:
    """Prefill of short chunks over long pasts: one CTA for a tile of rows, and as many as the library takes."""
    lines: dict[tuple, dict[int | None, float]] = {}
    for row in (row for row in result["rows"] if row["us"]):
        size = f"{row['batch']} x {row['q_heads']}/{row['kv_heads']}"
        place = size, row["new"], row["kv_len"] - row["new"]
        lines.setdefault(place, {})[row["splits"]] = row["us"]
    both = [(place, us[1], us[None]) for place, us in lines.items() if {1, None} <= us.keys()]
    table = report.markdown(
        ("batch x heads", "new tokens", "past", "one part, us", "as chosen, us", "ratio"),
        [(*map(str, place), f"{one:.0f}", f"{auto:.0f}", f"{one / auto:.2f}x") for place, one, auto in both],
        range(1, 6),
    )
    first = result["rows"][0]
    return (
        f"Prefill of short chunks over long pasts, `{first['k_format']}/{first['v_format']}`, {first['mode']} tokens: "
        "microseconds where one CTA reads all tokens for a tile of rows, and where CTAs share them as was chosen then, "
        f"{setting(result, source)}\n\n{table}"
    )


Table = Callable[[Mapping[str, Any], str], str]
LAYERS: dict[str, Table] = {
    "layer_kernels_*.json": layer_kernels,
    "grouped_*.json": grouped,
}
"""Files in benchmarks/results -> what makes their table in docs/results.md. The longest name that fits counts."""
ATTENTION: dict[str, Table] = {
    "attention_*.json": decode,
    "attention_prefill_*.json": prefill,
    "attention_prefill_parts_*.json": prefill_parts,
    "attention_codes_*.json": attention_codes,
    "attention_write_*.json": written,
    "attention_ragged_*.json": ragged,
    "decode_batches_*.json": decode,
    "decode_rows_*.json": decode,
}
"""The same for docs/results-attention.md."""
MODELS: dict[str, Table] = {
    "decode_step_*.json": decode_step,
    "engine_*.json": engine,
    "kv_engine_*.json": kv_engine,
    "served_*.json": served,
    "accuracy_*.json": accuracy,
    "load_time_*.json": load_time,
    "tensor_parallel_*.json": tensor_parallel,
}
"""The same for docs/results-models.md."""


def owner(name: str) -> str | None:
    """The entry of LAYERS, ATTENTION or MODELS that a file belongs to."""
    return max((pattern for pattern in LAYERS | ATTENTION | MODELS if fnmatch(name, pattern)), key=len, default=None)
