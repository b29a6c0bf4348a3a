"""A launch gets the shared memory that a kernel's ring and parameters need: CUDA text does not say how much."""

from __future__ import annotations

import pytest
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import fp8, mxfp4, w4a16
from terrazzo.ops.linear import multistage
from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.weight_only.op import problem_of
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.stream_k import StreamK

from tests.tools.kernel_digest import shared_of

pytestmark = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot lower: {toolchain().missing()} missing"),
]
N, K = 130, 576
U4 = dict(group_size=32, symmetric=False, scale_dtype="float16")
CALLS = {
    "w4a16 multistage": lambda: w4a16.kernel_requests(N, K, m=40, target="sm_80", **U4),
    "mxfp4 multistage": lambda: mxfp4.kernel_requests(N, K, m=200, target="sm_80"),
    "fp8 blocks multistage": lambda: fp8.kernel_requests(N, K, group_size=128, m=40, target="sm_89"),
    "w4a16 small_batch": lambda: w4a16.kernel_requests(N, K, m=3, target="sm_80", **U4),
    "mxfp4 small_batch": lambda: mxfp4.kernel_requests(N, K, m=3, target="sm_80"),
    "fp8 rows small_batch": lambda: fp8.kernel_requests(N, K, group_size=K, m=3, target="sm_90a"),
    "w4a16 stream_k": lambda: w4a16.kernel_requests(N, K, m=40, target="sm_90a", **U4),
    "mxfp4 stream_k": lambda: mxfp4.kernel_requests(N, K, m=200, target="sm_90a"),
    "fp8 rows stream_k": lambda: fp8.kernel_requests(N, K, group_size=K, m=40, target="sm_90a"),
    "fp8 blocks stream_k": lambda: fp8.kernel_requests(N, K, group_size=128, m=40, target="sm_90a"),
}
SLOW = ("mxfp4 small_batch", "w4a16 small_batch", "mxfp4 stream_k", "w4a16 stream_k", "fp8 blocks stream_k")


def made(kind: type, params: dict) -> object:
    return kind(**{name: params[name] for name in kind.__dataclass_fields__ if name in params})


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CALLS])
def test_a_launch_has_room_for_what_its_copies_fill(name):
    request: KernelRequest
    (request,) = CALLS[name]()
    params = dict(request.params)
    op = Operand(
        *(params[key] for key in ("group", "symmetric", "scale_dtype", "dtype", "numerics")), params.get("weight", "u4")
    )
    problem, given = problem_of(op, params["n"], params["k"]), shared_of(request)
    if name.endswith("multistage"):
        assert given >= multistage.shared_bytes(op, made(multistage.Tile, params | {"kc": 1}))
    elif name.endswith("small_batch"):
        assert given >= made(SmallBatch, params).held_bytes(problem)
    else:
        schedule = made(StreamK, params)
        assert given >= schedule.stages * schedule.stage_bytes(problem)
