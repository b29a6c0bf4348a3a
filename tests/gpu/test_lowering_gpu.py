"""Launches on a real GPU: streams, graphs, every program of the ground floor's tests, PTX for newer GPUs, bundles."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from terrazzo.lowering import Kernel, Target, compile_request, get_kernel, load_bundle, write_bundle
from terrazzo.lowering.errors import ArgumentError, BundleError, CaptureError, TargetError

sys.path.insert(0, str(Path(__file__).parents[1] / "lowering"))
torch = pytest.importorskip("torch")
tools = pytest.importorskip("lowering_tools")
request_for, run_python = tools.request_for, tools.run_python


@pytest.fixture
def arch(gpu) -> str:
    return Target.detect().arch


def scaled(kernel, x):
    y = torch.full_like(x, float("nan"))
    kernel(x, y, 3, 2.0)
    return y


def test_launch_any_number_of_rows(arch):
    kernel = get_kernel(request_for("scale", arch))
    for rows in (1, 7, 4096, 0, 3):
        x = torch.randn(rows, 256, device="cuda")
        assert torch.equal(scaled(kernel, x), 2.0 * x + 3)


def test_matrix_product(arch):
    a, b = (torch.randint(-8, 8, (128, 64), device="cuda").half() for _ in range(2))
    c = torch.empty(128, 128, device="cuda")
    get_kernel(request_for("gemm", arch))(a, b, c)
    assert torch.equal(c, a.float() @ b.float().t())


@pytest.mark.parametrize("program", ["tma_copy", "cluster"])
def test_hopper_launches(arch, program):
    if arch != "sm_90a":
        pytest.skip("needs sm_90a")
    a = torch.randn(128, 256, device="cuda").half()
    b = torch.zeros_like(a)
    get_kernel(request_for(program, arch))(a, b)
    assert torch.equal(a, b)


def test_the_current_stream_is_used(arch):
    kernel = get_kernel(request_for("scale", arch))
    x = torch.zeros(4096, 256, device="cuda")
    scaled(kernel, x)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # x is set only after this, so a launch elsewhere would read zeros
        x.fill_(1.0)
        y = scaled(kernel, x)
    assert not stream.query()
    stream.synchronize()
    assert torch.equal(y, torch.full_like(x, 5.0))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_cold_kernel_refuses_a_capture_and_a_warm_one_replays(arch):
    request = request_for("scale", arch)
    kernel = Kernel("cold", compile_request(request))
    x = torch.ones(64, 256, device="cuda")
    y = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="before the capture"), torch.cuda.graph(graph):
        kernel(x, y, 1, 2.0)
    kernel(x, y, 1, 2.0)
    assert kernel.warm
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(x, y, 1, 2.0)
    for value in (4.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(y, torch.full_like(y, 2 * value + 1))


def test_ptx_of_sm_80_runs_on_newer_gpus(arch):
    kernel = get_kernel(request_for("gemm", "sm_80", flags=("ptx=compute_80",)))
    a, b = (torch.randint(-8, 8, (128, 64), device="cuda").half() for _ in range(2))
    c = torch.empty(128, 128, device="cuda")
    kernel(a, b, c)
    assert torch.equal(c, a.float() @ b.float().t())


def test_machine_code_of_another_gpu_is_refused(arch):
    other = "sm_90a" if arch != "sm_90a" else "sm_80"
    x = torch.ones(4, 256, device="cuda")
    with pytest.raises(TargetError, match="no machine code for this device"):
        scaled(get_kernel(request_for("scale", other)), x)


def test_wrong_tensors_are_refused(arch):
    kernel = get_kernel(request_for("scale", arch))
    x = torch.ones(4, 256, device="cuda")
    scaled(kernel, x)
    for wrong in (None, x.cpu(), x.half(), x[:, :128], torch.ones(4, 512, device="cuda")[:, ::2]):
        with pytest.raises(ArgumentError):
            kernel(wrong, x, 1, 2.0)


def test_a_bundle_runs_in_a_process_without_tilelang_or_tvm(arch, tmp_path):
    request = request_for("gemm", arch)
    bundle = write_bundle(tmp_path / "bundle", [request])
    code = f"""
import sys
class OnlyTorchAndTvmFfi:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tilelang", "tvm", "filelock"):
            raise ImportError(name + " is not installed here")
sys.meta_path.insert(0, OnlyTorchAndTvmFfi())
import torch
from lowering_tools import request_for
from terrazzo.lowering import get_kernel, load_bundle
load_bundle({str(bundle)!r})
a, b = (torch.randint(-8, 8, (128, 64), device="cuda").half() for _ in range(2))
c = torch.empty(128, 128, device="cuda")
get_kernel(request_for("gemm", {arch!r}))(a, b, c)
print(torch.equal(c, a.float() @ b.float().t()), sorted({{"tilelang", "tvm"}} & set(sys.modules)))
"""
    done = run_python(code, PATH="/nowhere", CUDA_HOME="/nowhere", TERRAZZO_CACHE_DIR=str(tmp_path / "none"))
    assert done.stdout.strip() == "True []", done.stderr


def test_a_bundle_of_another_gpu_is_refused(arch, tmp_path):
    other = "sm_90a" if arch != "sm_90a" else "sm_80"
    bundle = write_bundle(tmp_path / "bundle", [request_for("scale", other)])
    with pytest.raises(BundleError, match=f"is for {other}, wanted is {arch}"):
        load_bundle(bundle)


def test_launch_overhead(arch):
    """The launch itself, from Python, must leave room for an operator's checks in 15 us."""
    import time

    kernel = get_kernel(request_for("scale", arch))
    x = torch.ones(1, 256, device="cuda")
    y = torch.empty_like(x)
    kernel(x, y, 1, 2.0)
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            kernel(x, y, 1, 2.0)
        best = min(best, (time.perf_counter() - start) / 100)
        torch.cuda.synchronize()
    print(f"launch overhead {best * 1e6:.2f} us")
    assert best < 10e-6
