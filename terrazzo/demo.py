"""`terrazzo demo`: one quantized layer's way through the whole library, each step shown and checked.

checkpoint layer -> canonical weight -> derived layout and its proof -> packed weight -> numbers on the CPU -> kernels
for several GPUs -> (with a GPU) the operator beside cuBLAS.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.building import compile_with_progress, describe, print_kernels
from terrazzo.console import console, print_table, size
from terrazzo.lowering.errors import CompileError

if TYPE_CHECKING:
    from types import ModuleType

    from terrazzo.layouts.converters.base import Converter
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.weight_only.integers import PackedWeight, QuantizedWeight

TARGETS = ("sm_80", "sm_89", "sm_90a")
COMPILED_M = (1, 16, 256)
"""Numbers of tokens whose kernels are compiled: decoding, a small batch, prefill."""
CHECKED_M = 8
TIMED = (28672, 4096)
"""LLaMA-3-8B's gate and up projection: what is timed where there is a GPU."""
_CHECKOUT_LAYER = Path(__file__).parents[1] / "tests" / "data" / "awq_demo.safetensors"


class _Stage:
    """Prints numbered steps, and keeps what they found for `--json`."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.number, self.report = quiet, 0, {"ok": True, "steps": []}
        self.out = console()

    @contextmanager
    def step(self, title: str) -> Iterator[dict[str, Any]]:
        self.number += 1
        self.say(f"[bold]{self.number}  {title}[/bold]", markup=True)
        facts: dict[str, Any] = {"step": title}
        start = time.perf_counter()
        yield facts
        facts["seconds"] = round(time.perf_counter() - start, 2)
        self.report["steps"].append(facts)
        self.report["ok"] &= facts.get("ok", True)
        self.say("")

    def say(self, text: str, markup: bool = False) -> None:
        if not self.quiet:
            self.out.print(text if markup else f"   {text}" if text else "", markup=markup)


def run_demo(data: Path | None = None, targets: Sequence[str] = TARGETS, quiet: bool = False) -> dict[str, Any]:
    """Run the demo; returns {"ok": whether everything that was checked held, "steps": facts of each step}.

    Args:
        data: a safetensors file with one quantized layer; None takes the repository's own small AWQ layer or, where
            that is absent, quantizes a random one.
        targets: architectures to compile for.

    Raises:
        ArgumentError: data that cannot be read. ToolchainError: no compiler. TargetError: an unknown target.
    """
    from terrazzo.lowering.targets import Target

    parsed = [Target.parse(target) for target in targets]
    stage = _Stage(quiet)
    weight = _read(stage, data)
    packed = _pack(stage, weight)
    _check_on_cpu(stage, weight, packed)
    _compile(stage, weight, parsed)
    _run_on_gpu(stage, weight)
    stage.say("everything above was checked and holds" if stage.report["ok"] else "SOMETHING FAILED, see above")
    return stage.report


def _read(stage: _Stage, data: Path | None) -> QuantizedWeight:
    import torch
    from terrazzo.ops import w4a16

    with stage.step("A quantized layer comes in") as facts:
        if data is None and not _CHECKOUT_LAYER.is_file():
            source = "random float weight, quantized here"
            weight = w4a16.quantize_weight(torch.randn(256, 512, generator=torch.Generator().manual_seed(0)) * 0.02)
        else:
            source = str(data or _CHECKOUT_LAYER.relative_to(Path(__file__).parents[1]))
            weight = w4a16.read_layer(data or _CHECKOUT_LAYER)
        groups = -(-weight.k // weight.group_size)
        facts |= {"source": source, "n": weight.n, "k": weight.k, "group_size": weight.group_size}
        stage.say(f"{source}: w[{weight.n}, {weight.k}], 4-bit codes, {groups} scales a row")
        zeros = "symmetric" if weight.symmetric else f"zero points {int(weight.zeros.min())}..{int(weight.zeros.max())}"
        stage.say(f"first codes {weight.codes[0, :8].tolist()}, scale {float(weight.scales[0, 0]):.4g}, {zeros}")
    return weight


def _pack(stage: _Stage, weight: QuantizedWeight) -> PackedWeight:
    import torch
    from terrazzo.layouts import INSTANCES, get_converter, get_instance
    from terrazzo.ops.weight_only.integers import LAYOUT

    layout, instance = get_instance(LAYOUT), INSTANCES[LAYOUT]
    with stage.step("Its layout is derived, and proved") as facts:
        convert, proof = get_converter(instance.converter), layout.prove()
        stage.say(
            f"fragment   {layout.fragment.name}: {layout.threads} threads, {layout.fragment.values} elements each"
        )
        stage.say(f"converter  {convert}, field of element e of register o: {_positions(convert)}")
        stage.say(
            f"load       {layout.load_words} words a thread, so a block is {layout.block_rows} x {layout.block_k}"
        )
        stage.say(f"layout     {layout.identity}")
        stage.say(f"proof      {proof}")
        facts |= {"layout": layout.identity, "proof": str(proof), "ok": proof.ok}
    with stage.step("The layer is packed") as facts:
        packed = weight.pack()
        back = packed.unpack()
        exact = torch.equal(back.codes, weight.codes) and torch.equal(back.scales, weight.scales)
        facts |= {"bytes": packed.nbytes, "bytes_f16": 2 * weight.n * weight.k, "ok": exact}
        stage.say(f"{size(2 * weight.n * weight.k)} in f16 -> {size(packed.nbytes)} with scales and zero points")
        stage.say(f"unpacked again: {'every code and scale is the same' if exact else 'DIFFERS'}")
    return packed


def _positions(convert: Converter) -> str:
    elements = range(32 // convert.operand_bits)
    return " ".join(",".join(str(convert.pos(o, e)) for e in elements) for o in range(convert.outputs))


def _check_on_cpu(stage: _Stage, weight: QuantizedWeight, packed: PackedWeight) -> None:
    import torch
    from terrazzo.layouts.emulate import NUMERICS, emulate_w4a16
    from terrazzo.ops.w4a16 import reference

    dtype = weight.scales.dtype if weight.scales.dtype != torch.float32 else torch.float16
    name = str(dtype).removeprefix("torch.")
    known = {
        "n": packed.n,
        "k": packed.k,
        "group_size": packed.group_size,
        "symmetric": packed.symmetric,
        "scale_dtype": packed.scale_dtype,
        "operand": name,
    }
    with stage.step("A tensor core in numpy computes with nothing but the packed bytes") as facts:
        x = torch.randn(CHECKED_M, weight.k, generator=torch.Generator().manual_seed(1)).to(dtype)
        seen = x if weight.perm is None else x[:, weight.perm.long()]
        rows = []
        for numerics in NUMERICS if packed.scale_dtype == name else ("post",):
            words, params = packed.words.numpy(), packed.params.numpy()
            y = torch.from_numpy(
                emulate_w4a16(seen.double().numpy(), words, params, numerics=numerics, **known)
            ).double()
            y = y if weight.bias is None else y + weight.bias.double()
            error = (y - reference.gemm(x, weight, numerics)).abs()
            bound = reference.forward_error_bound(x, weight, numerics)
            wrong = int((~(error <= bound)).sum())
            facts[numerics] = {
                "wrong": wrong,
                "largest_error": float(error.max()),
                "share_of_bound": float((error / bound).max()),
            }
            rows.append((numerics, y.numel(), wrong, float(error.max()), float((error / bound).max())))
        facts["ok"] = not any(row[2] for row in rows)
        if not stage.quiet:
            print_table(
                ("   numerics", "elements", "outside bound", "largest error", "of the bound"),
                [("   " + r[0], *r[1:]) for r in rows],
            )


def _compile(stage: _Stage, weight: QuantizedWeight, targets: Sequence[Any]) -> None:
    from terrazzo.ops import w4a16

    with stage.step(f"Kernels for {', '.join(target.arch for target in targets)}, compiled without a GPU") as facts:
        requests = [request for target in targets for request in _requests(w4a16, weight, target)]
        outcomes = compile_with_progress(requests, quiet=stage.quiet)
        facts["kernels"] = rows = [describe(request, outcome) for request, outcome in zip(requests, outcomes)]
        facts["ok"] = all(row.get("tensor_instructions") or row.get("note") for row in rows)
        if not stage.quiet:
            print_kernels(rows)
            for outcome in outcomes:
                if isinstance(outcome, CompileError):
                    stage.say(str(outcome))


def _requests(w4a16: ModuleType, weight: QuantizedWeight, target: Target) -> list[KernelRequest]:
    scales = str(weight.scales.dtype).removeprefix("torch.")
    return list(
        dict.fromkeys(
            w4a16.kernel_requests(
                weight.n,
                weight.k,
                group_size=weight.group_size,
                symmetric=weight.symmetric,
                scale_dtype=scales,
                m=list(COMPILED_M),
                dtype="float16" if scales == "float32" else scales,
                target=target,
            )
        )
    )


def _run_on_gpu(stage: _Stage, weight: QuantizedWeight) -> None:
    import torch

    if not torch.cuda.is_available():
        stage.say("No GPU here, so nothing was run on one; with a GPU the demo also times the operator beside cuBLAS.")
        return
    from terrazzo.autotune.gemm_bench import bench
    from terrazzo.autotune.linear_bench import LinearSettings, LinearShape
    from terrazzo.autotune.measure import check_outputs
    from terrazzo.ops import w4a16
    from terrazzo.ops.w4a16 import reference

    with stage.step(f"The operator on this {torch.cuda.get_device_name()}") as facts:
        device = weight.to("cuda")
        packed = device.pack()
        dtype = weight.scales.dtype if weight.scales.dtype != torch.float32 else torch.float16
        x = torch.randn(CHECKED_M, weight.k, device="cuda", dtype=dtype)
        # The numerics that the kernel chose do not matter here: the widest of the bounds holds for all of them.
        kinds = ("exact", "fused", "post") if weight.scales.dtype == dtype else ("post",)
        bound = torch.stack([reference.forward_error_bound(x, device, kind) for kind in kinds]).amax(0)
        rounding = torch.finfo(dtype).eps
        bound += rounding * x.double().abs() @ reference.dequantize(device, "post").abs().T
        problem = check_outputs(w4a16.gemm(x, packed), reference.gemm(x, device, "post"), bound)
        stage.say(f"the layer above, {CHECKED_M} tokens: {problem or 'every element is inside its error bound'}")
        problems, settings = {TIMED: ("llama-3-8b.gate_up",)}, LinearSettings()
        result = bench(LinearShape, problems, COMPILED_M, settings, compile_all=_quiet_compile(stage))
        facts |= {"ok": not problem and not any("failure" in row for row in result["rows"]), "timed": result}
        stage.say(f"w{list(TIMED)}, group 128, zero points; us, copies reach {result['copy_gb_s']:.0f} GB/s here:")
        if not stage.quiet:
            rows = [
                (row["m"], row["us"], row["peers"].get("cublas_f16"), row.get("failure", "")) for row in result["rows"]
            ]
            print_table(("   M", "terrazzo", "cuBLAS f16", ""), rows)


def _quiet_compile(stage: _Stage) -> Iterator[None]:
    return lambda requests: compile_with_progress(requests, quiet=stage.quiet)
