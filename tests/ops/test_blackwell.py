"""Kernels of sm_100a and sm_120a, which no GPU has run yet: native tensor-core instructions, and no spills."""

from __future__ import annotations

import pytest
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.kernels import compile_request
from terrazzo.lowering.report import KernelReport
from terrazzo.lowering.targets import Target
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import model_requests, registry
from terrazzo.ops.kinds.base import Serving
from terrazzo.ops.model_requests import Weights

ARCHS = ("sm_100a", "sm_120a")
FORMS = {
    "w4a16": Weights(128, dtype="bfloat16"),
    "w4a8": Weights(64, operator="w4a8"),
    "w4a8_fp8": Weights(128, operator="w4a8_fp8"),
    "mxfp4": Weights(32, symmetric=True, scale_dtype="e8m0", dtype="bfloat16", operator="mxfp4"),
    "fp8": Weights(0, symmetric=True, scale_dtype="float32", operator="fp8"),
}
RUNNING = [(arch, form) for arch in ARCHS for form in FORMS if (arch, form) != ("sm_100a", "w4a8_fp8")]
TENSOR = {"w4a8": "IMMA.16832.S8.S8", "w4a8_fp8": "QMMA.16832.F32.E4M3.E4M3"}


def requests(arch: str, form: str) -> dict:
    """One kernel for each program that serves a model whose linear layers are in this form, by name."""
    kv = (("int4", "int4"), ("int8", "int8")) if form == "w4a16" else ()
    weights = FORMS[form]
    serving = Serving(Target.parse(arch), weights.dtype or "float16", kv=kv)
    plan = model_requests.plan(model_requests.of_name("llama-3.2-3b", weights), serving)
    assert not plan.skipped
    return {request.name: request for request in plan.requests}


@pytest.mark.parametrize(("arch", "form"), RUNNING)
def test_programs_are_those_of_mma_sync(arch, form):
    found = set(requests(arch, form))
    assert not {name for name in found if name.endswith(("stream_k", "persistent", "integer", "prefill_shared"))}
    family = form.removesuffix("_fp8")
    assert {f"{family}.small_batch", f"{family}.multistage"} <= found


def test_what_has_no_instruction_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"sm_100a.*no e4m3 tensor-core instruction.*use int8"):
        requests("sm_100a", "w4a8_fp8")
    for arch in ARCHS:
        with pytest.raises(ArgumentError, match=rf"{arch}.*neither s4 .* nor warpgroup .*w4a8"):
            model_requests.plan(
                model_requests.of_name("llama-3.2-3b", Weights(128, operator="w4ax")), Serving(Target.parse(arch))
            )
    assert {row["operator"] for row in registry.rows(target="sm_100a")} >= {"w4a16", "w4a8", "attention", "norm"}
    assert not {(row["operator"], row["target"]) for row in registry.rows("w4ax")} & {("w4ax", arch) for arch in ARCHS}


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing")
@pytest.mark.parametrize(("arch", "form"), RUNNING)
def test_kernels_that_multiply_are_native(arch, form):
    for name, request in requests(arch, form).items():
        if name.endswith(("small_batch", "multistage", "decode", "prefill_mma")):
            report = KernelReport.read(compile_request(request) / "report.json")
            assert report.spill_stores == report.spill_loads == 0, request
            (instruction,) = report.tensor_instructions
            assert instruction.startswith(TENSOR.get(form, "HMMA.16816.F32")), (request, instruction)
