"""MXFP4 weights on e4m3 activations: what is packed, what is refused, and the programs run on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import test_w4a8_fp8_emulated as emulated
import test_w4a8_fp8_grouped_emulated as grouped
import torch
from emulated_cases import cases
from terrazzo.layouts.converters import get_converter
from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError
from terrazzo.lowering.toolchain import toolchain
from terrazzo.ops import mxfp4, mxfp4_fp8, w4a8
from terrazzo.ops.w4a8 import fp8, fp8_reference
from terrazzo.schedules.multistage import Multistage
from terrazzo.schedules.small_batch import SmallBatch
from terrazzo.schedules.stream_k import StreamK

LUT = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
kernels = [
    pytest.mark.compiles,
    pytest.mark.skipif(bool(toolchain().missing()), reason=f"cannot compile: {toolchain().missing()} missing"),
]


def tensors(n: int, k: int, low: int = 112, high: int = 130, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and e8m0 scales of a range."""
    rng = torch.Generator().manual_seed(n + k + seed)
    codes = torch.randint(0, 16, (n, k), generator=rng, dtype=torch.uint8)
    return codes, torch.randint(low, high + 1, (n, -(-k // 32)), generator=rng, dtype=torch.uint8)


def meant(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [N, K]."""
    each = scales.double().repeat_interleave(32, 1)[:, : codes.shape[1]]
    return LUT[codes.long()] * 2.0 ** (each - 127)


def weight(n: int, k: int, *, seed: int = 0, low: int = 112, high: int = 130) -> mxfp4_fp8.QuantizedWeight:
    codes, scales = tensors(n, k, low, high, seed)
    bias = torch.randint(-8, 8, (n,), generator=torch.Generator().manual_seed(seed)).float()
    return mxfp4_fp8.QuantizedWeight.canonical(codes, scales, weight="mxfp4", group_size=32, bias=bias)


@pytest.mark.parametrize("ends", [(0, 13), (112, 130), (60, 99), (180, 219), (201, 240)])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (63, 96), (130, 2880)])
def test_packed_weights_are_what_codes_and_scales_mean(n, k, ends):
    """Scales of a row up to 39 binades apart, the smallest and the largest that are read."""
    codes, scales = tensors(n, k, *ends)
    packed = mxfp4_fp8.pack(codes, scales)
    assert torch.equal(packed.dequantize(), meant(codes, scales))
    values, factors, channel = packed.operands()
    assert torch.equal(values * factors.repeat_interleave(32, 1)[:, :k] * channel[:, None], meant(codes, scales))
    assert torch.equal(packed.unpack().codes, codes) and torch.equal(packed.unpack().pack().words, packed.words)


def test_the_packed_bytes_become_the_codes_in_the_operand():
    """All codes in all places of a word."""
    converter = get_converter("e2m1_e4m3")
    rng = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (4096, 8), generator=rng)
    fields = (codes << 4 * torch.arange(8)).sum(1).numpy().astype("uint32")
    made = torch.from_numpy(converter.emulate(converter.stored(fields)).astype("int64"))
    for o in range(2):
        for e in range(4):
            value = (made[:, o] >> 8 * e & 255).to(torch.uint8).view(torch.float8_e4m3fn).double()
            assert torch.equal(value * 64, LUT[codes[:, converter.pos(o, e)]])


def test_groups_of_zeros_do_not_count():
    """Their scales may be anything, as quantizers leave them."""
    codes, scales = tensors(4, 128)
    codes[:, 32:64] &= 8
    scales[:, 1] = torch.tensor([0, 254, 7, 250], dtype=torch.uint8)
    packed = mxfp4_fp8.pack(codes, scales)
    assert torch.equal(packed.dequantize(), meant(codes, scales))
    codes[:] = 0
    assert not mxfp4_fp8.pack(codes, scales).dequantize().any()


def test_scales_too_far_apart_or_too_large_are_refused_by_name():
    codes, scales = tensors(3, 96)
    codes |= 1
    scales[1] = torch.tensor([90, 130, 127], dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="within 39 binades .row 1, group 0."):
        mxfp4_fp8.pack(codes, scales)
    scales[1] = 241
    with pytest.raises(ArgumentError, match="scales = 241: must be at most 240"):
        mxfp4_fp8.pack(codes, scales)
    scales[1] = 255
    with pytest.raises(ArgumentError, match="scales"):
        mxfp4_fp8.pack(codes, scales)
    codes, scales = tensors(3, 96)
    with pytest.raises(ArgumentError, match="sm_80"):
        mxfp4_fp8.pack(codes, scales, target="sm_80")
    with pytest.raises(ArgumentError, match="canonical weight of MXFP4"):
        mxfp4_fp8.pack(w4a8.fp8.quantize_weight(torch.ones(4, 32), group_size=32))


def test_files_name_the_layout(tmp_path):
    packed = weight(70, 160).pack()
    packed.save(tmp_path / "w.safetensors")
    again = mxfp4_fp8.PackedWeight.load(tmp_path / "w.safetensors")
    assert again.layout == packed.layout and torch.equal(again.dequantize(), packed.dequantize())
    with pytest.raises(ArgumentError):
        fp8.PackedWeight.load(tmp_path / "w.safetensors")
    with pytest.raises(LayoutMismatchError):
        packed.check_layout(fp8.quantize(torch.ones(4, 32), group_size=32).layout)


def test_gpt_oss_experts_and_layers_are_read(tmp_path):
    rng = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 12, 3, 16), generator=rng, dtype=torch.uint8)
    scales = torch.randint(110, 130, (2, 12, 3), generator=rng, dtype=torch.uint8)
    bias = torch.randn(2, 12, generator=rng).bfloat16()
    ours = mxfp4_fp8.from_gpt_oss(blocks, scales, bias, gate_up="interleaved")
    theirs = mxfp4.from_gpt_oss(blocks, scales, bias, gate_up="interleaved")
    for e in range(2):
        assert torch.equal(ours[e].dequantize(), theirs[e].dequantize()) and torch.equal(ours[e].bias, theirs[e].bias)
    one = mxfp4_fp8.from_compressed_tensors(blocks[0].flatten(1), scales[0])
    assert torch.equal(one.dequantize()[0::2], ours[0].dequantize()[:6])
    made = mxfp4_fp8.quantize(torch.randn(40, 96, generator=rng), bias=torch.ones(40))
    assert made.n == 40 and made.bias is not None


def test_a_shard_is_what_a_rank_keeps():
    whole = weight(128, 192)
    packed, dense = whole.pack(), whole.dequantize()
    assert torch.equal(packed.shard(1, 2).dequantize(), dense[64:])
    assert torch.equal(packed.shard(1, 2, 1).dequantize(), dense[:, 96:])  # inside of a packed unit
    assert type(packed.shard(1, 2, 1)) is mxfp4_fp8.PackedWeight
    with pytest.raises(ArgumentError, match="groups of 32"):
        packed.shard(0, 4, 1)


def test_calls_on_a_cpu_tensor_of_a_graph_give_the_reference():
    """The operator of graphs tells the weight's form by its layout."""
    w = weight(40, 96)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, scales = fp8_reference.quantize_activations(x)
    expected = (q.double() * scales.double()[:, None]) @ w.dequantize().T + w.bias
    traced = torch.compile(lambda x: mxfp4_fp8.gemm(x, w.pack()), backend="eager")
    assert torch.allclose(traced(x).double(), expected, rtol=1e-2, atol=1e-2 * float(expected.abs().max()))


def test_only_groups_of_32_are_asked_for():
    assert mxfp4_fp8.kernel_requests(256, 512, m=(1, 16, 300), target="sm_90a")
    with pytest.raises(ArgumentError, match="group = 64: must be 32"):
        w4a8.kernel_requests(256, 512, group_size=64, m=1, target="sm_90a", dequantization="e2m1")
    with pytest.raises(ArgumentError, match="sm_80"):
        mxfp4_fp8.kernel_requests(256, 512, m=1, target="sm_80")


S, M = partial(StreamK, form="e4m3 post"), Multistage
CASES = {  # as those of test_w4a8_fp8_emulated.py
    "stream_k": (130, 400, 32, 20, S(16, 2, 1, 3), (3, 3), "bfloat16", True),
    "stream_k two pieces": (70, 272, 32, 140, S(256, 2, 1, 4), (1, 0), "float16", False),
    "multistage": (67, 288, 32, 40, M(64, 4, 1, 2), None, "float16", True),
    "small_batch": (67, 400, 32, 11, SmallBatch(2, 2, 3, 2, 2, 2), None, "float16", False),
}
GROUPED = {
    "rows of nobody": ((7, 0, 33), (3, 6), 200, 640, 32, S(32, 2, 1, 2), 7, "float16"),
    "mma, split k": ((0, 5, 0, 40, 1), (3, 1), 130, 272, 32, Multistage(16, 4, 2, 3, kc=2), 0, "bfloat16"),
}


@pytest.mark.parametrize("name", cases(CASES, ["stream_k"]))
@pytest.mark.compiles
@kernels[1]
def test_kernel(name, tmp_path):
    emulated.check(name, weight(*CASES[name][:2]), CASES[name], tmp_path)


@pytest.mark.parametrize("name", cases(GROUPED, []))
@pytest.mark.compiles
@kernels[1]
def test_grouped(name, tmp_path):
    def experts(count: int, n: int, k: int, group: int, free: bool) -> list[mxfp4_fp8.QuantizedWeight]:
        return [weight(n, k, seed=e, **({} if free else dict(low=119, high=122))) for e in range(count)]

    grouped.check(GROUPED[name], experts, "e2m1", tmp_path)
