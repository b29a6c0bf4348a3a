"""Digests of kernels: SHA-256 of the CUDA text of some 200 requests, which prove that a change changed no kernel.

    python tests/tools/kernel_digest.py                  compare with tests/data/kernel_digests.json; 1 if one differs
    python tests/tools/kernel_digest.py --changed 20     those whose sources changed since, and 20 others
    python tests/tools/kernel_digest.py --write          write that file anew, and the one of sources
    python tests/tools/kernel_digest.py --only 'w4a8*'   some of them
    python tests/tools/kernel_digest.py --text FOLDER    keep the texts, to compare those that differ
    python tests/tools/kernel_digest.py --sass FOLDER    compare machine code with that of texts that --text kept

Lowering needs TileLang, and neither nvcc nor a GPU; `--sass` needs nvcc and cuobjdump. It compiles the kernels whose
texts differ, and says how: not at all, in registers and order (the same instructions), or in instructions. Patterns
match calls, the part of a label before the colon. Tuned records are left out, so that tuning changes no digest. What a
kernel is made of has a name, by which the cache finds it (`KernelRequest.identity`); tests/data/kernel_sources.json has
those of the digests.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import package_version

GOLDEN = Path(__file__).parents[1] / "data" / "kernel_digests.json"
SOURCES = GOLDEN.with_name("kernel_sources.json")
"""Label -> the first characters of the identity that the request had when its digest was last seen to hold."""
QUICK = (
    "w4a16 sm_80 m=1",
    "w4a16 sm_80 m=512",
    "w4a16 sm_90a m=16",
    "w4a16 sm_90a m=64",
    "w4a16 sm_90a post m=64",
    "w4a8 sm_90a g128 m=4",
    "w4a8 sm_90a g128 m=64",
    "w4a8 e4m3 sm_90a bf16 bias m=64",
    "w4ax sm_90a block m=64",
    "w4ax sm_80 block m=64",
    "attention int4/int4 sm_90a write",
    "attention fp8/fp8 sm_90a new_tokens",
)
"""The calls that `make test` compares: something of each program that lowers fast."""

N = K = 4096
Calls = Iterator[tuple[str, Callable[[], list[KernelRequest]]]]


def select(patterns: Iterable[str]) -> dict[str, KernelRequest]:
    """label -> request of the kernels of some calls; a label names the call and the kernel, not how it is built."""
    found: dict[str, KernelRequest] = {}
    patterns = tuple(patterns)
    for label, call in chain(_w4a16(), _small_floats(), _w8a8(), _w4a8(), _w4ax(), _attention(), _rows()):
        if any(fnmatch.fnmatchcase(label, pattern) for pattern in patterns):
            count: dict[str, int] = {}
            for request in call():
                name = request.name.partition(".")[2]
                count[name] = count.get(name, 0) + 1
                found[f"{label}: {name} {count[name]}"] = request
    return found


def _w4a16() -> Calls:
    from terrazzo.ops import w4a16

    base = dict(group_size=128, symmetric=False, scale_dtype="float16", dtype="float16")
    bf16 = dict(scale_dtype="bfloat16", dtype="bfloat16")

    def calls(label: str, target: str, ms: tuple[int, ...], n: int = N, k: int = K, **changes) -> Calls:
        for m in ms:
            facts = {**base, **changes, "m": m, "target": target}
            yield f"w4a16 {target}{label} m={m}", partial(w4a16.kernel_requests, n, k, **facts)

    for target in ("sm_80", "sm_89", "sm_90a"):
        yield from calls("", target, (1, 4, 16, 64, 512))
    for label, changes in (
        (" bf16", bf16),
        (" bf16 symmetric", bf16 | dict(symmetric=True)),
        (" symmetric", dict(symmetric=True)),
        (" g32", dict(group_size=32)),
        (" g64 bias", dict(group_size=64, bias=True)),
        (" per channel", dict(group_size=K)),
        (" f32 scales", dict(scale_dtype="float32")),
        (" post", dict(numerics="post")),
        (" fused", dict(numerics="fused")),
    ):
        yield from calls(label, "sm_90a", (1, 64, 1024), **changes)
        yield from calls(label, "sm_80", (8, 128), **changes)
    yield from calls(" wide", "sm_90a", (32, 96, 256), n=14336)
    yield from calls(" deep", "sm_90a", (2, 48, 128), k=14336)
    yield from calls(" ragged", "sm_90a", (8, 80), n=1000, k=1096)
    yield from calls(" ragged", "sm_80", (8, 80), n=1000, k=1096)
    for m in (16, 2048):
        for label, changes in (("", {}), (" bf16 g64 post", bf16 | dict(group_size=64, numerics="post"))):
            call = partial(w4a16.grouped_requests, N, K, 8, **{**base, **changes}, m=m)
            yield f"w4a16 sm_90a grouped{label} m={m}", call
            yield f"w4a16 sm_80 grouped{label} m={m}", partial(call, target="sm_80")


def _small_floats() -> Calls:
    from terrazzo.ops import fp8, mxfp4, nvfp4, w8a16

    bf16 = dict(scale_dtype="bfloat16", dtype="bfloat16")
    forms = (
        ("mxfp4", mxfp4, {}),
        ("nvfp4", nvfp4, {}),
        ("w8a16 rows", w8a16, dict(group_size=K)),
        ("w8a16 rows bf16", w8a16, dict(group_size=K, **bf16)),
        ("w8a16 g128 zeros bf16", w8a16, dict(group_size=128, symmetric=False, **bf16)),
        ("fp8 rows", fp8, dict(group_size=K)),
        ("fp8 blocks", fp8, dict(group_size=128)),
        ("fp8 blocks bf16", fp8, dict(group_size=128, scale_dtype="bfloat16")),
    )
    for name, family, facts in forms:
        for target, m in (("sm_90a", 1), ("sm_90a", 64), ("sm_90a", 1024), ("sm_80", 64)):
            call = partial(family.kernel_requests, N, K, m=m, target=target, **facts)
            yield f"{name} {target} m={m}", call
        for target in ("sm_90a", "sm_80"):
            call = partial(family.grouped_requests, N, K, 8, m=16, target=target, **facts)
            yield f"{name} {target} grouped m=16", call


def _w8a8() -> Calls:
    from terrazzo.lowering.targets import Target
    from terrazzo.ops import w8a8
    from terrazzo.ops.w4a8.w8a8 import op

    forms = (("int8", {}), ("e4m3", dict(codes="e4m3")), ("e4m3 blocks", dict(codes="e4m3", block=True)))
    for name, facts in forms:
        for m in (64, 1024):
            call = partial(w8a8.kernel_requests, N, K, m=m, dtype=None, out_dtype="bfloat16", target="sm_90a", **facts)
            yield f"w8a8 {name} sm_90a m={m}", call
    for name, target, own in zip(("int8", "e4m3", "e4m3 blocks"), ("sm_80", "sm_89", "sm_89"), (it for _, it in forms)):
        call = partial(w8a8.kernel_requests, N, K, m=64, dtype=None, out_dtype="bfloat16", target=target, **own)
        yield f"w8a8 {name} {target} m=64", call
    yield "w8a8 e4m3 blocks sm_90a grouped m=16", partial(w8a8.grouped_requests, N, K, 8, m=16, **facts)
    own = dict(m=(64,), dtype="bfloat16", target=Target.parse("sm_90a"), **facts)
    for name, ue8m0 in (("blocks", False), ("blocks ue8m0", True)):
        yield f"w8a8 quantizer of {name} sm_90a m=64", partial(op.quantizers, K, **own, ue8m0=ue8m0)


def _w4a8() -> Calls:
    from terrazzo.ops import w4a8

    def calls(label: str, target: str, ms: tuple[int, ...], n: int = N, k: int = K, **changes) -> Calls:
        kinds = {"e4m3": "w4a8 e4m3", "e2m1": "w4a8 mxfp4", "e2m1_mx": "w4a8 mxfp8"}
        kind = kinds.get(changes.get("dequantization"), "w4a8")
        for m in ms:
            yield f"{kind} {target}{label} m={m}", partial(w4a8.kernel_requests, n, k, m=m, target=target, **changes)

    for target in ("sm_80", "sm_89", "sm_90a"):
        yield from calls("", target, (1, 16, 64, 512))
    e4m3, mxfp4 = dict(dequantization="e4m3", group_size=128), dict(dequantization="e2m1", group_size=32, dtype=None)
    for target in ("sm_89", "sm_90a"):
        yield from calls("", target, (1, 16, 64, 512), **e4m3)
        yield from calls("", target, (1, 512), **mxfp4)
        yield from calls("", target, (1, 512), **{**mxfp4, "dequantization": "e2m1_mx", "dtype": "bfloat16"})
    only = dict(dtype=None)  # no kernel that quantizes activations
    for label, changes in (
        (" bf16 bias", only | dict(out_dtype="bfloat16", bias=True)),
        (" int32", only | dict(out_dtype="int32")),
        (" unsigned", only | dict(dequantization="unsigned")),
        (" g128", only | dict(group_size=128)),
        (" g32", only | dict(group_size=32)),
    ):
        yield from calls(label, "sm_90a", (4, 64, 1024), **changes)
        yield from calls(label, "sm_80", (8, 128), **changes)
    for label, changes in ((" per channel", dict(group_size=K)), (" bf16 bias", dict(out_dtype="bfloat16", bias=True))):
        yield from calls(label, "sm_90a", (4, 64, 1024), **{**e4m3, **only, **changes})
    yield from calls(" smooth", "sm_90a", (64,), smooth=True, dtype="bfloat16")
    yield from calls(" deep", "sm_90a", (128,), **only, k=14336)
    yield from calls(" ragged", "sm_90a", (8, 80), **only, n=1000, k=1120)
    for m in (16, 2048):
        every = (("sm_90a", "", {}), ("sm_90a", " e4m3", e4m3), ("sm_80", "", {}), ("sm_89", " e4m3", e4m3))
        for target, form, facts in every:
            call = partial(w4a8.grouped_requests, N, K, 8, m=m, target=target, **facts)
            yield f"w4a8{form} {target} grouped m={m}", call
    grouped = partial(w4a8.grouped_requests, N, K, 8, m=16, target="sm_90a", group_size=32, dequantization="e2m1")
    yield "w4a8 mxfp4 sm_90a grouped m=16", grouped


def _w4ax() -> Calls:
    from terrazzo.ops import w4ax

    def call(label: str, target: str, **changes) -> tuple[str, Callable[[], list[KernelRequest]]]:
        return f"w4ax {target}{label}", partial(w4ax.kernel_requests, N, K, target=target, **changes)

    for target in ("sm_80", "sm_89", "sm_90a"):
        for m in (1, 16, 64, 512):
            yield call(f" m={m}", target, m=m)
    only = dict(dtype=None, out_dtype="bfloat16")
    for m in (4, 64, 1024):
        yield call(f" block m={m}", "sm_90a", **only, m=m, granularity="block", bias=True)
        for blocks8 in (0, 32):
            yield call(f" blocks8={blocks8} m={m}", "sm_90a", **only, m=m, blocks8=blocks8)
    for m in (16, 2048):
        yield f"w4ax sm_90a grouped m={m}", partial(w4ax.grouped_requests, N, K, 8, m=m, bias=True, target="sm_90a")
    for front, norm in (("residual", True), ("silu", False)):
        for target in ("sm_80", "sm_90a"):
            label, requests = call(f" {front} quantizer m=64", target, m=64, norm=norm, front=front)
            yield label, lambda requests=requests: requests()[-1:]
    yield call(" block m=64", "sm_80", dtype=None, out_dtype="float32", m=64, granularity="block")
    for granularity in ("block", "token", "static"):
        for target in ("sm_80", "sm_90a"):
            facts = dict(m=64, permuted=False, granularity=granularity, scales="block")
            label, requests = call(f" {granularity} quantizer m=64", target, **facts)
            yield label, lambda requests=requests: requests()[-1:]


def _attention() -> Calls:
    from terrazzo.lowering.targets import Target
    from terrazzo.ops import attention
    from terrazzo.ops.attention.writing import slot_writing

    def calls(formats: str, target: str, label: str = "", decodes: int = 2, **changes) -> Calls:
        """The first kernels of decode, the last of them the balanced one; and the other kernels."""
        facts = dict(heads=32, kv_heads=8, target=target) | changes
        requests = cache(lambda: attention.kernel_requests(*formats.split("/"), **facts))

        def kind(name: str) -> list[KernelRequest]:
            return [one for one in requests() if one.name.startswith(f"attention.{name}") and not parted(one)]

        def parted(one: KernelRequest) -> bool:
            return one.name.endswith("_merge") or "split" in dict(one.params)

        call = f"attention {formats} {target}{label}"
        yield f"{call} decode", lambda: [*kind("decode")[: decodes - 1], kind("decode")[-1]]
        for name in ("prefill", "new_tokens", "write") if changes.get("prefill") else ("write",):
            yield f"{call} {name}", partial(kind, name)

    for target in ("sm_80", "sm_89", "sm_90a"):
        yield from calls("int4/int4", target, decodes=3, prefill=True)
    yield from calls("int4_channel64/int4", "sm_90a", prefill=True)
    yield from calls("int8/int8", "sm_90a", prefill=True, dtype="bfloat16")
    yield from calls("fp8/fp8", "sm_90a", prefill=True)
    yield from calls("int2/int2", "sm_90a")
    yield from calls("int4_hadamard/int4", "sm_90a")
    yield from calls("int2_hadamard/int2_hadamard", "sm_90a")
    yield from calls("int8_static/int8_static", "sm_90a")
    yield from calls("float16/float16", "sm_90a")
    yield from calls("bfloat16/bfloat16", "sm_90a", dtype="bfloat16")
    yield from calls("int4/int4", "sm_90a", " head_dim=64", head_dim=64)
    yield from calls("int4/int4", "sm_90a", " head_dim=256", head_dim=256)
    yield from calls("int4/int4", "sm_90a", " 32 rows", heads=64, q_len=4)
    yield from calls("int4/int4", "sm_90a", " sinks", softcap=True, sinks=True)
    yield from calls("int4/int4", "sm_90a", " contiguous", page=0, residual=0)
    turned = dict(rotary_dim=128, rope="neox", norm="llama", numerics="fused", positions="int64")
    for target, formats, label, facts in (
        ("sm_90a", "int8/int4", "", {}),
        ("sm_80", "int4_hadamard/int4", "", {}),
        ("sm_90a", "int4_hadamard/int4", " turned", turned),
    ):
        layout, at = attention.CacheLayout(*formats.split("/"), 128), Target.parse(target)
        request = partial(slot_writing.request, layout, "bfloat16", 16, "int64", target=at, **facts)
        yield f"attention {formats} {target}{label} slots", lambda request=request: [request()]
    for formats, page, residual in (
        ("int4/int4", 128, 0),
        ("int4_channel64/int2", 128, 64),
        ("int4_hadamard/int2_hadamard", 128, 128),
        ("int8_static/int8_static", 0, 0),
    ):
        yield f"attention {formats} sm_90a warpgroups", partial(_warpgroups, formats, page, residual)
    for target in ("sm_80", "sm_90a"):
        yield f"attention int4/int4 {target} parts", partial(_parts, target)
    yield "attention int4/int4 sm_90a ragged", _ragged
    yield "attention int4/int4 sm_90a codes", _codes


def _parts(target: str) -> list[KernelRequest]:
    """A prefill whose CTAs share the past, and what adds it up."""
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.attention.cache.layout import CacheLayout
    from terrazzo.ops.attention.prefilling import prefill_op

    layout, at = CacheLayout("int4", "int4", 128), Target.parse(target)
    found = prefill_op.prefill_requests(layout, page=128, fresh=True, target=at)
    parted = [it for it in found if "split" in dict(it.params)]
    return [parted[0], next(it for it in found if it.name == "attention.prefill_merge")]


def _ragged() -> list[KernelRequest]:
    """Decode of up to four new tokens of a sequence: split, and by lengths."""
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.attention.cache.layout import CacheLayout
    from terrazzo.ops.attention.decoding import op

    facts = dict(dtype="float16", page=128, residual=0, softcap=False, sinks=False, target=Target.parse("sm_90a"))
    sizes = (CacheLayout("int4", "int4", 128), 8, 8, 16, 32768)
    return [op.plan(*sizes, **facts, balanced=balanced, ragged=True).request for balanced in (False, True)]


def _codes() -> list[KernelRequest]:
    """Decode that makes codes of its outputs: one scale for a token, and scales of blocks from rows on wgmma."""
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.attention.cache.layout import CacheLayout
    from terrazzo.ops.attention.decoding import op
    from terrazzo.ops.attention.decoding.codes import Coding

    facts = dict(dtype="float16", page=128, residual=0, softcap=False, sinks=False, target=Target.parse("sm_90a"))
    layout, coding = (
        CacheLayout("int4", "int4", 128),
        (Coding("int8", smooth=True), Coding("e4m3_block128", False, True)),
    )
    shapes = (1, 8, 4, 8192), (64, 8, 32, 4096)
    return [op.plan(layout, *shape, **facts, coding=form).request for shape, form in zip(shapes, coding)]


def _warpgroups(formats: str, page: int, residual: int) -> list[KernelRequest]:
    """Decode of 32 rows on wgmma, with all that a cache of these formats has."""
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.attention.cache.layout import CacheLayout
    from terrazzo.ops.attention.decoding import op
    from terrazzo.schedules.attention import WarpgroupDecode

    layout = CacheLayout(*formats.split("/"), 128, 16 if residual == 128 else 0)
    facts = dict(dtype="bfloat16", page=page, residual=residual, softcap=False, sinks=True)
    schedule, target = WarpgroupDecode(4, 8, 4, 3, 1), Target.parse("sm_90a")
    return [op.plan(layout, 1, 8, 32, 32768, **facts, target=target, schedule=schedule).request]


def _rows() -> Calls:
    from terrazzo.lowering.targets import Target
    from terrazzo.ops import activation, norm, rope

    hopper = Target.parse("sm_90a")  # a name would ask what GPU is here
    for target in (Target.parse("sm_80"), hopper):
        for m in (1, 1024):
            for quant in (None, "int8"):
                facts = dict(m=m, target=target, quant=quant)
                yield f"norm {target.arch} {quant} m={m}", partial(norm.kernel_requests, 4096, **facts)
                yield f"activation {target.arch} {quant} m={m}", partial(activation.kernel_requests, 14336, **facts)
        yield f"rope {target.arch}", partial(rope.kernel_requests, 128, target=target)
    facts = dict(m=1024, target=hopper, quant="e4m3_block128", dtype="bfloat16")
    yield "norm sm_90a sandwich blocks", partial(norm.kernel_requests, 3584, style="gemma", post=True, **facts)
    facts |= dict(activation="swiglu_oai", layout="interleaved", numerics="model")
    yield "activation sm_90a gpt-oss blocks", partial(activation.kernel_requests, 2880, **facts)
    facts = dict(target=hopper, norm="llama", numerics="model", positions="int64")
    yield "rope sm_90a qwen 3", partial(rope.kernel_requests, 128, **facts)


def made_of(request: KernelRequest) -> str:
    """Names all that can affect a kernel's text, but for TileLang."""
    return request.identity()[:16]


def changed(chosen: dict[str, KernelRequest], others: int, seed: int) -> dict[str, KernelRequest]:
    """The kernels that are not made of what they were when their digests were seen to hold, and some that are."""
    known = json.loads(SOURCES.read_text()) if SOURCES.is_file() else {}
    same = [label for label, request in chosen.items() if known.get(label) == made_of(request)]
    again = random.Random(seed).sample(same, min(others, len(same)))
    return {label: request for label, request in chosen.items() if label not in same or label in again}


def text_of(request: KernelRequest) -> str:
    """CUDA text of a kernel, lowered in this process."""
    return lowered(request).kernel_source


def shared_of(request: KernelRequest) -> int:
    """Bytes of dynamic shared memory that a launch gets. The text does not say them."""
    functions = [function for _, function in lowered(request).device_mod.functions.items()]
    return max(int(function.attrs.get("dyn_shared_memory_buf", 0)) for function in functions)


def lowered(request: KernelRequest) -> Any:
    """What TileLang makes of a kernel."""
    from terrazzo.lowering.compiler import load_builder
    from terrazzo.lowering.toolchain import import_tilelang

    tilelang = import_tilelang()
    from tvm.target import Target as TvmTarget

    program = load_builder(request)(target=request.target, **dict(request.params))
    target = TvmTarget({"kind": "cuda", "arch": request.target.arch})
    with tilelang.transform.PassContext(opt_level=3, config=dict(request.pass_configs)), target:
        return tilelang.lower(program, target=target, enable_host_codegen=False, enable_device_compile=False)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def file_of(label: str) -> str:
    return f"{label.replace('/', '+').replace(' ', '_')}.cu"


def sass_of(request: KernelRequest, text: str) -> list[str]:
    """Instructions that nvcc makes of a kernel's text, as cuobjdump prints them, without addresses and encodings."""
    from terrazzo.lowering.compiler import BINARY, _Nvcc
    from terrazzo.lowering.toolchain import build_folder, find_cuda_tool, package_folder

    with build_folder() as folder, ThreadPoolExecutor(1) as beside:
        (folder / "tilelang").symlink_to(package_folder("tilelang"))
        _Nvcc(request, folder, beside).compile(text, dict(request.pass_configs))
        command = [find_cuda_tool("cuobjdump"), "-sass", str(folder / BINARY)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = (re.sub(r"/\*[0-9a-fx ]+\*/", "", line).strip() for line in printed.splitlines())
    return [line for line in lines if line and not line.startswith(".")]


def sass_against(folder: Path, found: tuple[str, KernelRequest]) -> str:
    """How the machine code of a kernel differs from what nvcc makes of the text in `folder`."""
    label, request = found
    known, text = folder / file_of(label), text_of(request)
    if not known.exists():
        return f"NO TEXT in {folder}"
    if known.read_text() == text:
        return "same text"
    kept = known.with_suffix(".sass")
    if not kept.exists():
        kept.write_text("\n".join(sass_of(request, known.read_text())))
    old, new = kept.read_text().splitlines(), sass_of(request, text)
    if old == new:
        return "same machine code"
    names = [sorted(re.sub(r"^@\S+ ", "", line).split(" ")[0] for line in lines) for lines in (old, new)]
    if names[0] == names[1]:
        return f"SAME INSTRUCTIONS ({len(new)}), others in registers or order"
    return f"OTHER INSTRUCTIONS: {len(old)} -> {len(new)}"


def run(
    take: Callable[[KernelRequest], str], chosen: dict[str, KernelRequest], workers: int
) -> Iterator[tuple[str, str]]:
    """(label, text) of each kernel, as they come; equal requests are taken once."""
    distinct = list(dict.fromkeys(chosen.values()))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for request, text in zip(distinct, pool.map(take, distinct)):
            yield from ((label, text) for label, one in chosen.items() if one == request)


def compare_sass(folder: Path, chosen: dict[str, KernelRequest], workers: int) -> int:
    """Print how machine code differs from that of the texts in `folder`; 1 if it does anywhere."""
    first = {request: label for label, request in reversed(chosen.items())}  # equal requests are compiled once
    context, differ = multiprocessing.get_context("spawn"), 0
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        found = [(label, request) for request, label in reversed(first.items())]
        for (label, _), said in zip(found, pool.map(partial(sass_against, folder), found)):
            differ += said != said.lower()
            print(f"{label}: {said}", flush=True)
    return 1 if differ else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--text", type=Path, metavar="FOLDER")
    parser.add_argument("--sass", type=Path, metavar="FOLDER")
    parser.add_argument("--changed", type=int, metavar="OTHERS", help="those of changed sources, and so many others")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of others")
    parser.add_argument("--list", action="store_true", help="print the labels alone")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    asked = parser.parse_args()
    os.environ["TERRAZZO_TUNED"] = "off"
    chosen = every = select(asked.only or ["*"])
    if asked.changed is not None:
        chosen = changed(chosen, asked.changed, asked.seed)
    if asked.list:
        print(*chosen, sep="\n")
        return 0
    if asked.sass:
        return compare_sass(asked.sass, chosen, asked.workers)
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {"kernels": {}}
    found, differ = {}, []
    for label, text in run(text_of, chosen, asked.workers):
        found[label] = sha256(text)
        same = asked.write or golden["kernels"].get(label) == found[label]
        differ += [] if same else [label]
        print(f"{found[label][:16]}  {label}{'' if same else '  DIFFERS'}", flush=True)
        if asked.text:
            asked.text.mkdir(parents=True, exist_ok=True)
            (asked.text / file_of(label)).write_text(text)
    if asked.write:
        part = asked.only or asked.changed is not None
        calls = {label.partition(":")[0] for label in every}  # a call may take other kernels than before
        stays = lambda label: part and (label in every or label.partition(":")[0] not in calls)
        kept = {label: digest for label, digest in golden["kernels"].items() if stays(label)}
        kernels = dict(sorted({**kept, **found}.items()))
        data = {"tilelang": package_version("tilelang"), "kernels": kernels}
        GOLDEN.write_text(json.dumps(data, indent=1) + "\n")
        known = json.loads(SOURCES.read_text()) if part and SOURCES.is_file() else {}
        known |= {label: made_of(chosen[label]) for label in found}
        SOURCES.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    if differ:
        print(f"{len(differ)} of {len(found)} kernels differ", file=sys.stderr)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
