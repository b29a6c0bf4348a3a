"""Our kernels inside vLLM beside its own: one configuration a run, joined in one file.

    python -m benchmarks.engine --weights w4a16 --kernel terrazzo --out engine.json
    python -m benchmarks.engine --weights w4a16 --kernel machete --out engine.json     the same file, another row
    python -m benchmarks.engine --weights w4a16 --compile-only                         our kernels, without vLLM
    python -m benchmarks.engine_table qwen2.5-7b --out engine.json                     a model's table in one run
    python -m benchmarks.engine --attention terrazzo --kv-cache-dtype int4_per_token_head --dtype bfloat16 \
        --cases 64x8192 64x1024 1x8192 --layers 16 --output 64 --out kv_engine.json    our cache, sequences x prompt
    python -m benchmarks.engine --join a.json b.json --out engine.json                 rows of several files in one
    python -m benchmarks.engine --table engine.json

A row is one batch: so many requests of `--prompt` random tokens at once, `--output` tokens each, greedy. `step_ms` is
the time of an output token after the last prefill: from the step in which the last request got its first token to the
one in which the first request has all of them, so that all are decoded together; `first_s` is the time until then.
`tokens_s` counts all output tokens over the whole time. All three are medians of the runs in `steps_ms`; `spread` is
what lies between the least and the most of these, over the median. Weights are random and the same for each kernel; the
cache of prefixes is off. A kernel is "terrazzo", or a `linear_backend` of vLLM; "auto" is what vLLM chooses without us,
and "moe_wna16" its Triton experts of AWQ and GPTQ models, with the linear layers of "auto".
`kv_tokens` is how many tokens the cache holds in the memory that the engine found free; a batch that needs more is not
timed, and its row says so. With `--profile`, `kernels_ms` says how many milliseconds of a step each kernel takes, and
`launches` the same of each size of launch, in a run of its own after all timings.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from terrazzo.lowering.errors import ArgumentError

from benchmarks import engine_model, report

BATCHES, PROMPT, OUTPUT, STEP_TOKENS = (1, 16, 64, 256), 1024, 256, 8192
GATE = "benchmarks.engine waits:"
WARM_BYTES = 1 << 30
"""Of a cache that is only there to start an engine."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=engine_model.SHAPES, default="llama-3-8b")
    parser.add_argument("--weights", choices=engine_model.QUANTIZATION, default="w4a16")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--kernel", default="terrazzo", help="terrazzo, auto, machete, marlin, humming, moe_wna16, ...")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--layers", type=int, help="of the model; its own unless given")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--cases", nargs="+", metavar="NxP", help="requests x prompt, in the place of both")
    parser.add_argument("--output", type=int, default=OUTPUT)
    parser.add_argument("--attention", choices=("vllm", "terrazzo"), default="vllm", help="whose backend")
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS, help="most tokens of a step")
    parser.add_argument("--repeat", type=int, default=2, help="runs of a batch")
    parser.add_argument("--spend", type=float, default=0.0, help="seconds of a batch's runs, which are more then")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no further batch is begun")
    parser.add_argument(
        "--profile", nargs="*", metavar="NxP", help="of these cases, or of all: where a step's time goes"
    )
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--compile-only", action="store_true", help="compile our kernels and stop")
    parser.add_argument("--bundle", help="folder with our kernels; nothing is compiled then")
    parser.add_argument("--warm", action="store_true", help="stop when the engine is ready: only its caches are filled")
    parser.add_argument(
        "--gates", action="store_true", help="wait for a line of stdin before the engine, and its timing"
    )
    parser.add_argument("--ranks", type=int, default=1, help="with --compile-only: GPUs that share the model")
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    parser.add_argument("--out", type=Path, help="file whose other rows are kept")
    parser.add_argument("--join", type=Path, nargs="+", help="files whose rows go to --out, and stop")
    parser.add_argument("--table", type=Path, help="print a file's rows and stop")
    return parser.parse_args(argv)


def cases(o: argparse.Namespace) -> list[tuple[int, int]]:
    """(requests, prompt) of each row."""
    if o.cases is None:
        return [(batch, o.prompt) for batch in o.batch]
    return [(int(batch), int(prompt)) for batch, _, prompt in (case.partition("x") for case in o.cases)]


def gate(o: argparse.Namespace, name: str) -> None:
    """With --gates, say what comes next and wait until it may."""
    if o.gates:
        print(f"\n{GATE} {name}", flush=True)
        sys.stdin.readline()


def longest(o: argparse.Namespace) -> int:
    """Tokens of the longest sequence, and some more."""
    return max(prompt for _, prompt in cases(o)) + o.output + 16


def prefills(o: argparse.Namespace, batch: int, prompt: int) -> int:
    """Most steps until the last request has its first token, while others decode: one token each of a step's."""
    return -(-batch * prompt // max(1, o.step_tokens - batch)) + 1


def check(o: argparse.Namespace) -> None:
    """All requests must be decoded together at some time.

    Raises:
        ArgumentError: the first one would have all its tokens before the last one has any.
    """
    for batch, prompt in cases(o):
        if o.output < (least := prefills(o, batch, prompt) + 8):
            constraint = f"must be at least {least} for {batch} requests of {prompt} tokens"
            raise ArgumentError("output", o.output, constraint, "name more, or more --step-tokens")


def attention_kind(o: argparse.Namespace) -> Any:
    """What our backend is asked for by the model's layers."""
    from terrazzo.integrations.engines.attention import PAGE, Kind
    from terrazzo.integrations.vllm.names import CACHES

    c = engine_model.SHAPES[o.shape]
    return Kind(
        CACHES.layout_of(o.kv_cache_dtype, o.dtype, c["head_dim"]), c["num_attention_heads"] // o.ranks,
        c["num_key_value_heads"] // o.ranks, PAGE, o.dtype,
    )  # fmt: skip


def wanted(o: argparse.Namespace) -> list[Any]:
    """What vLLM asks of the model's layers on each of `ranks` GPUs, as `integrations.engines` sees it."""
    from terrazzo.integrations.engines.weights import Wanted

    c = engine_model.SHAPES[o.shape]
    hidden, dim, heads, kv = (
        c[name] for name in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads")
    )
    experts = c.get("num_experts") or c.get("num_local_experts") or 0
    inner = c.get("moe_intermediate_size") or c["intermediate_size"]
    activations = {"w4a8": "int8", "w4a8-int": "int8", "w4a8-e4m3": "e4m3"}.get(o.weights, "16")
    weight = (
        "int4"
        if o.weights in ("w4a8-int", "w4a8-e4m3")
        else "uint4"
        if o.weights in ("awq", "w4a16-zeros")
        else "uint4b8"
    )
    rows, columns = (o.ranks, 1), (1, o.ranks)
    shapes = [((heads + 2 * kv) * dim, hidden, 0, rows), (hidden, heads * dim, 0, columns)]
    shapes += [(2 * inner, hidden, experts, rows), (hidden, inner, experts, columns)]
    group = lambda k: k if o.group == -1 else o.group
    return [
        Wanted(n // a, k // b, k, group(k), weight == "uint4", False, o.dtype, activations, weight, many)
        for n, k, many, (a, b) in shapes
    ]


def requests(o: argparse.Namespace, target: Any) -> list[Any]:
    """Every kernel of ours that an engine's steps launch."""
    from terrazzo.integrations.engines import kernels

    config = engine_model.SHAPES[o.shape]
    top_k, found = config.get("num_experts_per_tok", 1), {}
    if o.attention == "terrazzo":
        found |= dict.fromkeys(attention_kind(o).requests(target))
    for index, each in enumerate(wanted(o) if o.kernel == "terrazzo" else ()):
        many = top_k if each.experts else 1
        for bias in (False, True) if not index and config["model_type"] == "qwen2" else (False,):
            own = (each, not each.zero_points, bias, o.step_tokens, target, many)
            found |= dict.fromkeys(kernels.requests_of(*own))
        if each.experts:
            gates = (each.k, each.operator, "silu", o.dtype, o.step_tokens * top_k, target)
            found |= dict.fromkeys(kernels.gate_requests(*gates))
    return list(found)


def compile_kernels(found: list[Any], bundle: str | None = None) -> int:
    """Into the cache, and into a bundle if one is named; how many failed."""
    from terrazzo.lowering.bundle import write_bundle
    from terrazzo.lowering.parallel import compile_many

    start, found = time.perf_counter(), list(dict.fromkeys(found))
    failed = {str(e)[:300] for e in compile_many(found) if isinstance(e, Exception)}
    print(f"{len(found)} kernels in {time.perf_counter() - start:.0f} s", *failed, sep="\n", flush=True)
    if bundle is not None and not failed:
        write_bundle(bundle, found, replace=True)
    return len(failed)


def compiled_for() -> list[Any]:
    """The GPU that is here, else an H100 and an H200: a bundle is for both, and they take other schedules."""
    import torch
    from terrazzo.lowering.targets import Target

    names = ("nvidia/nvidia-h100", "nvidia/nvidia-h200")
    return [Target.detect()] if torch.cuda.is_available() else [Target.parse(name) for name in names]


def engine(o: argparse.Namespace, folder: Path) -> Any:
    """vLLM's LLM of a folder that has a config alone."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    ours: dict[str, Any] = dict(linear=o.kernel == "terrazzo", experts=o.kernel == "terrazzo")
    if o.bundle is not None:
        ours |= dict(bundle=o.bundle, strict=True)
    if o.kernel == "terrazzo" or o.attention == "terrazzo":
        from terrazzo.integrations.vllm import register

        register()
    else:
        os.environ["VLLM_PLUGINS"] = ""
    from vllm import LLM

    gate(o, "engine")
    batches = {batch for batch, _ in cases(o)}
    options: dict[str, Any] = dict(
        model=str(folder), load_format=engine_model.register_loader(), skip_tokenizer_init=True, dtype=o.dtype, seed=0,
        max_model_len=longest(o), max_num_batched_tokens=o.step_tokens,
        max_num_seqs=max(batches), additional_config={"terrazzo": ours},
        gpu_memory_utilization=o.memory, enforce_eager=o.eager, kv_cache_dtype=o.kv_cache_dtype,
        enable_prefix_caching=False,
    )  # fmt: skip
    if o.warm:
        options |= dict(gpu_memory_utilization=0.02, kv_cache_memory_bytes=WARM_BYTES)
    if not o.eager:
        options["compilation_config"] = {"cudagraph_capture_sizes": sorted({1, *batches})}
    if o.kernel == "moe_wna16":
        options["quantization"] = o.kernel
    elif o.kernel not in ("terrazzo", "auto"):
        options["linear_backend"] = o.kernel
    if o.attention == "terrazzo":
        options["attention_backend"] = "CUSTOM"
    return LLM(**options)


def chosen(model: Any) -> dict[str, int]:
    """Class that multiplies -> layers."""
    found: dict[str, int] = {}
    for layer in model.modules():
        if (method := getattr(layer, "quant_method", None)) is not None:
            holder = getattr(layer, "scheme", None) or method
            name = type(getattr(holder, "kernel", None) or holder).__name__
            found[name] = found.get(name, 0) + 1
        if (impl := getattr(layer, "impl", None)) is not None:
            name = f"{type(impl).__module__}.{type(impl).__name__}"
            found[name] = found.get(name, 0) + 1
    return found


def generate(
    llm: Any, o: argparse.Namespace, batch: int, length_of: int, tokens: int, tag: str, profiler: Any = None
) -> dict[str, Any]:
    """One run of a batch, step by step; a profiler sees what comes after the last prefill."""
    from vllm import SamplingParams

    vocabulary = engine_model.SHAPES[o.shape]["vocab_size"]
    rng, core = random.Random(0), llm.llm_engine
    how = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    start = time.perf_counter()
    for index in range(batch):
        prompt = dict(prompt_token_ids=[rng.randrange(3, vocabulary) for _ in range(length_of)])
        core.add_request(f"{tag}-{index}", prompt, how)
    texts: dict[str, list[int]] = {}
    first = done = None
    most = tokens
    while core.has_unfinished_requests():
        outs = core.step()
        texts |= {out.request_id: list(out.outputs[0].token_ids) for out in outs}
        if first is None and len(texts) == batch:
            first, most = time.perf_counter(), max(map(len, texts.values()))
            if profiler is not None:
                profiler.start()
        if first is not None and done is None and any(out.finished for out in outs):
            done = time.perf_counter()
            if profiler is not None:
                profiler.stop()
    end = time.perf_counter()
    ordered = [texts[f"{tag}-{index}"] for index in range(batch)]
    assert [len(each) for each in ordered] == [tokens] * batch
    steps = tokens - most
    each = (done - first) / steps * 1e3 if steps else None
    return dict(seconds=end - start, first_s=first - start, step_ms=each, steps=steps, tokens=ordered)


def shares(events: list[tuple[str, float]], steps: int, most: int = 12) -> dict[str, float]:
    """Milliseconds of a step in each kernel, of (name, microseconds) of `steps` steps; the longest ones by name."""
    found: dict[str, float] = {}
    for name, spent in events:
        found[name[:120]] = found.get(name[:120], 0.0) + spent / steps / 1e3
    ordered = sorted(found.items(), key=lambda pair: -pair[1])
    rest = dict(others=sum(spent for _, spent in ordered[most:])) if len(ordered) > most else {}
    return {name: round(spent, 4) for name, spent in [*ordered[:most], *rest.items()]}


def launches(events: list[dict[str, Any]], steps: int) -> list[list[Any]]:
    """[name, grid, threads, registers, launches of a step, microseconds of one] of a trace's kernels, in the order in
    which they first come: all of ours have one name, and sizes tell them apart."""
    found: dict[tuple, list[float]] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        args = event["args"]
        size = (args.get("grid"), math.prod(args.get("block", ())), args.get("registers per thread"))
        found.setdefault((event["name"][:60], str(size[0]), *size[1:]), []).append(event["dur"])
    return [[*key, round(len(us) / steps, 2), round(sum(us) / len(us), 2)] for key, us in found.items()]


def explain(llm: Any, o: argparse.Namespace, row: dict[str, Any]) -> None:
    """Where a step's time goes, into its row: after all timings, which a profiler would slow down."""
    import torch

    tokens = prefills(o, row["batch"], row["prompt"]) + 12
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    batch, prompt = row["batch"], row["prompt"]
    steps = generate(llm, o, batch, prompt, tokens, f"profile{batch}x{prompt}", profiler)["steps"]
    with tempfile.TemporaryDirectory() as scratch:
        profiler.export_chrome_trace(f"{scratch}/trace.json")
        events = json.loads(Path(scratch, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    events = [event for event in events if event.get("cat") == "kernel"]
    row["kernels_ms"] = shares([(event["name"], event["dur"]) for event in events], steps)
    row["launches"] = launches(events, steps)
    busy = sum(row["kernels_ms"].values())
    print(f"{batch:4d} x {prompt}: kernels {busy:.3f} ms of a step: {row['kernels_ms']}", flush=True)


def run(o: argparse.Namespace) -> int:
    began = time.perf_counter()
    if o.table is not None:
        return table(o.table)
    if o.join is not None:
        return join([json.loads(path.read_text(encoding="utf-8")) for path in o.join], o.out)
    if o.compile_only:
        return min(1, compile_kernels([r for each in compiled_for() for r in requests(o, each)], o.bundle))
    check(o)
    name = f"terrazzo-{o.shape}-{o.weights}-{o.kv_cache_dtype}-{o.layers}"  # vLLM finds its compile cache by it, too
    folder = Path(os.environ.get("VLLM_CACHE_ROOT", tempfile.gettempdir()), name)
    llm = engine(o, engine_model.write_config(folder, o.shape, o.weights, o.group, o.dtype, o.layers, longest(o)))
    import vllm
    from terrazzo.autotune import gemm_bench
    from terrazzo.lowering.targets import Target

    if o.warm:
        return 0
    facts = dict(used=llm.apply_model(chosen)[0], ready_s=round(time.perf_counter() - began, 1))
    print(f"vllm {vllm.__version__}; ready in {facts['ready_s']:.0f} s; {facts['used']}", flush=True)
    gate(o, "timing")
    result = gemm_bench.header(Target.detect(), o.commit) | dict(vllm=vllm.__version__, rows=[])
    for batch, prompt in cases(o):
        if time.perf_counter() - began > o.budget:
            print(f"batch {batch}: no time left")
            break
        result["rows"].append(measured(llm, o, batch, prompt) | facts)
        if o.out is not None:
            write(o.out, result)
    explained = o.profile or [f"{batch}x{prompt}" for batch, prompt in cases(o)] if o.profile is not None else ()
    for row in result["rows"]:
        named = f"{row['batch']}x{row['prompt']}" in explained and "step_ms" in row
        if named and time.perf_counter() - began < o.budget:
            explain(llm, o, row)
            if o.out is not None:
                write(o.out, result)
    return 0


def configured(o: argparse.Namespace) -> dict[str, Any]:
    """What all rows of a run have alike."""
    return dict(
        shape=o.shape, layers=o.layers or engine_model.SHAPES[o.shape]["num_hidden_layers"], weights=o.weights,
        group=o.group, dtype=o.dtype, kv=o.kv_cache_dtype, kernel=o.kernel, output=o.output, attention=o.attention,
        eager=o.eager,
    )  # fmt: skip


def measured(llm: Any, o: argparse.Namespace, batch: int, prompt: int) -> dict[str, Any]:
    """The row of a case; `failure` where the cache has no room for it."""
    cache = llm.llm_engine.vllm_config.cache_config
    held = (cache.num_gpu_blocks or 0) * cache.block_size
    row = configured(o) | dict(batch=batch, prompt=prompt, page=cache.block_size, kv_tokens=held)
    if held < (needed := batch * (prompt + o.output)):
        print(f"{batch:4d} x {prompt}: {held} tokens find room, {needed} are needed", flush=True)
        return row | dict(failure=f"{held} tokens find room, {needed} are needed")
    short = min(prompt, 2 * o.step_tokens // batch)  # a full step of prefills, and decodes of the batch
    generate(llm, o, batch, short, prefills(o, batch, short) + 3, f"warm{batch}x{prompt}")
    runs: list[dict[str, Any]] = []
    while len(runs) < o.repeat or sum(each["seconds"] for each in runs) < o.spend:
        runs.append(generate(llm, o, batch, prompt, o.output, f"{batch}x{prompt}-{len(runs)}"))
    median = lambda name: statistics.median(each[name] for each in runs)
    steps = [round(each["step_ms"], 4) for each in runs]
    row |= dict(
        step_ms=round(median("step_ms"), 4), steps_ms=steps, repeats=len(runs), first_s=round(median("first_s"), 4),
        spread=round((max(steps) - min(steps)) / statistics.median(steps), 4),
        tokens_s=round(batch * o.output / median("seconds"), 1),
    )  # fmt: skip
    print(
        f"{batch:4d} x {prompt}: {row['step_ms']:.3f} ms a token, {row['tokens_s']:.0f} tokens/s, {held} tokens find "
        f"room, spread {row['spread']:.1%}",
        flush=True,
    )
    return row


KEY = ("shape", "layers", "weights", "group", "dtype", "kv", "kernel", "batch", "prompt", "output", "eager")


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What one row of a file is told from others by."""
    return (*(row[name] for name in KEY), row.get("attention", "vllm"))


def write(out: Path, result: dict[str, Any]) -> None:
    """The file with these rows in the place of equal ones, and all others that it has."""
    mine = {key(row) for row in result["rows"]}
    old = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.exists() else []
    rows = sorted([*(row for row in old if key(row) not in mine), *result["rows"]], key=lambda row: str(key(row)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result | dict(rows=rows), indent=1) + "\n", encoding="utf-8")


def join(parts: list[dict[str, Any]], out: Path | None) -> int:
    """Rows of runs that belong beside each other: of weights, or, where one of them has a cache of ours, of caches."""
    rows = [row for part in parts for row in part["rows"]]
    of_cache = any(row.get("attention") == "terrazzo" or row["kv"] != "auto" for row in rows)
    for part in parts:
        for row in part["rows"]:  # a file's own commit is that of the last part
            row.setdefault("commit", part.get("commit"))
        write(out or report.RESULTS / report.file_name("kv_engine" if of_cache else "engine", part["gpu"]), part)
    return 0


def table(path: Path) -> int:
    """Rows of a file, kernels beside each other."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for row in sorted(rows, key=lambda row: (row["shape"], row["weights"], row["batch"], row["step_ms"])):
        print(
            f"{row['shape']} x{row['layers']} {row['weights']:12s} kv {row['kv']:8s} {row['batch']:4d} requests "
            f"{row['kernel']:9s} attention {row.get('attention', 'vllm'):8s} {row['step_ms']:8.3f} ms "
            f"{row['tokens_s']:9.0f} tokens/s"
        )
    return 0


def main(argv: list[str] | None = None) -> int:
    o = arguments(argv)
    alone = not (o.gates or o.warm)
    try:
        code = report.guarded("benchmarks.engine", lambda: run(o))
    except Exception:  # os._exit ends before the interpreter would show it
        if alone:
            raise
        traceback.print_exc()
        code = 1
    if not alone:  # everything is written, and an engine takes seconds to end
        sys.stdout.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
