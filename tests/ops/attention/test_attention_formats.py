"""KV formats without a GPU: derived layouts, packing, what the tensor core sees, quantization, paging."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from terrazzo.layouts.converters import arith
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.attention.cache import cache as caches
from terrazzo.ops.attention.cache import quantizer
from terrazzo.ops.attention.cache.layout import CacheLayout, exponents, operand_layout
from terrazzo.ops.attention.decoding import reference
from terrazzo.ops.products.kv import FORMATS, HEAD_DIMS, get_format

VALUES = [f.name for f in FORMATS.values() if f.for_values]
SCALE = 0.03


def static(fmt: str, heads: int, head_dim: int) -> torch.Tensor | None:
    """f32 scales [heads, D], different for each dimension, where the format asks for them."""
    if get_format(fmt).scaling != "static":
        return None
    return SCALE * (1 + torch.arange(heads * head_dim).reshape(heads, head_dim) % 7 / 8)


def quantized(fmt: str, shape, seed: int = 0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
    s = static(fmt, shape[-3], shape[-1])
    return x, quantizer.quantize(x, fmt, None if s is None else s.unsqueeze(-2)), s


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
def test_layouts_are_proved_and_exponents_separate(name, head_dim):
    fmt = get_format(name)
    for transposed in (False, True):
        layout = operand_layout(fmt, head_dim, transposed)
        proof = layout.prove()
        assert proof.ok, str(proof)
        assert (layout.block_k if transposed else layout.block_rows) == 16
        e = exponents(fmt, layout)
        assert e.row[0] <= e.row[1] and e.k[0] == 0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("transposed", [False, True], ids=["keys", "values"])
def test_registers_hold_codes_times_the_folded_exponents(name, head_dim, transposed):
    """Packed word -> device converter (emulated) -> A register -> fragment: the code of that row and k."""
    fmt = get_format(name)
    layout = operand_layout(fmt, head_dim, transposed)
    rng = np.random.default_rng(1)
    rows, depth = (head_dim, 16) if transposed else (16, head_dim)
    high = 1 << fmt.bits
    codes = rng.integers(0, high, (rows, depth)).astype(np.uint16 if fmt.bits == 16 else np.uint8)
    if fmt.storage in ("f16", "bf16"):
        codes &= 0xBFFF if fmt.storage == "f16" else 0xBF7F  # finite
    if fmt.storage == "e4m3":
        codes = np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8)
    words = layout.pack(codes).reshape(-1, layout.threads, layout.load_words)
    e, fragment = exponents(fmt, layout), layout.fragment
    registers = fmt.converter.emulate(words)  # [load, thread, word, output]
    for load in range(len(words)):
        for word in range(layout.load_words):
            for output in range(fmt.converter.outputs):
                atom, register = layout.target(word, output)
                held = arith.elements(registers[load, :, word, output], fmt.operand)
                for element in range(2):
                    row, k = fragment(np.arange(32), register * 2 + element)
                    at_row, at_k = layout.placement[atom]
                    row = row + at_row * 16 + (load * layout.block_rows if transposed else 0)
                    k = k + at_k * 16 + (0 if transposed else load * layout.block_k)
                    expected = plain(codes[row, k], fmt) * 2.0 ** (e.row[register % 2] + e.k[register // 2])
                    np.testing.assert_array_equal(held[:, element], expected)


def plain(codes: np.ndarray, fmt) -> np.ndarray:
    """What a code means without bias, scale and zero."""
    if fmt.storage == "f16":
        return codes.view(np.float16).astype(np.float64)
    if fmt.storage == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if fmt.storage == "e4m3":
        return torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn).double().numpy()
    return codes.astype(np.float64)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("k_format", FORMATS)
def test_pack_and_unpack_are_inverse(k_format, head_dim):
    for v_format in VALUES:
        layout = CacheLayout(k_format, v_format, head_dim)
        parts = [quantized(f, (2, 256, head_dim), seed)[1] for seed, f in enumerate((k_format, v_format))]
        words = layout.pack(*parts)
        assert words.shape == (2, 256 // layout.block_tokens, layout.block_words) and words.dtype == torch.int32
        assert layout.words(256) == words[0].numel()
        for made, part in zip(layout.unpack(words), parts):
            for name in ("codes", "scale", "zero"):
                a, b = getattr(made, name), getattr(part, name)
                assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), name


def test_lanes_find_their_parameters_where_the_program_loads_them():
    """Token-wise: lane 4 g + t reads the words of tokens g and g + 8, keys before values. Channel-wise: the words of a
    quad position are (scale, scale) pairs of the dimensions in its B fragments."""
    layout = CacheLayout("int4", "int4", 128)
    k, v = (quantized("int4", (1, 16, 128), seed)[1] for seed in (0, 1))
    tile = layout.pack(k, v)[0, 0]
    params = tile[layout.param_offset :].view(torch.float16).reshape(8, 2, 2, 2)  # g, keys | values, pair, (s, z)
    for g in range(8):
        for role, q in enumerate((k, v)):
            for pair in range(2):
                token = g + 8 * pair
                assert params[g, role, pair].tolist() == [q.scale[0, token], q.zero[0, token]]
    layout = CacheLayout("int4_channel32", "int4", 64)
    k, v = quantized("int4_channel32", (1, 32, 64))[1], quantized("int4", (1, 32, 64))[1]
    scales = layout.pack(k, v)[0, 0, : layout.channel_words // 2].view(torch.float16).reshape(-1, 4, 4, 2)
    for load in range(2):
        for t in range(4):
            for word in range(4):
                first = (2 * load + word // 2) * 16 + word % 2 * 8 + 2 * t
                assert scales[load, t, word].tolist() == k.scale[0, 0, first : first + 2].tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_quantization_error_is_at_most_half_a_step(name):
    fmt = get_format(name)
    x, q, s = quantized(name, (3, 256, 64))
    back = quantizer.dequantize(q, name, None if s is None else s.unsqueeze(-2))
    if fmt.rotated:  # codes are those of rotated tokens
        x, back = quantizer.rotate(x), quantizer.rotated_exactly(back)
    if fmt.scaling in ("token", "channel"):
        step = (
            q.scale.double().unsqueeze(-1)
            if fmt.scaling == "token"
            else q.scale.double().repeat_interleave(fmt.group, 1)
        )
        # half a step, the rounded zero, and what the rounded scale loses over all levels
        bound = step * (0.5 + fmt.levels * 2.0**-11) + x.abs().max() * 2.0**-11
        if fmt.clip:  # values beyond the range that was chosen take its nearest end
            low, high = back.amin(-1, keepdim=True), back.amax(-1, keepdim=True)
            bound = torch.where(
                (x >= low - bound) & (x <= high + bound), bound, torch.maximum(low - x, x - high) + bound
            )
    elif fmt.scaling == "static":
        step = s.double().unsqueeze(-2)
        limit = 127 if fmt.bias else 448
        inside = x.abs() <= limit * step
        half = step / 2 if fmt.bias else torch.maximum(x.double().abs() * 2.0**-4, step * 2.0**-10)
        bound = torch.where(inside, half * 1.001, torch.inf)
    else:
        bound = x.double().abs() * (2.0**-11 if fmt.storage == "f16" else 2.0**-8) + 2.0**-25
    assert ((back - x).abs() <= bound).all()


def test_equal_values_and_wide_ranges_are_quantized_to_finite_numbers():
    for x in (torch.full((2, 32, 64), -1.25), torch.randn(2, 32, 64) * 1e5, torch.zeros(2, 32, 64)):
        for name in ("int8", "int4", "int2", "int4_channel32"):
            q = quantizer.quantize(x, name)
            assert q.scale.isfinite().all() and q.zero.isfinite().all()
            if x.std() == 0:
                assert torch.equal(quantizer.dequantize(q, name), x.double())


@pytest.mark.parametrize("k_format", ["float16", "int8", "int4", "int4_channel64", "int2_channel32"])
@pytest.mark.parametrize("page_size", [0, 64, 128])
@pytest.mark.parametrize("residual", [None, 64])
def test_a_cache_gives_back_what_was_quantized(k_format, page_size, residual):
    group = get_format(k_format).group
    if residual is not None and group:
        residual = group
    lengths = torch.tensor([130, 0, 256, 1, 64])
    x = torch.randn(2, 5, 2, 256, 64, generator=torch.Generator().manual_seed(0)).half()
    pages = 5 * (256 // page_size) if page_size else 0
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)) if pages else None
    made = caches.pack_cache(
        x[0], x[1], k_format, "int4", lengths=lengths, page_size=page_size, residual=residual, permutation=order
    )
    n = made.residual_tokens
    assert n == (group if residual is None else residual)
    for b, length in enumerate(lengths.tolist()):
        k, v = made.dequantize(b, 1)
        assert k.shape == v.shape == (length, 64)
        packed = made.layout.packed(length, n)
        whole = packed - packed % (group or 16)
        if whole:
            q = quantizer.quantize(x[0, b, 1, :whole], k_format)
            assert torch.equal(k[:whole], quantizer.dequantize(q, k_format))
        q = quantizer.quantize(x[1, b, 1, :packed], "int4") if packed else None
        if q is not None:
            assert torch.equal(v[:packed], quantizer.dequantize(q, "int4"))
        assert torch.equal(k[packed:], x[0, b, 1, packed:length].double())


def test_the_oracle_against_a_second_formula():
    x = torch.randn(2, 3, 2, 96, 64, generator=torch.Generator().manual_seed(3)).half()
    q = torch.randn(3, 4, 6, 64, generator=torch.Generator().manual_seed(4)).half()
    made = caches.pack_cache(x[0], x[1], "float16", "float16", lengths=torch.tensor([96, 40, 4]))
    out, lse, bound = reference.decode(q, made)
    for b, length in enumerate((96, 40, 4)):
        mask = torch.ones(4, length, dtype=torch.bool).tril(length - 4)
        k, v = (part[b, :, :length].double().repeat_interleave(3, 0) for part in x)
        y = torch.nn.functional.scaled_dot_product_attention(q[b].double().transpose(0, 1), k, v, attn_mask=mask)
        torch.testing.assert_close(out[b], y.transpose(0, 1))
        s = (q[b].double().transpose(0, 1) @ k.mT / 8).masked_fill(~mask, -torch.inf)
        torch.testing.assert_close(lse[b], torch.logsumexp(s, -1).T / np.log(2))
    assert (bound > 0).all() and (bound < 0.02 * out.abs().max()).all()


def test_oracle_options():
    x = torch.randn(2, 1, 1, 48, 64, generator=torch.Generator().manual_seed(5)).half()
    q = 4 * torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(6)).half()
    made = caches.pack_cache(x[0], x[1], "float16", "float16")
    full = reference.decode(q, made, bounded=False)[0]
    window = reference.decode(q, made, reference.Options(window=1))[0]
    torch.testing.assert_close(window[0, 1], x[1, 0, 0, 47].double().expand(3, -1))
    sinks = torch.tensor([-torch.inf, 50.0, 0.0])
    with_sinks, lse, _ = reference.decode(q, made, reference.Options(sinks=sinks))
    torch.testing.assert_close(with_sinks[..., 0, :], full[..., 0, :])
    assert with_sinks[..., 1, :].abs().max() < 1e-6 and (lse[..., 1] > 72).all()
    capped = reference.decode(q, made, reference.Options(softcap=1e6))[0]
    torch.testing.assert_close(capped, full, rtol=1e-6, atol=1e-6)
    nothing = caches.pack_cache(x[0], x[1], "float16", "float16", lengths=torch.tensor([0]))
    out, lse, bound = reference.decode(q, nothing)
    assert not out.any() and (lse == -torch.inf).all() and not bound.any()


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("k_format", lambda: CacheLayout("int3", "int4", 128)),
        ("v_format", lambda: CacheLayout("int4", "int4_channel64", 128)),
        ("head_dim", lambda: CacheLayout("int4", "int4", 96)),
        ("tokens", lambda: CacheLayout("int4_channel64", "int4", 128).words(96)),
        ("static", lambda: quantizer.quantize(torch.zeros(1, 16, 64), "fp8")),
        ("static", lambda: quantizer.quantize(torch.zeros(1, 16, 64), "int4", torch.ones(64))),
        ("static", lambda: quantizer.quantize(torch.zeros(1, 16, 64), "fp8", torch.ones(3, 1, 64))),
        ("static", lambda: quantizer.quantize(torch.zeros(1, 16, 64), "fp8", torch.ones(1, 1, 1, 64))),
        ("x", lambda: quantizer.quantize(torch.zeros(1, 40, 64), "int4_channel32")),
        ("residual", lambda: caches.pack_cache(*torch.zeros(2, 1, 1, 64, 64), "int4_channel32", "int4", residual=64)),
    ],
)
def test_bad_arguments_are_named(argument, call):
    with pytest.raises(ArgumentError, match=argument):
        call()


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("k = 'NoneType'", {"k": None}),
        ("k = .*nothing empty", {"k": torch.zeros(2, 64, 64)}),
        ("k = .*must be float", {"k": torch.zeros(2, 1, 64, 64, dtype=torch.int32)}),
        ("v = .*as k", {"v": torch.zeros(2, 1, 32, 64)}),
        ("lengths = 65", {"lengths": torch.tensor([65, 1])}),
        ("lengths = -1", {"lengths": torch.tensor([1, -1])}),
        ("lengths = .*integers", {"lengths": torch.tensor([1.5, 1])}),
        ("lengths = .*integers", {"lengths": torch.tensor([1])}),
        ("page_size = 24", {"page_size": 24}),
        ("permutation", {"page_size": 64, "permutation": torch.zeros(2, dtype=torch.int64)}),
        ("k_static = .*must be within", {"k_format": "fp8", "k_static": torch.zeros(1, 64)}),
        ("k_static = .*must be float", {"k_format": "fp8", "k_static": torch.ones(64)}),
        ("k_static = None", {"k_format": "fp8"}),
    ],
)
def test_what_cannot_be_packed_is_refused(words, changes):
    given = {"k": torch.zeros(2, 1, 64, 64), "v": torch.zeros(2, 1, 64, 64), "k_format": "int4", "v_format": "int4"}
    with pytest.raises(ArgumentError, match=words):
        caches.pack_cache(**given | changes)
