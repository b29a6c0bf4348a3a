"""x's way through a call: the Python functions of ours that one warm call enters, in order, and in how many files.

    python tests/tools/stays.py                 every call that is counted
    python tests/tools/stays.py w4a8.gemm       one of them, with the way
    python tests/tools/stays.py --time FILE     on a GPU: microseconds of the host for each call, written as JSON

A stay is one function entered (sys.setprofile, "call"). Without a GPU, tensors of the CPU pass for a GPU's and kernels
are replaced: their launch is no stay.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from terrazzo import nn
from terrazzo.lowering import kernels
from terrazzo.lowering.targets import Target
from terrazzo.ops import activation, attention, launching, norm, rope, w4a8, w4a16, w4ax, w8a8

ROOT = Path(__file__).parents[2]
FLOORS = ("ops", "schedules", "layouts", "lowering", "autotune", "terrazzo", "nn")


class Launch:
    """Stands for a kernel: everything that is asked of one, and calls that do nothing."""

    def __init__(self, request: Any) -> None:
        self.request = request

    def __call__(self, *args: Any) -> None:
        """A launch."""

    def launcher(self, index: int) -> Launch:
        return self

    def warm_on(self, device: Any) -> bool:
        return True


def pretend() -> None:
    """From now on this process takes tensors of the CPU for those of an H200, and launches nothing."""
    target = Target.parse("nvidia/nvidia-h200")
    torch.Tensor.is_cuda = property(lambda self: True)
    torch.Tensor.get_device = lambda self: 0
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda *args: SimpleNamespace(cuda_stream=0)
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    kernels.get_kernel = Launch
    launching.targets = lambda packed_for, device, argument="w": (target, target)
    launching.detect = lambda index: target
    Target.detect = staticmethod(lambda *args: target)
    sys.modules["terrazzo.ops.attention.cache.launch"].current_targets = lambda *args: (target, target)


def calls(device: str) -> dict[str, Callable[[], Any]]:
    """name -> the call, on tensors that exist already."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 512, generator=generator) / 16
    x = torch.randn(4, 512, generator=generator).to(device, torch.float16)
    made: dict[str, Callable[[], Any]] = {}
    w16 = w4a16.quantize(weight.to(device))
    made["w4a16.gemm"] = lambda: w4a16.gemm(x, w16)
    w8 = w4a8.quantize(weight.to(device))
    made["w4a8.gemm"] = lambda: w4a8.gemm(x, w8)
    statistics = w4ax.ActivationStatistics.empty(512, device=device)
    statistics.observe(x)
    wx = w4ax.quantize(weight.to(device), w4ax.plan_blocks(statistics), target="sm_90a")
    made["w4ax.gemm"] = lambda: w4ax.gemm(x, wx)
    keys = torch.randn(2, 2, 64, 128, generator=generator).to(device, torch.float16)
    cache = attention.pack_cache(keys, keys, "int4", "int4")
    q = torch.randn(2, 1, 8, 128, generator=generator).to(device, torch.float16)
    made["attention.decode"] = lambda: attention.decode(q, cache)
    qkv, angles = torch.randn(2, 12 * 128, generator=generator).to(device, torch.float16), torch.rand(2, 64).to(device)
    made["attention.rope_append"] = lambda: attention.rope_append(cache, qkv, angles, angles, heads=8)
    bytes8 = w8a8.quantize(weight.to(device), codes="int8")
    made["w8a8.gemm"] = lambda: w8a8.gemm(x, bytes8)
    ones, pairs = torch.ones(512, dtype=x.dtype, device=device), torch.cat([x, x], dim=1)
    made["norm.rms_norm"] = lambda: norm.rms_norm(x, ones)
    made["norm.fused_add_rms_norm"] = lambda: norm.fused_add_rms_norm(x, x.clone(), ones)
    made["activation.act_and_mul"] = lambda: activation.act_and_mul(pairs, activation="silu")
    angles = torch.rand(4, 64, generator=generator).to(device)
    heads = dict(heads=2, kv_heads=1, head_dim=128)
    made["rope.apply_rope"] = lambda: rope.apply_rope(x, angles, angles, **heads)
    made["nn.DecoderLayer"] = decoder_layer(device)
    return made


def decoder_layer(device: str) -> Callable[[], Any]:
    """A step of a layer in w4a16 over a cache: two tokens of two sequences."""
    heads, kv_heads, dim, hidden, width = 4, 2, 128, 512, 1024
    generator = torch.Generator().manual_seed(0)
    make = lambda n, k: w4a16.quantize(torch.randn(n, k, generator=generator).to(device) / k**0.5)
    norm = lambda: nn.RMSNorm(torch.ones(hidden, dtype=torch.float16, device=device))
    qkv = nn.QKVLinear.join(make(heads * dim, hidden), make(kv_heads * dim, hidden), make(kv_heads * dim, hidden))
    out = nn.Linear(make(hidden, heads * dim))
    attention_ = nn.Attention(qkv, out, heads=heads, kv_heads=kv_heads, head_dim=dim)
    gate_up = nn.GateUpLinear.join(make(width, hidden), make(width, hidden))
    layer = nn.DecoderLayer(attention_, nn.MLP(gate_up, nn.Linear(make(hidden, width))), norm(), norm())
    cache = attention.KVCache("int4", "int4", kv_heads=kv_heads, head_dim=dim, pages=8, sequences=2, device=device)
    batch = cache.extend({cache.new(): 1, cache.new(): 1})
    h, delta = torch.randn(2, 2, hidden, generator=generator).to(device, torch.float16)
    angles = [nn.Rotary.of_base(dim).to(device)(torch.tensor([0, 0], device=device))]
    return lambda: layer(h.clone(), delta, None, angles, batch)


def timed(path: Path, runs: int = 15, calls_a_run: int = 400) -> None:
    """Write microseconds of the host for each call: least and median of the runs, with the card and the commit."""
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    rows = []
    for name, call in calls("cuda").items():
        stays(call)  # warm
        times = []
        for _ in range(runs):
            times.append(timeit.timeit(call, number=calls_a_run) / calls_a_run * 1e6)
            torch.cuda.synchronize()
        rows.append({"call": name, "us": round(min(times), 2), "median_us": round(statistics.median(times), 2)})
        print(rows[-1], flush=True)
    card = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": runs, "calls_a_run": calls_a_run}
    found = {**card, "commit": done.stdout.strip(), "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def stays(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """(file, function) of every stay of a call that was made twice before."""
    found: list[tuple[str, str]] = []

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (place := _place(frame)):
            found.append((place, frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name))

    call()
    call()
    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def _place(frame: FrameType) -> str:
    """The file of a function of ours, "ops/w4a8/op.py"; else nothing."""
    path = Path(frame.f_code.co_filename)
    if not path.is_absolute() or not path.resolve().is_relative_to(ROOT):
        return ""
    inside = path.resolve().relative_to(ROOT)
    return inside.as_posix() if inside.parts[0] in FLOORS else ""


def main(names: list[str]) -> None:
    if names[:1] == ["--time"]:
        timed(Path(names[1]))
        return
    on_gpu = torch.cuda.is_available()
    made = calls("cuda" if on_gpu else "cpu")
    if not on_gpu:
        __import__("terrazzo.ops.attention.cache.launch")
        pretend()
    for name, call in made.items():
        if names and name not in names:
            continue
        way = stays(call)
        print(f"{name}: {len(way)} stays in {len({place for place, _ in way})} files")
        for place, function in way if names else ():
            print(f"    {place} {function}")


if __name__ == "__main__":
    main(sys.argv[1:])
