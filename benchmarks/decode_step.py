"""A decode step of a model of Llama-3-8B's shapes, one CUDA graph, beside transformers' own f16 step.

    python -m benchmarks.decode_step                      every row; writes results/decode_step_<gpu>.json
    python -m benchmarks.decode_step --rows 1x1024:w4a16/float16,64x1024:w4a8-g64/int4 --budget 300
    python -m benchmarks.decode_step --rows p1x4096:w4a16/float16       a prefill of 4096 tokens
    python -m benchmarks.decode_step --peers none                       without transformers

A row is batch x context : weights / keys-values. Random weights, f16 embedding and head; the step is embedding, 32
layers, norm and logits of each sequence's newest token, the last of `context`. Kernels are compiled in parallel before
anything is measured, and the file is written after every row.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks import program, report
from benchmarks.peers import decode_step as peers

DEVICE = "cuda"
PAGE = 128
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4096, 14336, 32, 32, 8, 128, 128256
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SHAPES = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HEADS * HEAD_DIM), "gate_up": (2 * INTERMEDIATE, HIDDEN),
          "down": (HIDDEN, INTERMEDIATE)}  # fmt: skip
"""Products of a layer: (N, K)."""
BATCHES = ("1x1024", "16x1024", "64x1024", "64x8192")
KINDS = ("w4a16-g128/float16", "w4a16-g128/int4", "w4a8-g64/float16", "w4a8-g64/int4", "w4ax/int4")
PREFILLS = ("p1x4096:w4a16-g128/float16", "p1x4096:w4a8-g64/int4")
SPARE_BYTES = 6 << 30
"""Of the GPU that float weights of a layer take: with less, a row is measured without comparing its layers."""
LIMITS = {"w4a16": 0.03, "w4a8": 0.08, "w4a8-e4m3": 0.15, "w4ax": 0.5}
"""Family -> distance of two layers from the same in float weights that quantized activations explain, relative."""


@dataclass(frozen=True)
class Row:
    """What one row measures.

    Attributes:
        batch, context: sequences and their tokens, the newest included. weights: as `nn.Format.parse` reads it.
        k_format, v_format: of the cache. new: tokens of each sequence that a step adds.
        head: format of the head's weight.
    """

    batch: int
    context: int
    weights: str
    k_format: str
    v_format: str
    new: int = 1
    head: str = "f16"

    @staticmethod
    def parse(text: str) -> Row:
        """Of "64x1024:w4a16-g128/int4", "...:w4a8/int4_channel64+int4" for keys + values, "p1x4096:..." for prefill,
        "...@w4a16-g128" for a head in 4 bits."""
        found = re.fullmatch(r"(p?)(\d+)x(\d+):([\w-]+)/(\w+)(?:\+(\w+))?(?:@([\w-]+))?", text)
        if not found:
            raise argparse.ArgumentTypeError(f"{text}: write rows as 64x1024:w4a16-g128/int4")
        batch, context = int(found[2]), int(found[3])
        new = context if found[1] else 1
        return Row(batch, context, found[4], found[5], found[6] or found[5], new, found[7] or "f16")

    @property
    def place(self) -> tuple[int, int, int]:
        """What rows of other formats and peers share."""
        return self.batch, self.context, self.new

    def __str__(self) -> str:
        kv = self.k_format if self.k_format == self.v_format else f"{self.k_format}+{self.v_format}"
        head = "" if self.head == "f16" else f"@{self.head}"
        return f"{'p' * (self.new > 1)}{self.batch}x{self.context}:{self.weights}/{kv}{head}"


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode_step", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", help="comma-separated, as 64x1024:w4a16-g128/int4")
    parser.add_argument("--peers", default=",".join(peers.NAMES), help=f"of {', '.join(peers.NAMES)}; none")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model; another number for a short look")
    parser.add_argument("--quick", action="store_true", help="batches 1 and 64 in two formats, without parts")
    parser.add_argument("--no-parts", action="store_true", help="only whole steps")
    parser.add_argument("--budget", type=float, default=570.0, help="seconds after which no further row is begun")
    parser.add_argument("--budget-ms", type=float, default=60.0, help="GPU time of one measurement")
    parser.add_argument("--append", action="store_true", help="keep what the file has of other rows")
    parser.add_argument("--only-peers", action="store_true", help="measure peers for the rows that the file has")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of the sources, where git cannot tell")
    o = parser.parse_args(argv)
    kinds, batches = (KINDS[:2], BATCHES[:3:2]) if o.quick else (KINDS, BATCHES)
    default = [f"{batch}:{kind}" for batch in batches for kind in kinds] + list(() if o.quick else PREFILLS)
    try:
        o.rows = [Row.parse(text) for text in (o.rows.split(",") if o.rows else default)]
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    o.peers = [name for name in o.peers.split(",") if name != "none"]
    if unknown := set(o.peers) - set(peers.NAMES):
        parser.error(f"--peers {','.join(unknown)}: known are {', '.join(peers.NAMES)}")
    return o


class Model:
    """A decoder with random weights of one format; every layer has memory of its own."""

    def __init__(self, weights: str, layers: int) -> None:
        import torch
        from terrazzo import nn

        torch.manual_seed(0)
        first = {name: _random(weights, n, k) for name, (n, k) in SHAPES.items()}
        norm = lambda: nn.RMSNorm(torch.rand(HIDDEN, device=DEVICE).half() + 0.5, 1e-5)
        made = []
        for index in range(layers):
            w = {name: _copied(packed) if index else packed for name, packed in first.items()}
            sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
            facts = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, layer=index)
            attention = nn.Attention(nn.QKVLinear(w["qkv"], sizes), nn.Linear(w["o"]), **facts)
            mlp = nn.MLP(nn.GateUpLinear(w["gate_up"], (INTERMEDIATE, INTERMEDIATE)), nn.Linear(w["down"]))
            made.append(nn.DecoderLayer(attention, mlp, norm(), norm()))
        embedding = torch.randn(VOCABULARY, HIDDEN, device=DEVICE, dtype=torch.float16)
        rotary = nn.Rotary.of_base(HEAD_DIM, 500000.0).to(DEVICE)
        self.decoder = nn.Decoder(embedding, made, norm(), [rotary])
        self.head = torch.randn(VOCABULARY, HIDDEN, device=DEVICE, dtype=torch.float16) / HIDDEN**0.5
        self.nbytes = sum(w.nbytes for w in first.values()) * layers
        self.packed: Any = None

    @property
    def head_bytes(self) -> int:
        return 2 * self.head.numel() if self.packed is None else self.packed.nbytes

    def step(self, tokens: Any, batch: Any) -> Any:
        """Logits [B, vocabulary] of the newest token of each sequence."""
        from terrazzo.nn import positions_of

        h = self.decoder(tokens, positions_of(batch), batch)
        if len(h) != len(batch.sequences):
            h = h[batch.starts[1:].long() - 1]
        return self.logits(h)

    def logits(self, h: Any) -> Any:
        import torch
        from terrazzo.nn import products

        return torch.nn.functional.linear(h, self.head) if self.packed is None else products.gemm(h, self.packed)

    def take_head(self, form: str) -> None:
        """Logits by the head in this format from now on."""
        from terrazzo.nn import Format

        self.packed = None if form == "f16" else Format.parse(form).quantize(self.head, clip_steps=1)


def _random(weights: str, n: int, k: int) -> Any:
    import torch
    from terrazzo.nn import Format

    options = {"clip_steps": 1} if weights.startswith("w4a16") else {}
    return Format.parse(weights).quantize(torch.randn(n, k, device=DEVICE) / k**0.5, **options)


def _copied(packed: Any) -> Any:
    """The same weight in memory of its own."""
    from dataclasses import replace

    from terrazzo.ops import weights

    return replace(packed, **{name: t.clone() for name, t in weights.tensor_fields(packed).items()})


class Step:
    """The step of one row: a model, and a cache that is full of random keys and values."""

    def __init__(self, model: Model, row: Row) -> None:
        import torch
        from terrazzo.autotune.attention_bench import Shape, random_cache
        from terrazzo.ops.attention import KVCache

        self.model, self.row = model, row
        layers = len(model.decoder.layers)
        shape = Shape(row.batch, HEADS, KV_HEADS, -(-row.context // PAGE) * PAGE)
        filled = random_cache(row.k_format, row.v_format, shape, HEAD_DIM, PAGE)
        cache = KVCache(
            row.k_format, row.v_format, kv_heads=KV_HEADS, head_dim=HEAD_DIM, pages=len(filled.pages), page_size=PAGE,
            sequences=row.batch, max_tokens=shape.tokens, layers=layers, device=DEVICE,
        )  # fmt: skip
        for pages in cache.pages:
            pages.copy_(filled.pages)
        self.kv_bytes = 4 * filled.pages.numel() * layers
        del filled
        sequences = [cache.new() for _ in range(row.batch)]
        if row.new < row.context:
            cache.extend(dict.fromkeys(sequences, row.context - row.new))
        self.batch = cache.extend(dict.fromkeys(sequences, row.new))
        self.tokens = torch.randint(0, VOCABULARY, (row.batch * row.new,), device=DEVICE)

    def __call__(self) -> Any:
        return self.model.step(self.tokens, self.batch)

    @property
    def nbytes(self) -> int:
        """Bytes that a step must read: weights, head, and the cache of all tokens."""
        return self.model.nbytes + self.model.head_bytes + self.kv_bytes

    def wrong(self) -> str:
        """What is wrong with two layers beside the same with float weights, or ""; attention is ours in both."""
        import torch
        from terrazzo.nn import Format, fuse, positions_of

        decoder, batch = self.model.decoder, self.batch
        with torch.no_grad():
            h = decoder.embed_tokens(self.tokens)
            angles = [rotary(positions_of(batch)) for rotary in decoder.rotaries]
            delta, exact = None, h
            fuse(False)
            for layer in decoder.layers[:2]:
                exact = float_layer(layer, exact, angles, batch)
            fuse(True)
            for layer in decoder.layers[:2]:
                h, delta = layer(h, delta, None, angles, batch)
        y = (h + delta).float()
        limit = LIMITS[Format.parse(self.row.weights).family]
        off = float((y - exact.float()).norm() / exact.float().norm())
        return "" if off < limit else f"two layers are off by {off:.2%}, more than {limit:.0%}"

    def parts(self) -> dict[str, list[Callable[[], Any]]]:
        """name -> that part of every layer, to be called in turn; the rest of a step is glue."""
        import torch
        from terrazzo.nn import attention as calls
        from terrazzo.nn import products

        row, batch, rows = self.row, self.batch, len(self.tokens)
        make = lambda *size: torch.randn(size, device=DEVICE, dtype=torch.float16)
        xs = {k: make(rows, k) for k in {k for _, k in SHAPES.values()}}
        q, k, v = (make(rows, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
        found: dict[str, list[Callable[[], Any]]] = {name: [] for name in SHAPES}
        residual, delta, gate_up, qkv = (
            make(rows, HIDDEN),
            make(rows, HIDDEN) / 1e3,
            make(rows, 2 * INTERMEDIATE),
            make(rows, SHAPES["qkv"][0]),
        )
        angles = self.model.decoder.rotaries[0](torch.arange(rows, device=DEVICE))
        for index, layer in enumerate(self.model.decoder.layers):
            linears = dict(qkv=layer.self_attn.qkv_proj, o=layer.self_attn.o_proj, gate_up=layer.mlp.gate_up_proj,
                           down=layer.mlp.down_proj)  # fmt: skip
            for name, linear in linears.items():
                x = products.quantize(xs[linear.in_features], linear.packed)
                found[name].append(lambda w=linear.packed, x=x: products.gemm(x, w, torch.float16))
            x = xs[layer.self_attn.o_proj.in_features]
            if not torch.is_tensor(products.quantize(x, linears["o"].packed)):
                call = lambda w=linears["o"].packed, x=x: products.quantize(x, w)
                found.setdefault("quantize", []).append(call)
            pairs = ((layer.input_norm, linears["qkv"]), (layer.mlp_norm, linears["gate_up"]))
            for norm, linear in pairs:
                call = lambda norm=norm, linear=linear: norm.before(linear, residual, delta)
                found.setdefault("norm", []).append(call)
            found.setdefault("gate", []).append(lambda w=linears["down"]: products.gated(gate_up, "silu", w))
            if row.new == 1:
                found.setdefault("append", []).append(lambda at=layer.self_attn: at.append(qkv, *angles, batch))
                found.setdefault("attention", []).append(lambda i=index: calls.decode(batch, q.unsqueeze(1), i))
            else:
                found.setdefault("rope", []).append(lambda at=layer.self_attn: at.rotate(qkv, *angles))
                found.setdefault("append", []).append(lambda i=index: calls.store(batch, k, v, i))
                found.setdefault("attention", []).append(lambda i=index: calls.prefill(batch, q, k, v, i))
        last = make(row.batch, HIDDEN)
        found["head"] = [lambda: self.model.logits(last)]
        return found


def float_layer(layer: Any, h: Any, angles: Any, batch: Any) -> Any:
    """A layer with dequantized weights, in torch but for the cache and attention."""
    from terrazzo.nn import glue
    from terrazzo.nn.attention import append, decode, prefill, store
    from torch.nn import functional

    at = layer.self_attn
    linear = lambda x, module: functional.linear(x, module.packed.dequantize().to(x.dtype))
    qkv = linear(layer.input_norm(h), at.qkv_proj)
    q, k = glue.rotate(qkv, *angles[0], at.heads, at.kv_heads, None, 0.0)
    v = qkv[:, -at.kv_heads * at.head_dim :].unflatten(-1, (at.kv_heads, at.head_dim)).contiguous()
    if batch.new == [1] * len(q):
        append(batch, k.unsqueeze(1), v.unsqueeze(1), at.layer)
        y = decode(batch, q.unsqueeze(1), at.layer)
    else:
        y = prefill(batch, q, k, v, at.layer)
        store(batch, k, v, at.layer)
    h = h + linear(y.view(len(q), -1), at.o_proj)
    gated = glue.silu_mul(linear(layer.mlp_norm(h), layer.mlp.gate_up_proj))
    return h + linear(gated, layer.mlp.down_proj)


# -- kernels -----------------------------------------------------------------------------------------------------------
def requests(rows: list[Row], shapes: Mapping = SHAPES, sizes: tuple = (HEADS, KV_HEADS, HEAD_DIM)) -> list[Any]:
    """The kernels of some rows on the current GPU. Nothing is allocated there.

    Args:
        shapes: (N, K) of a layer's products by name. sizes: heads, kv heads and head_dim.
    """
    from terrazzo.nn import Format
    from terrazzo.ops import activation, norm, rope, w4a8, w4a16, w4ax
    from terrazzo.ops.attention.cache import launch
    from terrazzo.ops.attention.cache.layout import CacheLayout
    from terrazzo.ops.attention.decoding import op
    from terrazzo.ops.attention.writing import rope_writing, writing
    from terrazzo.ops.w4a8 import activations

    target, found = launch.detect(), []
    for row in rows:
        m, (heads, kv_heads, head_dim) = row.batch * row.new, sizes
        form = None if row.weights == "f16" else Format.parse(row.weights)
        quant = {"w4a8": "int8", "w4a8-e4m3": "e4m3"}.get(form.family if form else "f16")
        hidden, intermediate = shapes["gate_up"][1], shapes["down"][1]
        for residual, leaves in ((False, quant), (True, quant), (True, None)):
            found += norm.kernel_requests(hidden, m=m, target=target, residual=residual, quant=leaves)
        found += activation.kernel_requests(intermediate, m=m, target=target, quant=quant)
        found += rope.kernel_requests(head_dim, target=target)
        if row.head != "f16":
            own = Format.parse(row.head)
            facts = dict(group_size=own.group_size, symmetric=own.symmetric, scale_dtype="float16", dtype="float16")
            found += w4a16.kernel_requests(VOCABULARY, HIDDEN, m=row.batch, target=target, **facts)
        for n, k in shapes.values() if form else ():
            facts = dict(m=m, dtype="float16", target=target)
            size = k if form.group_size is None else form.group_size
            if form.family == "w4a16":
                found += w4a16.kernel_requests(
                    n, k, group_size=size, symmetric=form.symmetric, scale_dtype="float16", **facts
                )
            elif form.family == "w4ax":
                for normed, front in ((False, "none"), (False, "silu"), (True, "none"), (True, "residual")):
                    own = dict(norm=normed, front=front, granularity="two_level")
                    found += w4ax.kernel_requests(n, k, **own, **facts)
            else:
                codes, kind = ("e4m3", "e4m3") if form.family == "w4a8-e4m3" else ("int8", "auto")
                found += w4a8.kernel_requests(n, k, group_size=size, dequantization=kind, **facts)
                plain = dict(gain=False, norm=False)  # of o_proj's activations; norm and gate make the others' codes
                found.append(activations.plan(m, k, dtype="float16", **plain, target=target, codes=codes))
        layout = CacheLayout(row.k_format, row.v_format, head_dim)
        facts = dict(dtype="float16", page=PAGE, residual=layout.k.group, target=target)
        if row.new > 1:
            found.append(writing.write_kernel(layout, "float16", PAGE, layout.k.group, target))
            found += prefill_kernels(layout, facts)
            continue
        kind = dict(rotary_dim=head_dim, rope="neox", norm="none", numerics="fused", target=target)
        found.append(rope_writing.request(layout, "float16", PAGE, layout.k.group, **kind))
        places = (layout, row.batch, kv_heads, heads // kv_heads, row.context)
        found.append(op.plan(*places, **facts, softcap=False, sinks=False, mean=row.context).request)
    return list(dict.fromkeys(found))


def prefill_kernels(layout: Any, facts: dict[str, Any]) -> list[Any]:
    from terrazzo.ops.attention import prefill_requests

    return prefill_requests(layout, fresh=True, **facts)


def compile_all(rows: list[Row], *of: Any) -> None:
    """Compile the kernels of rows in parallel; `of` as `requests` takes it."""
    program.compile_all(requests(rows, *of))


# -- measuring ---------------------------------------------------------------------------------------------------------
def measured(step: Step, o: argparse.Namespace, copy_gb_s: float) -> dict[str, Any]:
    """The fields of a row that has run."""
    import torch
    from terrazzo.autotune import measure

    checked = not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] > SPARE_BYTES
    if checked and (why := step.wrong()):
        return {"failure": why}
    with torch.no_grad():
        y = step()
        if not bool(y.isfinite().all()):
            return {"failure": "logits are not finite"}
        timing = measure.time_calls([step], o.budget_ms)
        found = {
            "checked": checked, "ms": round(timing.us / 1e3, 4), "spread": round(timing.spread, 4),
            "repeats": timing.replays, "bytes": step.nbytes, "floor_ms": round(step.nbytes / copy_gb_s / 1e6, 4),
        }  # fmt: skip
        if not (o.quick or o.no_parts):
            parts = {}
            for name, calls in step.parts().items():
                per_call = measure.time_calls(calls, o.budget_ms / 4).us
                parts[name] = round(per_call * len(calls) / 1e3, 4)
            found["parts"] = parts | {"glue": round(found["ms"] - sum(parts.values()), 4)}
    return found


def show(row: Row, found: dict[str, Any]) -> None:
    if "failure" in found:
        print(f"{row!s:36} FAILED {found['failure'][:300]}", flush=True)
        return
    parts = "  ".join(f"{name} {ms:.3f}" for name, ms in found.get("parts", {}).items())
    print(f"{row!s:36} {found['ms']:8.3f} ms, floor {found['floor_ms']:.3f}   {parts}", flush=True)


class Run:
    """Measures rows one after another, and writes the file after each."""

    def __init__(self, o: argparse.Namespace) -> None:
        from terrazzo.autotune import gemm_bench, measure
        from terrazzo.ops.attention.cache import launch

        self.o, self.start = o, time.perf_counter()
        compile_all([] if o.only_peers else o.rows)
        self.result: dict[str, Any] = gemm_bench.header(launch.detect(), o.commit)
        self.result["copy_gb_s"] = round(measure.copy_bandwidth(), 1)
        self.result["peers_missing"] = peers.missing(o.peers)
        self.result["rows"] = self._kept()
        print(f"copy {self.result['copy_gb_s']} GB/s", flush=True)

    @cached_property
    def out(self) -> Path | None:
        named = report.RESULTS / report.file_name("decode_step", self.result["gpu"])
        return self.o.out or (None if self.o.quick else named)

    def _kept(self) -> list[dict[str, Any]]:
        """Rows of the file that this run does not measure."""
        import json

        if not ((self.o.append or self.o.only_peers) and self.out and self.out.is_file()):
            return []
        asked = set() if self.o.only_peers else {str(row) for row in self.o.rows}
        return [row for row in json.loads(self.out.read_text(encoding="utf-8"))["rows"] if row["row"] not in asked]

    @property
    def over(self) -> bool:
        return time.perf_counter() - self.start > self.o.budget

    def ours(self) -> None:
        """Rows of one weight format at a time, small caches first."""
        for weights in dict.fromkeys(row.weights for row in self.o.rows):
            model = None
            for row in sorted((r for r in self.o.rows if r.weights == weights), key=lambda r: r.batch * r.context):
                if self.over:
                    print(f"{row!s:36} left out: the budget is spent", flush=True)
                    continue
                fields = {
                    "op": "decode_step" if row.new == 1 else "prefill_step", "row": str(row), "batch": row.batch,
                    "context": row.context, "new": row.new, "weights": weights, "k_format": row.k_format,
                    "v_format": row.v_format, "head": row.head, "layers": self.o.layers, "ms": None, "peers": {},
                }  # fmt: skip
                try:
                    model = model or Model(weights, self.o.layers)
                    model.take_head(row.head)
                    found = measured(Step(model, row), self.o, self.result["copy_gb_s"])
                except (RuntimeError, ValueError) as error:  # of Terrazzo, or memory: it costs the row, not the run
                    found = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
                self.result["rows"].append(fields | found)
                show(row, found)
                self.write()
                empty()
            del model
            empty()

    def theirs(self) -> None:
        """transformers' steps, each once for all rows of a batch and context."""
        for name in self.o.peers:
            if name in self.result["peers_missing"]:
                continue
            model = None
            for place in sorted({row.place for row in self.o.rows}, key=lambda p: p[0] * p[1]):
                if self.over:
                    print(f"{name} {place} left out: the budget is spent", flush=True)
                    continue
                try:
                    model = model or peers.model(self.o.layers)
                    found: Any = peers.step_ms(model, name, *place, self.o.budget_ms)
                except Exception as error:  # another package's error of any kind costs its column, not the run
                    found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                print(f"{name:24} {place}: {found}", flush=True)
                for row in self.result["rows"]:
                    if (row["batch"], row["context"], row["new"]) == place:
                        row["peers" if isinstance(found, float) else "peers_failed"] = {
                            **row.get("peers" if isinstance(found, float) else "peers_failed", {}), name: found,
                        }  # fmt: skip
                self.write()
                empty()
            del model
            empty()

    def write(self) -> None:
        report.write(self.result, self.out, self.start)


def empty() -> None:
    """Give memory back before the next model or cache."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def run(o: argparse.Namespace) -> int:
    made = Run(o)
    if not o.only_peers:
        made.ours()
    made.theirs()
    made.write()
    return report.conclude(made.result)


def main(argv: list[str] | None = None) -> int:
    return report.guarded("benchmarks.decode_step", lambda: run(arguments(argv)))


if __name__ == "__main__":
    sys.exit(main())
