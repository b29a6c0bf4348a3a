"""A tensor core in numpy: W4A16 and W4A8 computed from packed words and packed parameters alone.

Every weight takes the way it takes on the GPU: thread's word -> converter (bit-exact) -> operand register -> fragment
-> MMA with f32 accumulation in steps of k16. Nothing but the layout knows where a weight lies, so an agreement with the
reference checks layout, packer, converter and parameter order together. For machines without a GPU.
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts.converters import arith, get_converter
from terrazzo.layouts.instances import get_instance
from terrazzo.layouts.packed import PackedLayout
from terrazzo.layouts.rows import RowLayout, derive_rows
from terrazzo.layouts.units import UnitLayout
from terrazzo.lowering.errors import LayoutError

NUMERICS = ("exact", "fused", "post")
SCALE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def round_to(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values rounded to float16 or bfloat16 (nearest even), as float64."""
    bits = arith.to_f16(values) if dtype == "float16" else arith.to_bf16(values)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _registers(values: np.ndarray, dtype: str) -> np.ndarray:
    """Each value in both halves of a uint32 register."""
    bits = arith.to_f16(values) if dtype == "float16" else arith.to_bf16(values)
    return bits.astype(np.uint32) * np.uint32(0x10001)


def read_params(params, rows: int, scale_dtype: str, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Scales and zero points, float64 [blocks, G, rows] in RowLayout order, from the packed bytes [blocks, G, R]."""
    raw = np.ascontiguousarray(np.asarray(params, dtype=np.uint8))
    width = SCALE_BYTES.get(scale_dtype)
    if width is None:
        raise LayoutError("scale_dtype", scale_dtype, f"must be one of {tuple(SCALE_BYTES)}", "convert the scales")
    expected = rows * (width + (not symmetric))
    if raw.ndim != 3 or raw.shape[2] != expected:
        raise LayoutError(
            "params", raw.shape, f"must be [blocks, groups, {expected}] bytes", "pack the scales with RowLayout"
        )
    bits = np.ascontiguousarray(raw[..., : rows * width])
    if scale_dtype == "bfloat16":
        scales = (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        scales = bits.view(np.dtype(scale_dtype))
    zeros = np.full(scales.shape, 8.0) if symmetric else raw[..., rows * width :].astype(np.float64)
    return scales.astype(np.float64), zeros


def _per_thread(values: np.ndarray, layout: PackedLayout, rows: RowLayout, groups: np.ndarray) -> list[np.ndarray]:
    """[blocks, G, R] to what each thread holds for rows g and g + 8: two of [blocks, k blocks, thread, word]."""
    slots = rows.slot(np.arange(layout.threads))
    return [np.moveaxis(values[:, groups][..., slots + pair], -1, 2) for pair in range(2)]


def operand_tiles(words: np.ndarray, layout: PackedLayout, converter: str, *params: np.ndarray) -> np.ndarray:
    """The A operand [N', K'] (float64) that the MMAs see, from packed words ("rk") and per-thread params."""
    convert = get_converter(converter)
    blocks, depth = words.shape[:2]
    held = np.ascontiguousarray(words).view(np.uint32).reshape(blocks, depth, layout.threads, layout.load_words)
    values = arith.elements(convert.emulate(held, *params), convert.operand)  # [..., thread, word, o, e]
    thread, word, output, element = np.indices(values.shape[2:]).reshape(4, -1)
    place = layout.map(field=convert.pos_map(register=output, element=element)["field"], word=word, thread=thread)
    tile = np.empty((blocks, layout.block_rows, depth, layout.block_k))
    tile[:, place["row"], :, place["k"]] = np.moveaxis(values.reshape(blocks, depth, -1), -1, 0)
    return tile.reshape(blocks * layout.block_rows, depth * layout.block_k)


def mma(a: np.ndarray, b: np.ndarray, acc: np.ndarray, step: int = 16) -> np.ndarray:
    """acc + a @ b in f32, one k step of the instruction at a time (each step's products are summed exactly)."""
    for k in range(0, a.shape[1], step):
        acc = (acc + a[:, k : k + step] @ b[k : k + step]).astype(np.float32)
    return acc


def emulate_w4a16(
    x,
    words,
    params,
    *,
    n: int,
    k: int,
    group_size: int,
    symmetric: bool,
    scale_dtype: str = "float16",
    operand: str = "float16",
    numerics: str = "exact",
    layout: PackedLayout | None = None,
) -> np.ndarray:
    """Y = X W^T as the GPU computes it, float32 [M, n], read from packed data only.

    Args:
        x: [M, k] activations (any float type; rounded to ``operand``), act-order already applied.
        words: uint32 / int32 [K'/64, N'/64, 512] of ``layout`` (block order "kr"; default: instance w4a16).
        params: uint8 [G', N'/64, R]: scales, then (if not symmetric) zero points, in RowLayout order.
        n, k: the unpadded extents. group_size: group along K; k or more means the whole of K.
        scale_dtype: "float16", "bfloat16", "float32". operand: "float16" or "bfloat16".
        numerics: "exact" = one rounding of (q - z) * s; "fused" = fma(q, s, round(-z*s)); "post" = integers in the MMA,
            scale and zero point applied to each group's f32 sum (specs.md B.3).
    Raises:
        LayoutError: unknown numerics or operand, or shapes that do not fit the layout.
    """
    layout = layout or get_instance("w4a16")
    short = {"float16": "f16", "bfloat16": "bf16"}.get(operand)
    if short is None or numerics not in NUMERICS:
        name, value = ("operand", operand) if short is None else ("numerics", numerics)
        raise LayoutError(name, value, f"must be float16 or bfloat16 / one of {NUMERICS}", "see emulate_w4a16")
    words, params = np.moveaxis(np.asarray(words), 1, 0), np.moveaxis(np.asarray(params), 1, 0)
    padded_n, padded_k = words.shape[0] * layout.block_rows, words.shape[1] * layout.block_k
    if n > padded_n or k > padded_k or words.shape[2:] != (layout.words_per_block,):
        raise LayoutError(
            "words", words.shape, f"must hold [{n}, {k}] packed as {layout.identity}", "pack with this layout"
        )
    order = derive_rows(layout.fragment, layout.block_rows)
    scales, zeros = read_params(params, layout.block_rows, scale_dtype, symmetric)
    step, depth = layout.fragment.cols, words.shape[1]
    size = group_size if group_size < k else padded_k
    starts = np.arange(depth)[:, None] * layout.block_k + step * np.arange(
        layout.load_words
    )  # k of every (block, word)
    group = np.minimum(starts // size, scales.shape[1] - 1)
    x = round_to(np.asarray(x, dtype=np.float64), operand)
    b = np.zeros((padded_k, x.shape[0]))
    b[:k] = x.T

    if numerics != "post":
        s, z = round_to(scales, operand), zeros
        convert = get_converter(f"u4_{short}_{numerics}")
        s_held = [_registers(v, operand) for v in _per_thread(s, layout, order, group)]
        if numerics == "exact":
            low = [
                _registers(v + bias, operand)
                for v, bias in zip(_per_thread(z, layout, order, group), convert.param_bias)
            ]
        else:
            low = [_registers(v, operand) for v in _per_thread(-z * s, layout, order, group)]
        a = operand_tiles(words, layout, convert.name, low[0], s_held[0], low[1], s_held[1])
        return mma(a, b, np.zeros((padded_n, x.shape[0]), np.float32), step)[:n].T.copy()

    convert = get_converter("u4_f16_subnormal" if operand == "float16" else "u4_bf16_biased")
    a = operand_tiles(words, layout, convert.name)
    # even output registers are rows g, odd ones rows g + 8: the power of two is a property of the row
    exponent = np.asarray(convert.scale_exp2[:2])[np.arange(layout.block_rows) % order.pair]
    bias = np.asarray(convert.bias[:2])[np.arange(layout.block_rows) % order.pair]
    back = np.argsort(order.index)
    fold = lambda values: values[..., back].transpose(1, 0, 2).reshape(values.shape[1], padded_n, 1)
    factor = fold(scales * 2.0**-exponent).astype(np.float32)
    offset = fold((zeros + bias) * 2.0**exponent).astype(np.float32)
    y = np.zeros((padded_n, x.shape[0]), np.float32)
    for index in range(-(-padded_k // size)):
        span = slice(index * size, (index + 1) * size)
        acc = mma(a[:, span], b[span], np.zeros_like(y), step)
        total = b[span].astype(np.float32).sum(axis=0, dtype=np.float32)
        y = (y + factor[index] * (acc - offset[index] * total)).astype(np.float32)
    return y[:n].T.copy()


W4A8_CONVERTERS = {"xor": "u4_s8_lqq", "unsigned": "u4_u8_lqq", "signed": "s4_s8_lqq"}
"""Dequantization -> converter: signed bytes, bytes that hold the value plus 128, signed bytes of signed codes."""


def operand_w4a8(words, unit: UnitLayout, dequantization: str = "xor") -> np.ndarray:
    """The A operand int64 [N', K'] that the integer MMAs see: signed values (xor), or 0..255 (unsigned).

    Args:
        words: uint32 / int32 [K'/unit_k, N'/rows, unit.words]; the first parameter of a record is the scale.
        unit: layout of `words`.
    """
    if dequantization not in W4A8_CONVERTERS:
        raise LayoutError("dequantization", dequantization, f"must be one of {tuple(W4A8_CONVERTERS)}", "use 'xor'")
    convert, layout = get_converter(W4A8_CONVERTERS[dequantization]), unit.block
    codes, records = unit.split(np.ascontiguousarray(words).view(np.uint32))
    blocks, depth = codes.shape[:2]
    held = codes.reshape(blocks, depth, layout.threads, layout.load_words)
    tile = np.empty((blocks, layout.block_rows, depth, layout.block_k), np.int64)
    slots = unit.rows.slot(np.arange(layout.threads))
    group_k = unit.unit_k // unit.groups
    thread, word, element = np.indices((layout.threads, layout.load_words, convert.elements)).reshape(3, -1)
    for output in range(convert.outputs):
        atom, register = layout.target(np.arange(layout.load_words), output)  # register & 1 picks row g or g + 8
        starts = np.arange(depth)[:, None] * layout.block_k + np.asarray(atom) * layout.fragment.cols
        params = records[:, starts // group_k][:, :, :, slots[:, None] + (register & 1)]  # [b, d, w, t, w, plane]
        params = np.moveaxis(np.diagonal(params, axis1=2, axis2=4), -1, 3).astype(np.uint32)  # [b, d, t, w, plane]
        params = [params[..., plane] for plane in range(unit.planes)]
        registers = convert.emulate(held, params[0], params[1] * np.uint32(0x01010101))[..., output]
        values = arith.elements(registers, convert.operand)
        place = layout.map(field=convert.pos_map(register=output, element=element)["field"], word=word, thread=thread)
        tile[:, place["row"], :, place["k"]] = np.moveaxis(values.reshape(blocks, depth, -1), -1, 0)
    return tile.reshape(blocks * layout.block_rows, depth * layout.block_k)


def emulate_w4a8(x, words, unit: UnitLayout, *, n: int, dequantization: str = "xor") -> np.ndarray:
    """Int32 accumulators [M, n] of x int8 [M, k <= K'] with packed units, as the integer tensor cores compute them.

    Args:
        words, unit: see `operand_w4a8`. n: rows of the weight that count.
        dequantization: "xor", or "unsigned" (u8 x s8 products, then minus 128 * row sum).
    Raises:
        LayoutError: an unknown dequantization, words of another layout, or a sum that leaves int32.
    """
    x = np.asarray(x, dtype=np.int64)
    a = operand_w4a8(words, unit, dequantization)
    if x.shape[1] > a.shape[1] or n > a.shape[0]:
        raise LayoutError("x", x.shape, f"must be [M, k] with k <= {a.shape[1]}, n <= {a.shape[0]}", "pass its own x")
    acc = np.rint(x.astype(np.float64) @ a[:n, : x.shape[1]].T.astype(np.float64)).astype(np.int64)  # below 2^53: exact
    if np.abs(acc).max(initial=0) >= 1 << 31:
        raise LayoutError("x", x.shape, "the sums leave int32", "split K")
    if dequantization == "unsigned":
        acc = acc - 128 * x.sum(axis=1, keepdims=True)
    return acc.astype(np.int32)
