"""The quantizer: the brute-force findings of specs.md D, its rules against a plain loop, smoothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a8
from terrazzo.ops.quantizers import rows
from terrazzo.ops.w4a8 import reference
from terrazzo.ops.w4a8.quantizer import RULES, first_level, second_level


def every_group(span: int):
    """(rule, value, raw code, code, scale, offset) of every value of every (min, max) pair in [-span, span].

    Written here once more, from the paper's equations."""
    for rule in ("nearest", "ceil"):
        low, high, value = np.meshgrid(*[np.arange(-span, span + 1)] * 3, indexing="ij", sparse=True)
        inside = (low <= value) & (value <= high)
        low, high, value = (np.broadcast_to(a, inside.shape)[inside] for a in (low, high, value))
        steps = (high - low) / 15
        scale = np.maximum(1, np.floor(steps + 0.5) if rule == "nearest" else np.ceil(steps)).astype(int)
        raw = np.floor((value - low) / scale + 0.5).astype(int)
        yield rule, value, raw, np.minimum(raw, 15), scale, 128 + low


def test_no_intermediate_leaves_the_byte_and_xor_gives_the_value():
    """28680 (min, max) pairs, 2.3 million values; specs.md D, equations 7 to 12."""
    for rule, value, raw, codes, scale, offset in every_group(119):
        assert len(value) == 2_303_960 and scale.max() == 16 and (offset.min(), offset.max()) == (9, 247)
        product, sums = codes * scale, codes * scale + offset
        assert product.max() <= 255 and sums.max() <= 255 and sums.min() >= 0
        restored = (sums.astype(np.uint8) ^ 0x80).view(np.int8)
        assert (restored == codes * scale + (offset - 128)).all()
        assert np.abs(restored.astype(int) - value).max() <= 8
        assert (raw > 15).sum() == (27_888 if rule == "nearest" else 0)  # the clamp that the paper omits


def test_119_is_the_largest_safe_range():
    unsafe = {rule: (codes * scale + offset).max() > 255 for rule, _, _, codes, scale, offset in every_group(121)}
    assert unsafe == {"nearest": True, "ceil": True}
    assert {rule: (c * s + a).max() > 255 for rule, _, _, c, s, a in every_group(120)} == {
        "nearest": False,
        "ceil": True,
    }


@pytest.mark.parametrize("rule", ["nearest", "ceil"])
def test_the_rules_are_the_papers(rule):
    pairs = [(low, high) for low in range(-119, 120, 7) for high in range(low, 120, 5)]
    values = torch.tensor([[low + (high - low) * i // 31 for i in range(32)] for low, high in pairs])
    codes, scales, offsets = second_level(values.float(), 32, rule)
    for row, (low, high) in enumerate(pairs):
        steps = (high - low) / 15
        scale = max(1, int(np.floor(steps + 0.5)) if rule == "nearest" else int(np.ceil(steps)))
        assert scales[row].item() == scale and offsets[row].item() == 128 + low
        expected = [min(15, int(np.floor((v - low) / scale + 0.5))) for v in values[row].tolist()]
        assert codes[row].tolist() == expected


def relative_error(w: torch.Tensor, **options) -> float:
    restored = w4a8.quantize_weight(w, **options).dequantize()
    return float((restored - w.double()).square().sum() / w.double().square().sum())


def test_best2_is_never_worse_in_any_group_and_better_overall():
    w = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    _, values = first_level(w)
    found = {}
    for rule in RULES:
        codes, scales, offsets = (t.float() for t in second_level(values, 64, rule))
        restored = codes * scales.repeat_interleave(64, 1) + offsets.repeat_interleave(64, 1) - 128
        found[rule] = (restored - values).square().view(64, -1, 64).sum(-1)
    assert (found["best2"] <= torch.minimum(found["nearest"], found["ceil"])).all()
    assert (found["search"] <= found["best2"]).all() and found["search"].mean() < 0.93 * found["best2"].mean()
    # Gaussian weights, group 64 (specs.md D): 8.14e-3 best2, 8.42e-3 nearest, 9.08e-3 ceil
    errors = {rule: relative_error(w, rule=rule) for rule in RULES}
    for rule, expected in (("best2", 8.14e-3), ("nearest", 8.42e-3), ("ceil", 9.08e-3)):
        assert abs(errors[rule] / expected - 1) < 0.05, (rule, errors[rule])


def test_searched_ranges_keep_the_byte():
    """Every (min, max) pair with all values between them, two of each."""
    pairs = [(low, high) for low in range(-119, 120) for high in range(low, 120)]
    values = torch.tensor([[low + (high - low) * i // 127 for i in range(128)] for low, high in pairs]).float()
    codes, scales, offsets = (t.int() for t in second_level(values, 128, "search"))
    bytes_ = codes * scales + offsets
    assert int(bytes_.min()) >= 0 and int(bytes_.max()) <= 255 and int(codes.max()) == 15


def test_importance_moves_the_error_to_channels_that_count_less():
    """The expected error of an output: squared errors weighted by the inputs' mean square, smoothed or not."""
    rng = torch.Generator().manual_seed(2)
    w, smooth = torch.randn(64, 500, generator=rng), torch.rand(500, generator=rng) + 0.5
    importance = torch.rand(500, generator=rng) ** 4

    def output_error(quantize, **options) -> float:
        made = quantize(w, smooth=smooth, **options).dequantize() / smooth.double()
        return float(((made - w.double()).square() * importance).sum())

    for quantize, options in ((w4a8.quantize_weight, {"rule": "search"}), (w4a8.fp8.quantize_weight, {})):
        weighted = output_error(quantize, importance=importance, **options)
        assert weighted < 0.95 * output_error(quantize, **options)
    with pytest.raises(ArgumentError, match="rule='search'"):
        w4a8.quantize(w, importance=importance)
    for bad in (importance[:5], -importance, importance.log() * torch.inf):
        with pytest.raises(ArgumentError, match="^importance"):
            w4a8.quantize(w, importance=bad, rule="search")


@pytest.mark.parametrize("k", [1, 31, 100, 203, 320])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_ragged_groups_do_not_see_padding(k, group):
    w = torch.rand(9, k, generator=torch.Generator().manual_seed(k)) + 1  # padding by 0 would stretch the range
    quantized = w4a8.quantize_weight(w, group_size=group)
    assert quantized.codes.shape == w.shape
    tail = w[:, k // group * group :]
    if tail.shape[1] > 1:
        restored = quantized.dequantize()[:, k // group * group :]
        assert ((restored - tail.double()).abs() <= (tail.amax(1) - tail.amin(1))[:, None] / 15 + 0.01).all()


def test_chunks_zeros_and_dtypes(monkeypatch):
    w = torch.randn(30, 500, generator=torch.Generator().manual_seed(1))
    w[3] = 0
    whole = w4a8.quantize_weight(w)
    monkeypatch.setitem(rows._CHUNK, "cpu", 7 * 500)
    parts = w4a8.quantize_weight(w)
    assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.channel_scales, parts.channel_scales)
    assert not whole.dequantize()[3].any() and whole.channel_scales[3] == 1
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert torch.equal(w4a8.quantize_weight(w.to(dtype)).codes, w4a8.quantize_weight(w.to(dtype).float()).codes)
    packed = w4a8.quantize(w, group_size=32, bias=torch.ones(30), target="sm_80")
    assert (packed.group_size, packed.target, packed.bias.sum()) == (32, "sm_80", 30)


@pytest.mark.parametrize(
    ("changes", "argument", "words"),
    [
        ({"weight": torch.zeros(8)}, "weight", "N, K"),
        ({"weight": torch.zeros(8, 8, dtype=torch.int8)}, "weight", "float tensor"),
        ({"weight": [[1.0]]}, "weight", "nn.Linear.weight"),
        ({"weight": torch.full((8, 64), float("nan"))}, "weight", "finite"),
        ({"group_size": 16}, "group_size", "use 64"),
        ({"rule": "floor"}, "rule", "best2"),
        ({"smooth": torch.ones(63)}, "smooth", r"\[64\]"),
        ({"smooth": torch.zeros(64)}, "smooth", "positive"),
    ],
)
def test_bad_input_names_argument_and_remedy(changes, argument, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        w4a8.quantize_weight(**({"weight": torch.randn(8, 64)} | changes))
    assert caught.value.argument == argument


# -- smoothing ---------------------------------------------------------------------------------------------------------
def calibration(outliers: float):
    rng = torch.Generator().manual_seed(4)
    x, w = torch.randn(96, 256, generator=rng), torch.randn(64, 256, generator=rng) * 0.02
    x[:, ::32] *= outliers
    return x, w


def test_smoothing_helps_where_channels_stick_out():
    x, w = calibration(60.0)
    found = w4a8.search_smooth(x.half(), w, steps=6)
    assert found.family != "none" and found.error < 0.5 * found.plain_error
    quantized = w4a8.quantize_weight(w, smooth=found.smooth)
    q, scales, _ = reference.quantize_activations(x.half(), found.smooth)
    y = reference.gemm(q, scales, quantized)
    wanted = x.half().double() @ w.double().T
    assert abs(float((y - wanted).square().sum() / wanted.square().sum()) / found.error - 1) < 1e-3
    effective = reference.dequantize(quantized, smoothed=False)
    assert float((effective - w.double()).square().mean().sqrt()) < 0.02  # the weight of x itself


def test_both_families_are_tried_and_nothing_is_worse_than_no_smoothing():
    x, w = calibration(60.0)
    from terrazzo.ops.w4a8.smooth import _candidates

    grid = list(_candidates(x.abs().amax(0), w.abs().amax(0), 4))
    assert [family for family, *_ in grid] == ["threshold"] * 4 + ["alpha"] * 4
    assert all((smooth > 0).all() and smooth.isfinite().all() for *_, smooth in grid)
    assert (grid[0][2] >= 1).all() and grid[0][2][::32].min() > 1
    silent = w4a8.search_smooth(torch.zeros(4, 256), w, steps=2)
    assert silent.smooth is None and silent.family == "none"
    found = w4a8.search_smooth(x[:1], w, steps=1, max_tokens=1)
    assert found.error <= found.plain_error


def test_leading_dimensions_of_calibration_activations_are_tokens():
    x, w = calibration(60.0)
    flat, batched = (w4a8.search_smooth(given, w, steps=2) for given in (x, x.view(4, 8, 3, 256)))
    assert torch.equal(flat.smooth, batched.smooth) and flat.error == batched.error
    one = w4a8.search_smooth(x[0], w, steps=1)
    assert one.plain_error == w4a8.search_smooth(x[:1], w, steps=1).plain_error


def test_smoothing_refuses_what_does_not_fit():
    x, w = calibration(1.0)
    for arguments, words in (
        ((x[:, :9], w), r"x = .*must be activations \[\.\.\., 256\]"),
        ((x[:0], w), "one token or more"),
        ((x[0, 0], w), "must be activations"),
        ((x * float("nan"), w), "finite"),
    ):
        with pytest.raises(ArgumentError, match=words):
            w4a8.search_smooth(*arguments)
    with pytest.raises(ArgumentError, match="steps"):
        w4a8.search_smooth(x, w, steps=0)


@pytest.mark.parametrize("factor", [1e30, 1e-30, 2.0**40, 2.0**-40])
def test_a_search_does_not_depend_on_the_size_of_activations(factor):
    x, w = torch.randn(32, 256), torch.randn(64, 256, requires_grad=True)
    x[:, 3] *= 50
    one, other = (w4a8.search_smooth((given * f).requires_grad_(), w, steps=2) for given, f in ((x, 1.0), (x, factor)))
    assert 0 < other.error < other.plain_error < 1 and not other.smooth.requires_grad
    assert abs(other.error / one.error - 1) < 0.2 and abs(other.plain_error / one.plain_error - 1) < 1e-3
    with pytest.raises(ArgumentError, match="weight = .*finite in float32"):
        w4a8.search_smooth(x, w / w.abs().max() * 3e38, steps=1)
