"""Published W4A8 checkpoint layers -> canonical weights: QServe (per group and per channel) and compressed-tensors.

`read_*` give a `QuantizedWeight`, `from_*` pack it as well. Everything runs on the device of the tensors passed in.

The kernels need an integer scale 1..16 for each group over one float scale for each row. QServe's two levels are of
that kind and are read exactly. compressed-tensors has a free float scale for each group: a layer whose scales are not
small multiples of one number for each row is refused unless `requantize=True`, which fits both levels to it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints.conventions.compressed_tensors import unpack
from terrazzo.ops.checkpoints.conventions.qserve import TwoLevels, unpack_qserve
from terrazzo.ops.checkpoints.loaders import Layer
from terrazzo.ops.grouped_codes import expand_groups
from terrazzo.ops.products.converted import W4A8
from terrazzo.ops.products.wide import W4A16
from terrazzo.ops.w4a8.format import GROUPS, LARGEST_SCALE, PackedWeight, QuantizedWeight, pack
from terrazzo.ops.w4a8.quantizer import RANGE, divide, quantize_weight, row_chunks, second_level

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.checkpoints.conventions.base import Convention, LayerConfig, Tensors
    from terrazzo.ops.dlpack import SupportsDLPack
    from terrazzo.ops.products.product import Product
    from terrazzo.ops.weight_only.integers import QuantizedWeight as Integers

_STEPS = 32
"""Channel scales tried for each row when a layer is requantized."""


def from_qserve(*tensors, target: Target | str | None = None, **options) -> PackedWeight:
    """`pack(read_qserve(...), target=target)`: the arguments and errors of `read_qserve`."""
    return pack(read_qserve(*tensors, **options), target=target)


def from_compressed_tensors(*tensors, target: Target | str | None = None, **options) -> PackedWeight:
    """`pack(read_compressed_tensors(...), target=target)`: arguments and errors of `read_compressed_tensors`."""
    return pack(read_compressed_tensors(*tensors, **options), target=target)


@dlpack.accepting
def read_qserve(
    qweight: SupportsDLPack,
    s1_scales: SupportsDLPack,
    s2_scales: SupportsDLPack | None = None,
    s2_zeros: SupportsDLPack | None = None,
    s1_szeros: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    requantize: bool = False,
) -> QuantizedWeight:
    """QServe / OmniServe (QoQ): progressive group quantization, or 4 bits for each channel. Exact.

    Per group, w = ((q * s2 + s2_zero) mod 256 as int8) * s1; per channel, w = q * s1 - s1_szero. Groups whose codes do
    not start at 0 are shifted so that they do, which changes no value.

    Args:
        qweight: int8 [N, K/2], codes in QServe's order (layout `qserve_g128`); N and K multiples of 32.
        s1_scales: f16 [N].
        s2_scales, s2_zeros: int8 [G, N], rows of each 32 in the order 0 8 16 24 1 9 ...; s2_zeros is -(zero * s2) in
            two's complement. Group size K / G: a multiple of 32.
        s1_szeros: f16 [N], zero * s1, of a per-channel layer instead of the two before; zero is a code, 0..15, but for
            the rounding of f16 or bf16.
        bias: float [N].
        requantize: quantize the layer's values again where they do not fit: a group scale above 16, or values that wrap
            around in QServe's own kernel (level 1 beyond the protective range of 119).

    Raises:
        ArgumentError: wrong shapes or dtypes, or such values without `requantize`.
    """
    return of_levels(unpack_qserve(qweight, s1_scales, s2_scales, s2_zeros, s1_szeros, bias=bias), requantize)


@dlpack.accepting
def read_compressed_tensors(
    weight: SupportsDLPack,
    weight_scale: SupportsDLPack,
    weight_zero_point: SupportsDLPack | None = None,
    weight_shape: SupportsDLPack | tuple[int, int] | None = None,
    *,
    bias: SupportsDLPack | None = None,
    group_size: int | None = None,
    format: str | None = None,
    symmetric: bool | None = None,
    requantize: bool = False,
) -> QuantizedWeight:
    """compressed-tensors W4A8 (llm-compressor): int4 weights, int8 activations with a dynamic scale for each token.

    A layer of strategy "channel" is read exactly. So is one of strategy "group" whose scales are, in every row, all the
    same or whole multiples 1..16 of a positive number (1 and 9/8: 8 and 9 of 1/8), and whose (code - zero point) *
    multiple stay in a byte. Any other is refused, or, with `requantize`, fitted: for each row the channel scale is
    searched; each group keeps its codes with the nearest integer scale, or is quantized again, whichever leaves the
    smaller squared error. The error that this adds is one more rounding of a 4-bit weight.

    Args:
        weight: int8 [N, K], -8..7 (format "int-quantized"), or int32 [N, K/8] (tensor `weight_packed` of format
            "pack-quantized": codes plus 8, in natural order).
        weight_scale: f16, bf16 or f32 [N, G], or [N, 1] for strategy "channel".
        weight_zero_point: int8 [N, G], or packed int32 [N/8, G]; None when symmetric.
        weight_shape: (N, K) of a packed layer; None takes 8 * columns.
        bias: [N].
        group_size: what the config states (-1 or None for strategy "channel"); None takes K / G.
        format: what the config states; None tells by the dtype of `weight`.
        symmetric: what the config states; a contradiction with the tensors is an error.
        requantize: see above.

    Raises:
        ArgumentError: wrong shapes, dtypes or formats, values outside int4, or scales that do not fit.
    """
    facts = dict(bias=bias, group_size=group_size, format=format, symmetric=symmetric)
    return of_groups(unpack(weight, weight_scale, weight_zero_point, weight_shape, **facts), requantize)


def of_groups(source: Integers, requantize: bool = False) -> QuantizedWeight:
    """Two levels of codes with a free scale for each group: see `read_compressed_tensors`."""
    import torch

    zeros = torch.full_like(source.scales, 8, dtype=torch.int32) if source.zeros is None else source.zeros.int()
    scales = source.scales.double()
    unit, multiples = _multiples(scales)
    if multiples is not None:
        shifts = 128 - zeros * multiples
        if bool((shifts >= 0).all() & (shifts + 15 * multiples <= 255).all()):
            levels = TwoLevels(source.codes, multiples, shifts, unit.float(), source.group_size, source.bias)
            return of_levels(levels, requantize)
    if not requantize:
        remedy = "pass requantize=True, or quantize the float weight with w4a8.quantize"
        least = scales.amin(dim=1)
        irregular = (least <= 0) & (scales != least[:, None]).any(dim=1)
        if bool(irregular.any()):
            seen = float(least[irregular].min())
            raise ArgumentError("weight_scale", seen, "the kernels need positive group scales", remedy)
        if multiples is not None:
            seen = f"codes of zero points {int(zeros.min())}..{int(zeros.max())} times up to {int(multiples.max())}"
            raise ArgumentError("weight_zero_point", seen, "(code - zero point) * multiple must stay in a byte", remedy)
        raise ArgumentError(
            "weight_scale",
            f"up to {float((scales / least[:, None]).max()):.6g} times the smallest of its row",
            f"the kernels need group scales that are whole multiples 1..{LARGEST_SCALE} of one number for each row",
            remedy,
        )
    return _fitted(source.codes, zeros, source.scales.float(), source.group_size, source.bias)


def _multiples(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """For each row of scales, float64 [N, G], the largest float32 number of which all are whole multiples
    1..LARGEST_SCALE, and the multiples, int32 [N, G]; None where a row has no such number."""
    import torch

    unit = scales.amin(dim=1)
    even = (scales == unit[:, None]).all(dim=1)  # one scale for a row, zero and negative ones too, is its channel scale
    multiples, found = torch.ones_like(scales), even.clone()
    for divisor in range(1, LARGEST_SCALE + 1):
        tried = (scales.amin(dim=1, keepdim=True) / divisor).float().double()
        times = (scales / tried).round()
        right = ((times * tried == scales) & (times >= 1) & (times <= LARGEST_SCALE)).all(dim=1) & ~found
        multiples, unit = torch.where(right[:, None], times, multiples), torch.where(right, tried[:, 0], unit)
        found |= right
        if bool(found.all()):
            return unit, multiples.int()
    return unit, None


def of_levels(stored: TwoLevels, requantize: bool = False) -> QuantizedWeight:
    """Canonical weight of both levels: see `read_qserve`.

    Codes are shifted to start at 0 in each group, so that offsets are bytes and sums do not wrap.
    """
    import torch

    codes, scales, shifts, channel_scales = stored.codes, stored.scales, stored.shifts, stored.channel_scales
    group, bias, (n, k) = stored.group_size, stored.bias, stored.codes.shape
    if group >= k and group not in GROUPS:  # one scale for a row
        groups, group = -(-k // GROUPS[-1]), GROUPS[-1]
        scales, shifts = scales.expand(n, groups), shifts.expand(n, groups)
    elif group not in GROUPS:  # one scale for many groups
        group, source = expand_groups(group, k, codes.device)
        scales, shifts = scales[:, source], shifts[:, source]
    groups = scales.shape[1]
    short = groups * group - k
    padded = torch.cat([codes, codes[:, -1:].expand(n, short)], dim=1).view(n, groups, group).int()
    empty = scales == 0
    low, scales = padded.amin(-1), scales.masked_fill(empty, 1)
    padded = torch.where(empty[..., None], 0, padded - low[..., None])
    offsets = torch.where(empty, shifts, low * scales + shifts) & 255
    worst = int((padded.amax(-1) * scales + offsets).max())
    value = weights.out_of_range(scales, 1, LARGEST_SCALE)
    if value is None and worst <= 255:
        codes = padded.view(n, -1)[:, :k]
        return QuantizedWeight.canonical(codes, scales, offsets, channel_scales, group_size=group, bias=bias)
    if not requantize:
        name, seen, constraint = (
            ("s2_scales", value, f"must be in 1..{LARGEST_SCALE}")
            if value is not None
            else ("s2_zeros", worst, "code * scale + zero wraps around: level 1 left the protective range of 119")
        )
        raise ArgumentError(name, seen, constraint, "pass requantize=True, or quantize the float weight again")
    bytes_ = ((padded * scales[..., None] + offsets[..., None]) & 255) - 128
    values = bytes_.view(n, -1)[:, :k].float() * channel_scales[:, None]
    return quantize_weight(values, group_size=group, bias=bias)


def _fitted(codes, zeros, scales, group: int, bias) -> QuantizedWeight:
    """Two levels fitted to (codes - zeros) * scales, zeros and scales [N, G]: see `read_compressed_tensors`."""
    import torch

    n, k = codes.shape
    if group not in GROUPS:
        raise ArgumentError("group_size", group, f"must be one of {GROUPS}", "quantize the float weight")
    groups = scales.shape[1]
    out = [torch.empty(n, k, dtype=torch.uint8, device=codes.device)]
    out += [torch.empty(n, groups, dtype=torch.uint8, device=codes.device) for _ in range(2)]
    channel = torch.empty(n, dtype=torch.float32, device=codes.device)
    for part in row_chunks(n, 4 * k, codes.device.type):
        *found, channel[part] = _fit_rows(codes[part], zeros[part], scales[part], group)
        for whole, values in zip(out, found):
            whole[part] = values
    return QuantizedWeight.canonical(*out, channel, group_size=group, bias=bias)


def _fit_rows(codes, zeros, scales, group: int):
    """(codes, scales, offsets, channel scales) of some rows, each with the channel scale that fits it best."""
    import torch

    rows, k = codes.shape
    groups = scales.shape[1]
    per_column = lambda values: values.repeat_interleave(group, dim=1)[:, :k]
    by_group = lambda values: torch.nn.functional.pad(values, (0, groups * group - k)).view(rows, groups, group)
    steps = codes.int() - per_column(zeros)
    wanted = steps * per_column(scales)
    reach = by_group(steps.abs()).amax(-1).clamp(min=1)  # largest |code - zero| of each group
    cap = (RANGE // reach).clamp(max=LARGEST_SCALE)  # largest scale that keeps its bytes in the protective range
    finest = divide(wanted.abs().amax(dim=1), RANGE).clamp(min=2.0**-120)
    best = None
    for index in range(_STEPS):
        s1 = finest * 2.0 ** (index / _STEPS)
        scale = (scales / s1[:, None]).round().clamp(min=1).minimum(cap)
        kept = steps * per_column(scale)
        fresh = second_level((wanted / s1[:, None]).round().clamp(-RANGE, RANGE), group)
        fresh_bytes = fresh[0].float() * per_column(fresh[1]) + per_column(fresh[2]) - 128
        errors = [by_group((values * s1[:, None] - wanted).square()).sum(-1) for values in (kept.float(), fresh_bytes)]
        keep = errors[0] <= errors[1]
        error = torch.minimum(*errors).sum(dim=1)
        low = torch.where(keep, _group_min(codes, groups, group), 0)
        made = (
            torch.where(per_column(keep), codes - per_column(low).to(torch.uint8), fresh[0]),
            torch.where(keep, scale.to(torch.uint8), fresh[1]),
            torch.where(keep, (128 + (low - zeros) * scale.int()).to(torch.uint8), fresh[2]),
            s1,
        )
        if best is None:
            best, least = made, error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = tuple(torch.where(better if a.ndim == 1 else better[:, None], a, b) for a, b in zip(made, best))
    return best


def _group_min(codes, groups: int, group: int):
    """int32 [N, G]: the smallest code of each group, a short last one included."""
    import torch

    short = groups * group - codes.shape[1]
    whole = torch.cat([codes, codes[:, -1:].expand(len(codes), short)], dim=1)
    return whole.view(len(codes), groups, group).amin(-1).int()


def _read(
    convention: Convention, product: Product, tensors: Tensors, config: LayerConfig, requantize: bool = False
) -> QuantizedWeight:
    codes = convention.read(tensors, config, product)
    return (of_levels if isinstance(codes, TwoLevels) else of_groups)(codes, requantize)


FAMILY = loaders.family_of(W4A8, pack=pack, read=_read)
SOURCES = loaders.family_of(W4A16, W4A8, pack=pack)
"""Layers of 4-bit integers as they are stored, whatever multiplies them: what `two_levels` takes."""


def two_levels(source: Integers | TwoLevels, name: str) -> QuantizedWeight:
    """Two levels of a layer of `SOURCES`, fitted where its scales are free: see `read_compressed_tensors`.

    Raises:
        ArgumentError: names the layer: two levels as published, or channels in another order (act-order).
    """
    if isinstance(source, TwoLevels):
        raise ArgumentError(name, "qserve", "has two levels as published", "pack it as it is: terrazzo pack")
    if source.perm is not None:
        remedy = "quantize the float model, or serve it as W4A16"
        raise ArgumentError(name, "act-order", "has its channels in another order, which W4A8 has not", remedy)
    return of_groups(source, requantize=True)


def read_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    requantize: bool = False,
) -> QuantizedWeight:
    """Canonical weight of one layer.

    Args:
        path: a .safetensors file or a Hugging Face folder; a config beside the file is read too.
        name: prefix of the layer's tensors; None when the checkpoint has only one layer.
        format: "qserve" or "compressed_tensors", obeyed whatever the config says.
        device: where the weight is built, as torch names it: "cuda", "cuda:1", 1, a torch.device.
        requantize: see `read_qserve` and `read_compressed_tensors`.

    Raises:
        ArgumentError: no such layer, a missing tensor, a layer that W4A8 cannot take, or one that its config or
            further tensors give another meaning (`load_model` skips it with the same reason): a config that wants
            other activations than int8 with a dynamic scale for each token is such a reason.
    """
    return FAMILY.one(path, name, format=format, device=device, requantize=requantize)


def load_layer(
    path: str | Path,
    name: str | None = None,
    *,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    requantize: bool = False,
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of a checkpoint, packed: `pack(read_layer(...), target=target)`; it lies on `device`.

    Args:
        path, name, format, device, requantize: see `read_layer`. target: see `pack`.

    Raises:
        ArgumentError: see both. TargetError: see `Target.parse`.
    """
    return pack(read_layer(path, name, format=format, device=device, requantize=requantize), target=target)


def iter_layers(
    path: str | Path,
    *,
    select: str = "",
    packed: bool = True,
    strict: bool = False,
    format: str | None = None,
    device: str | int | torch.device = "cpu",
    requantize: bool = False,
    target: Target | str | None = None,
) -> Iterator[Layer]:
    """Read a checkpoint one layer at a time, as `w4a16.iter_layers` does.

    Args:
        path, select, packed, strict, device, target: as there. format, requantize: as of `read_layer`.

    Raises:
        ArgumentError: as there.
    """
    yield from FAMILY.each(
        path, select=select, packed=packed, strict=strict, format=format, device=device, target=target,
        requantize=requantize,
    )  # fmt: skip


load_model = FAMILY.load_model
"""All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
