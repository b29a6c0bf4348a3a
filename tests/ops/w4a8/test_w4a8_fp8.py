"""W4A8 on e4m3: formats, quantizers, the error bound, choice of kernels, refusals, torch.library; nothing compiles."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from terrazzo.layouts.converters import get_converter
from terrazzo.layouts.converters.e4m3 import unzigzag, zigzag
from terrazzo.layouts.emulate import operand_tiles
from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError
from terrazzo.lowering.targets import Target
from terrazzo.ops import w4a8
from terrazzo.ops.call import plans
from terrazzo.ops.w4a8 import fp8, fp8_format, fp8_reference, op
from terrazzo.ops.w4a8.entry import CALLS
from terrazzo.schedules import linear_spaces, stream_k
from terrazzo.schedules.problem import Gemm

DATA = Path(__file__).parents[2] / "data" / "w4a8"


def random_weight(n=70, k=333, group=64, **options):
    rng = torch.Generator().manual_seed(n + k)
    return fp8.QuantizedWeight.canonical(
        torch.randint(-8, 8, (n, k), generator=rng),
        torch.randn(n, -(-k // group), generator=rng).half(),
        torch.rand(n, generator=rng) + 0.1,
        group_size=group,
        **options,
    )


# -- formats -----------------------------------------------------------------------------------------------------------
def test_zigzag_is_a_permutation_with_the_sign_in_bit_0():
    codes = torch.arange(-8, 8, dtype=torch.int8)
    stored = zigzag(codes)
    assert sorted(stored.tolist()) == list(range(16)) and torch.equal(unzigzag(stored), codes)
    assert torch.equal(stored & 1, (codes < 0).to(torch.int8))


@pytest.mark.parametrize(("n", "k", "group"), [(64, 128, 128), (70, 333, 64), (1, 1, 32), (130, 200, 32)])
def test_packed_weights_unpack_exactly(n, k, group):
    weight = random_weight(n, k, group, smooth=torch.rand(k) + 0.5, bias=torch.randn(n))
    packed = fp8.pack(weight)
    packed.check_sizes()
    back = packed.unpack()
    for name in ("codes", "scales", "channel_scales", "smooth", "bias"):
        assert torch.equal(getattr(back, name), getattr(weight, name))
    assert torch.equal(packed.dequantize(), weight.dequantize())


def test_the_packed_bytes_become_the_codes_in_the_operand():
    """Words -> converter -> fragment, in numpy: what the tensor core multiplies is the code times 2^-8."""
    weight = random_weight(130, 333, 32)
    unit = fp8_format.unit_layout(32)
    codes, _ = unit.split(weight.pack().words.numpy())
    held = operand_tiles(codes, unit.block, get_converter("z4_e4m3").name)
    assert (held[:130, :333] * 2**8 == weight.codes.numpy()).all() and not held[130:].any() and not held[:, 333:].any()


def test_files_name_the_layout(tmp_path):
    packed = random_weight(bias=torch.randn(70)).pack()
    packed.save(tmp_path / "w.safetensors")
    back = fp8.PackedWeight.load(tmp_path / "w.safetensors")
    assert torch.equal(back.words, packed.words) and back.layout.startswith("z4_e4m3:") and back.group_size == 64
    with pytest.raises(ArgumentError, match="version"):
        w4a8.PackedWeight.load(tmp_path / "w.safetensors")
    dataclasses.replace(packed, layout=w4a8.quantize(torch.randn(70, 333)).layout).save(tmp_path / "other.safetensors")
    with pytest.raises(LayoutMismatchError, match="z4_e4m3"):
        fp8.PackedWeight.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_checkpoint_scales_split_without_rounding(dtype):
    rng = torch.Generator().manual_seed(1)
    scales = (torch.randn(40, 6, generator=rng) * 2.0 ** torch.randint(-8, 3, (40, 6), generator=rng)).to(dtype)
    scales[3], scales[4, 1] = 0, 0
    codes = torch.randint(-8, 8, (40, 192), generator=rng)
    weight = fp8.QuantizedWeight.canonical(codes, scales, group_size=32)
    expected = codes.double() * scales.double().repeat_interleave(32, dim=1)
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("name", ["ct_channel", "ct_channel_packed", "ct_group"])
def test_checkpoint_layers_are_read_exactly(name):
    from safetensors.torch import load_file

    tensors = load_file(DATA / f"{name}.safetensors")
    layer = {key.removeprefix("layer."): t for key, t in tensors.items() if key.startswith("layer.")}
    weight = fp8.read_compressed_tensors(**layer)
    assert torch.equal(weight.dequantize(), tensors["expected.weight"].double())
    assert torch.equal(fp8.from_compressed_tensors(**layer).dequantize(), weight.dequantize())


def test_layers_with_zero_points_are_refused():
    codes, scales = torch.randint(-8, 8, (4, 64)).char(), torch.rand(4, 2).half()
    assert fp8.read_compressed_tensors(codes, scales, torch.zeros(4, 2).char()).group_size == 32
    with pytest.raises(ArgumentError, match="symmetric"):
        fp8.read_compressed_tensors(codes, scales, torch.ones(4, 2).char())


def test_one_group_is_kept_as_groups_of_128():
    codes, scales = torch.randint(-8, 8, (5, 300)), torch.rand(5, 1).half()
    weight = fp8.QuantizedWeight.canonical(codes, scales, group_size=300)
    assert weight.group_size == 128 and weight.scales.shape == (5, 3)
    assert torch.equal(weight.dequantize(), codes.double() * scales.double())
    quantized = fp8.quantize_weight(torch.randn(5, 300), group_size=300)
    assert quantized.scales.shape == (5, 3) and bool((quantized.scales == quantized.scales[:, :1]).all())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codes": torch.full((4, 64), 8)}, "-8..7"),
        ({"codes": torch.zeros(4, 64)}, "integers"),
        ({"scales": torch.ones(4, 2).half()}, "scales"),
        ({"scales": torch.full((4, 1), float("nan")).half()}, "finite"),
        ({"scales": torch.full((4, 1), 1 / 3)}, "float16"),
        ({"scales": torch.ones(4, 1), "channel_scales": torch.ones(4)}, "float16"),
        ({"channel_scales": torch.ones(5)}, "channel_scales"),
        ({"channel_scales": torch.full((4,), 1e35)}, "channel_scales"),
        ({"group_size": 16}, "group_size"),
        ({"group_size": 64.0}, "group_size"),
        ({"group_size": np.int64(64)}, "group_size"),
        ({"scales": torch.full((4, 1), 1e35)}, "scales = .*must be at most 8.3e[+]34"),
        ({"smooth": torch.zeros(64)}, "positive"),
        ({"bias": torch.zeros(3)}, "bias"),
    ],
)
def test_canonical_weights_are_checked(changes, words):
    facts = dict(codes=torch.zeros(4, 64, dtype=torch.int8), scales=torch.ones(4, 1).half(), group_size=64) | changes
    codes, scales = facts.pop("codes"), facts.pop("scales")
    with pytest.raises(ArgumentError, match=words):
        fp8.QuantizedWeight.canonical(codes, scales, **facts)


def test_messages_name_what_the_caller_passed():
    with pytest.raises(ArgumentError, match="weight = 'scales up to .*scale the weight down"):
        fp8.quantize(torch.full((64, 128), 3e38))
    with pytest.raises(ArgumentError, match="weight_scale = 0.33.*must be a float16"):
        fp8.read_compressed_tensors(torch.zeros(4, 64, dtype=torch.int8), torch.full((4, 1), 1 / 3))


def test_scales_of_any_stride_are_packed():
    """[64, 1] counts as contiguous with any stride."""
    codes, scales = torch.randint(-8, 8, (64, 128)), torch.rand(1, 64).half()
    weight = fp8.QuantizedWeight.canonical(codes, scales.T, torch.ones(64), group_size=128)
    assert torch.equal(weight.pack().dequantize(), codes.double() * scales.T.double())


def test_targets_without_e4m3_are_refused_by_name():
    weight = random_weight()
    for target in ("sm_80", "sm_86"):
        with pytest.raises(ArgumentError, match="int8 activations"):
            weight.pack(target=target)
        with pytest.raises(ArgumentError, match="int8 activations"):
            w4a8.kernel_requests(64, 256, target=target, dequantization="e4m3")
    assert weight.pack(target="sm_89").target == "sm_89"
    with pytest.raises(ArgumentError, match="QuantizedWeight"):
        fp8.pack(w4a8.quantize(torch.randn(64, 128)).unpack())


# -- quantizers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("group", [32, 64, 128, 320])
def test_scales_leave_less_error_than_the_plain_rule(group):
    w = torch.randn(48, 320, generator=torch.Generator().manual_seed(group)) * 0.02
    w[5], w[6, :40] = 0, 0
    weight = fp8.quantize_weight(w, group_size=group, smooth=torch.full((320,), 2.0))
    found = (weight.dequantize() - 2 * w.double()).square().sum()
    padded = torch.nn.functional.pad(2 * w, (0, -320 % group)).view(48, -1, group)
    step = padded.abs().amax(-1, keepdim=True) / 7
    plain = torch.where(step == 0, 0, padded / step).round() * step
    assert found < 0.95 * (plain - padded).square().sum() and not weight.codes[5].any()


def test_activations_use_all_of_e4m3():
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    q, scales = fp8_reference.quantize_activations(x, smooth=torch.full((200,), 0.5))
    assert q.dtype == torch.float8_e4m3fn and bool((q.float().abs().amax(1)[[0, 2, 3, 4]] == 448).all())
    assert scales[1] == 1 and not q[1].float().any()
    relative = (q.float() * scales[:, None] - 2 * x).abs() / (2 * x).abs().clamp(min=1e-2)
    assert relative[[0, 2, 3, 4]].max() <= 2.0**-4 * 1.01


def test_the_bound_holds_for_a_tensor_core_of_13_bits():
    """FP22 as it is described: 32 products and the sum, cut towards zero to 13 bits below the largest exponent."""
    weight = random_weight(24, 256, 64)
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(2))
    x[:, ::50] *= 30
    q, scales = fp8_reference.quantize_activations(x)
    total = torch.zeros(6, 24)
    for start in range(0, 256, 64):
        part = torch.zeros(6, 24, dtype=torch.float64)
        for at in (start, start + 32):
            products = q[:, None, at : at + 32].double() * weight.codes[None, :, at : at + 32].double() * 2.0**-8
            terms = torch.cat([products, part[..., None]], dim=-1)
            unit = 2.0 ** (torch.frexp(terms.abs().amax(-1, keepdim=True)).exponent - 1 - 13)
            part = ((terms / unit).trunc() * unit).sum(-1)
        total += part.float() * weight.scales[:, start // 64].float()
    y = (total * weight.channel_scales * 2.0**8 * scales[:, None]).half()
    ref = fp8_reference.gemm(q, scales, weight)
    bound = fp8_reference.forward_error_bound(q, scales, weight, torch.float16)
    error = (y.double() - ref).abs()
    assert bool((error <= bound).all())
    assert bool((error > fp8_reference.forward_error_bound(q, scales, weight, torch.float16, None, 23)).any())


# -- schedules and requests --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("n", "k"), [(64, 128), (448, 640), (28672, 4096), (4096, 14336), (57344, 8192)])
def test_every_m_has_a_kernel_of_its_target(n, k):
    for arch, programs in (("sm_90a", {"stream_k"}), ("sm_89", {"small_batch", "multistage"})):
        target, seen = Target.parse(arch), set()
        for m in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 1000, 5000):
            problem = Gemm.of_bytes(n, k, 64, activations="e4m3")
            program, schedule = linear_spaces.of(problem).heuristic(target, m)
            seen.add(program)
            assert schedule.smem_bytes(problem) <= target.smem_per_block
            if program == "stream_k":
                assert schedule.legal() and schedule.stages >= 2
            product = op.Facts(n, k, group_size=64, out_dtype="float16", dequantization="e4m3")
            found = plans.plan(m, product, target)
            assert found.request.name == f"w4a8.{program}"
        assert seen == programs


@pytest.mark.parametrize(
    ("m", "n", "k", "of_128", "of_256"),  # microseconds over those of torch's fp8 in the same run, one H200 each
    [
        (256, 4096, 4096, 0.995, 1.003),
        (256, 28672, 4096, 1.077, 1.095),
        (1024, 4096, 4096, 1.120, 1.056),
        (1024, 6144, 4096, 1.076, 1.193),
        (1024, 28672, 4096, 1.166, 1.090),
        (4096, 4096, 14336, 1.137, 1.101),
        (4096, 6144, 4096, 1.169, 1.089),
    ],
)
def test_tiles_of_256_tokens_are_taken_where_they_were_faster(m, n, k, of_128, of_256):
    problem = Gemm.of_bytes(n, k, 128, activations="e4m3")
    chosen = stream_k.choose(problem, Target.parse("nvidia/nvidia-h200"), m)
    assert (chosen.block_tokens == 256) == (of_256 < of_128)


def test_requests_know_the_activations():
    found = w4a8.kernel_requests(128, 300, group_size=300, m=(4, 100), target="sm_90a", dequantization="e4m3")
    assert {r.name for r in found} == {"w4a8.stream_k", "w4a8.quantize_rows"}
    for request in found:
        params = dict(request.params)
        assert params.get("codes", "e4m3") == "e4m3" and params.get("group", 128) == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 16}, "group"),
        ({"out_dtype": "int32"}, "out_dtype"),
        ({"pipeline": "small_batch"}, "emulates"),
        ({"pipeline": "multistage"}, "emulates"),
        ({"pipeline": "imfp", "target": "sm_89"}, "wgmma"),
        ({"target": "sm_80"}, "e4m3"),
    ],
)
def test_requests_that_no_kernel_serves(changes, words):
    facts = {"n": 64, "k": 256, "target": "sm_90a", "dequantization": "e4m3"} | changes
    with pytest.raises(ArgumentError, match=words):
        w4a8.kernel_requests(**facts)


# -- calls -------------------------------------------------------------------------------------------------------------
def quantized(m=2, k=128):
    q, scales = fp8_reference.quantize_activations(torch.randn(m, k))
    return w4a8.QuantizedActivations(q, scales, None, (m, k))


def test_quantized_activations_are_checked():
    made = quantized()
    made.check()
    assert made.codes == "e4m3" and made.dequantize().shape == (2, 128)
    with pytest.raises(ArgumentError, match="quantize_activations"):
        dataclasses.replace(made, scales=made.scales[:1]).check()


_W, _X = fp8.quantize(torch.randn(64, 128)), torch.zeros(2, 128).half()


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("CUDA device", lambda: w4a8.gemm(_X, _W)),
        ("CUDA device", lambda: w4a8.gemm(quantized(), _W)),
        ("CUDA device", lambda: fp8.quantize_activations(_X)),
        ("K = 128", lambda: fp8.gemm(_X[:, :120], _W)),
        ("multiplies int8", lambda: w4a8.gemm(quantized(), w4a8.quantize(torch.randn(64, 128)))),
        ("multiplies e4m3", lambda: w4a8.gemm(dataclasses.replace(quantized(), q=torch.zeros(2, 128).char()), _W)),
        ("codes", lambda: w4a8.quantize_activations(_X, codes="e5m2")),
        ("out", lambda: w4a8.quantize_activations(_X, out=quantized())),
        ("PackedWeight", lambda: w4a8.gemm(_X, _W.unpack())),
        ("no_grad", lambda: w4a8.gemm(_X.clone().requires_grad_(), _W)),
    ],
)
def test_bad_calls_are_refused_before_anything_runs(words, call):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.parametrize("step", [2, 5])
def test_kernels_get_bytes_and_no_row_sums(monkeypatch, step):
    """A launch, or several of `step` tokens: their parts of x and y, and the stand-in for row sums each time."""
    seen, x = [], quantized(5)

    def kernel(q, words, channels, scales, sums, bias, workspace, semaphores, y, *scalars):
        assert q.dtype == torch.int8 and sums.shape == (1,) and len(q) == len(scales) == len(y)
        seen.append(q)
        y.fill_(len(seen))

    ready = (None, kernel, (None, None), (), torch.empty(1), step, torch.empty(1, dtype=torch.int32))
    monkeypatch.setattr(CALLS, "prepare", lambda *given: ready)
    y = w4a8.gemm(x, _W)
    assert torch.equal(torch.cat(seen), x.q.view(torch.int8)) and y.dtype == torch.float16
    assert y[:, 0].tolist() == ([1, 1, 2, 2, 3] if step == 2 else [1] * 5)


def test_the_traced_operator_knows_its_shapes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    w = fp8.quantize(torch.randn(70, 100), smooth=torch.ones(100))
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 5, 100, dtype=torch.bfloat16)
        y, made = w4a8.gemm(x, w), fp8.quantize_activations(x, smooth=w.smooth)
        again = w4a8.gemm(made, w, out_dtype=torch.float16)
    assert (y.shape, y.dtype) == ((3, 5, 70), torch.bfloat16) and made.row_sums is None
    assert (made.q.shape, made.q.dtype) == ((15, 112), torch.float8_e4m3fn) and again.dtype == torch.float16
