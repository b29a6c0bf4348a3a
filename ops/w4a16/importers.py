"""Published checkpoint layers -> canonical weights: AWQ gemm, GPTQ v1 and v2, compressed-tensors pack-quantized.

`read_*` give a `QuantizedWeight`, `from_*` pack it as well. Every word is an int32 that holds 8 codes; nibble i is
bits 4i..4i+3. Everything runs on the device of the tensors passed in.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.w4a16.format import GROUPS, PackedWeight, QuantizedWeight, pack

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: column 8c + j of a row lies in nibble AWQ_ORDER[j] of word c."""
ZERO_OVERFLOW = ("wrap", "16")


def from_awq(*tensors, target: Target | str | None = None, **options) -> PackedWeight:
    """`pack(read_awq(...), target=target)`: the arguments and errors of `read_awq`."""
    return pack(read_awq(*tensors, **options), target=target)


def from_gptq(*tensors, target: Target | str | None = None, **options) -> PackedWeight:
    """`pack(read_gptq(...), target=target)`: the arguments and errors of `read_gptq`."""
    return pack(read_gptq(*tensors, **options), target=target)


def from_compressed_tensors(*tensors, target: Target | str | None = None, **options) -> PackedWeight:
    """`pack(read_compressed_tensors(...), target=target)`: the arguments and errors of `read_compressed_tensors`."""
    return pack(read_compressed_tensors(*tensors, **options), target=target)


def read_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    group_size: int | None = None,
    bits: int = 4,
    version: str = "gemm",
) -> QuantizedWeight:
    """AWQ "gemm" (AutoAWQ): w[k, n] = (q - z) * s, codes packed along N in the order 0 2 4 6 1 3 5 7.

    Args:
        qweight: int32 [K, N/8].
        qzeros: int32 [G, N/8], same order; None only for a symmetric layer (zero point 8).
        scales: f16 [G, N].
        bias: [N].
        group_size: what the config states (-1: one group); None takes K / G.
        bits, version: what the config states; only 4 and "gemm" are read.

    Raises:
        ArgumentError: wrong shapes or dtypes, other bits, or version gemv, gemv_fast, marlin.
    """
    if not isinstance(version, str) or version.lower() != "gemm":
        raise ArgumentError(
            "version",
            version,
            "must be 'gemm': gemv, gemv_fast and marlin store other layouts",
            "export the model again with version='gemm'",
        )
    _check_bits(bits)
    _check_float("scales", scales, "[G, N]")
    n = scales.shape[1]
    if n % 8:
        raise ArgumentError(
            "scales", list(scales.shape), "AWQ packs 8 columns to a word: N must be a multiple of 8", "pad the layer"
        )
    k = _check_words("qweight", qweight, (None, n // 8))[0]
    zeros = None
    if qzeros is not None:
        _check_words("qzeros", qzeros, (scales.shape[0], n // 8))
        zeros = _awq_nibbles(qzeros).T
    codes = _awq_nibbles(qweight).T
    return _canonical(codes, scales.T, zeros, bias, _exact_groups(k, scales.shape[0], _whole(group_size)))


def read_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    group_size: int | None = None,
    bits: int = 4,
    version: str | None = None,
    symmetric: bool | None = None,
    desc_act: bool | None = None,
    zero_overflow: str = "wrap",
) -> QuantizedWeight:
    """GPTQ (AutoGPTQ, GPTQModel): w[k, n] = (q - z[g_idx[k]]) * s[g_idx[k]], codes packed along K, zero points along N.

    Args:
        qweight: int32 [K/8, N].
        qzeros: int32 [G, ceil(N/8)]; None only for a symmetric layer.
        scales: f16 [G, N].
        g_idx: int32 [K], group of each input channel; None means k // group_size.
        bias: [N].
        group_size: what the config states (-1: one group); None takes ceil(K / G).
        bits: what the config states; only 4 is read.
        version: "gptq" (v1: zero points are stored minus one) or "gptq_v2"; None accepts only a layer whose zero
            points tell (every stored nibble 7 is a symmetric v1 layer, every 8 a symmetric v2 one).
        symmetric, desc_act: what the config states; a contradiction with the tensors is an error. None believes the
            tensors.
        zero_overflow: a v1 nibble 15 is zero point 0 ("wrap", as the exllama kernels read it) or 16 ("16", as the
            torch paths do).

    Act-order: columns are sorted by group into `perm`. Groups of unequal size are split into units of 128, 64 or 32
    channels.

    Raises:
        ArgumentError: wrong shapes or dtypes, other bits, a marlin layer, a g_idx with no common unit, a contradicted
            config.
    """
    import torch

    if version not in (None, "gptq", "gptq_v2"):
        raise ArgumentError(
            "version",
            version,
            "must be 'gptq' or 'gptq_v2': marlin and other kernel formats are no checkpoint formats",
            "use the checkpoint before it was repacked, or export it again as gptq",
        )
    if zero_overflow not in ZERO_OVERFLOW:
        raise ArgumentError(
            "zero_overflow", zero_overflow, f"must be one of {ZERO_OVERFLOW}", "use 'wrap', as the exllama kernels do"
        )
    _check_bits(bits)
    _check_float("scales", scales, "[G, N]")
    groups, n = scales.shape
    rows = _check_words("qweight", qweight, (None, n))[0]
    if g_idx is not None:
        _check_index("g_idx", g_idx)
        if len(g_idx) and rows * 8 != len(g_idx):
            _check_bits(rows * 32 / len(g_idx))
    zeros = None
    if qzeros is not None:
        _check_words("qzeros", qzeros, (groups, -(-n // 8)))
        zeros = _gptq_zeros(_nibbles(qzeros)[:, :n], version, symmetric, zero_overflow)
    elif symmetric is False:
        raise ArgumentError(
            "qzeros", None, "an asymmetric layer needs its zero points", "add the layer's qzeros tensor"
        )
    if symmetric and zeros is not None and not bool((zeros == 8).all()):
        seen = sorted(torch.unique(zeros).tolist())
        raise ArgumentError(
            "symmetric",
            True,
            f"the config says so, but zero points read as {version} are {seen}, not 8",
            "the layer may be of the other GPTQ version: pass version='gptq_v2' or 'gptq' (config: checkpoint_format)",
        )
    codes = _bytes(qweight, rows, n, 4)  # nibbles along K: [K/8, N, 8] -> [N, K]
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, n, 8).permute(1, 0, 2).reshape(n, rows * 8)
    return _grouped(codes, scales.T, None if zeros is None else zeros.T, g_idx, bias, group_size, desc_act)


def read_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_shape: torch.Tensor | tuple[int, int] | None = None,
    weight_g_idx: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    group_size: int | None = None,
    bits: int = 4,
    format: str = "pack-quantized",
    symmetric: bool | None = None,
) -> QuantizedWeight:
    """compressed-tensors "pack-quantized" (llm-compressor): signed codes plus 8, packed along K in natural order.

    Args:
        weight_packed: int32 [N, ceil(K/8)].
        weight_scale: f16, bf16 or f32 [N, G].
        weight_zero_point: int32 [ceil(N/8), G] packed along N plus 8, or int8 [N, G] signed (older files); None when
            symmetric.
        weight_shape: (N, K); None takes K = 8 * columns.
        weight_g_idx: int32 [K] (actorder "group"); all -1 counts as none.
        bias: [N].
        group_size: what the config states (-1 or None for strategy "channel"); None takes ceil(K / G).
        bits, format: what the config states; only 4 and "pack-quantized" are read.
        symmetric: what the config states; a contradiction with the tensors is an error.

    Raises:
        ArgumentError: wrong shapes or dtypes, other bits or formats, a contradicted config.
    """
    import torch

    if format != "pack-quantized":
        raise ArgumentError("format", format, "must be 'pack-quantized'", "export the model again with that format")
    _check_bits(bits)
    _check_float("weight_scale", weight_scale, "[N, G]")
    n, groups = weight_scale.shape
    columns = _check_words("weight_packed", weight_packed, (n, None))[1]
    shape = (n, columns * 8) if weight_shape is None else check_weight_shape(weight_shape, n)
    if columns != -(-shape[1] // 8):
        _check_bits(columns * 32 / shape[1], "weight_shape")
    zeros = None
    if weight_zero_point is not None:
        if getattr(weight_zero_point, "dtype", None) == torch.int8:
            if tuple(weight_zero_point.shape) != (n, groups):
                raise _shape_error("weight_zero_point", weight_zero_point, f"int8 [{n}, {groups}]")
            weights.check_dense("weight_zero_point", weight_zero_point)
            zeros = weight_zero_point.to(torch.int16) + 8
        else:
            _check_words("weight_zero_point", weight_zero_point, (-(-n // 8), groups))
            zeros = _nibbles(weight_zero_point.T)[:, :n].T
    elif symmetric is False:
        raise ArgumentError(
            "weight_zero_point",
            None,
            "an asymmetric layer needs its zero points",
            "add the layer's weight_zero_point tensor",
        )
    if symmetric and zeros is not None and not bool((zeros == 8).all()):
        raise ArgumentError(
            "symmetric",
            True,
            "the config says so, but the layer has other zero points",
            "pass symmetric=None to believe the tensors",
        )
    if weight_g_idx is not None:
        _check_index("weight_g_idx", weight_g_idx)
        weight_g_idx = None if bool((weight_g_idx == -1).all()) else weight_g_idx
    codes = _nibbles(weight_packed)[:, : shape[1]]
    with weights.renamed(scales="weight_scale", zeros="weight_zero_point", g_idx="weight_g_idx"):
        return _grouped(codes, weight_scale, zeros, weight_g_idx, bias, group_size, None)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, 8C]: the nibbles of each word in natural order."""
    import torch

    values = _bytes(words, *words.shape, 4)
    return torch.stack([values & 15, values >> 4], dim=-1).view(words.shape[0], -1)


def _awq_nibbles(words: torch.Tensor) -> torch.Tensor:
    values = _nibbles(words)
    return values.view(values.shape[0], -1, 8)[..., list(AWQ_ORDER)].view(values.shape)


def _bytes(words: torch.Tensor, *shape: int) -> torch.Tensor:
    return weights.as_bytes(words).view(shape)  # little-endian: byte b holds nibbles 2b and 2b + 1


def _gptq_zeros(stored: torch.Tensor, version: str | None, symmetric: bool | None, zero_overflow: str) -> torch.Tensor:
    """Zero points 0..16 from stored nibbles; never by word arithmetic, whose carry would spill into the next nibble."""
    if version is None:
        version = {7: "gptq", 8: "gptq_v2"}.get(int(stored[0, 0])) if bool((stored == stored[0, 0]).all()) else None
        if version is None:
            raise ArgumentError(
                "version",
                None,
                "asymmetric zero points do not tell GPTQ v1 (stored minus one) from v2",
                "pass version='gptq' or 'gptq_v2' (checkpoint_format in the config; 'gptq' when it names none)",
            )
    if version == "gptq_v2":
        return stored
    overflow = stored == 15
    if not symmetric and bool(overflow.any()):
        warnings.warn(
            f"GPTQ v1 zero points: {int(overflow.sum())} stored nibbles are 15, which readers take for zero point 0 or "
            f"16; taken for {0 if zero_overflow == 'wrap' else 16} (zero_overflow={zero_overflow!r})",
            stacklevel=4,
        )
    return (stored + 1) & 15 if zero_overflow == "wrap" else stored + 1


def _grouped(codes, scales, zeros, g_idx, bias, group_size, desc_act) -> QuantizedWeight:
    """Canonical weight from codes [N, K], scales and zeros [N, G], and the group of each column (None: in order)."""
    import torch

    k, groups = codes.shape[1], scales.shape[1]
    size = _ceil_groups(k, groups, _whole(group_size))
    if g_idx is None:
        if desc_act and groups > 1:
            raise ArgumentError(
                "g_idx",
                None,
                "the config says desc_act, which needs the group of each channel",
                "add the layer's g_idx tensor",
            )
        if group_size is None and size < k and size not in GROUPS and size % GROUPS[-1]:
            constraint = f"K = {k} with {groups} scales for each row does not tell it"
            raise ArgumentError("group_size", None, constraint, "pass what the checkpoint's config states")
        return _canonical(codes, scales, zeros, bias, size)
    if len(g_idx) != k:
        raise _shape_error("g_idx", g_idx, f"int32 [{k}]")
    g_idx = g_idx.to(codes.device).long()
    if bool((g_idx < 0).any()) or bool((g_idx >= groups).any()):
        raise ArgumentError(
            "g_idx",
            [int(g_idx.min()), int(g_idx.max())],
            f"must lie in 0..{groups - 1}, one of the scales",
            "get the file again",
        )
    if bool((g_idx == torch.arange(k, device=codes.device) // size).all()):
        return _canonical(codes, scales, zeros, bias, size)
    if desc_act is False:
        raise ArgumentError(
            "desc_act",
            False,
            "the config says so, but g_idx is not k // group_size",
            "pass desc_act=None to believe the tensors",
        )
    perm, source, size = _sort_groups(g_idx, groups)
    return _canonical(codes[:, perm], scales[:, source], None if zeros is None else zeros[:, source], bias, size, perm)


def _sort_groups(g_idx: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(perm [K], original group of each stored one [G'], unit): channels sorted by group, groups cut into equal units.

    One group may hold a remainder; it goes last, where a ragged end is allowed. Empty groups vanish.
    """
    import torch

    counts = torch.bincount(g_idx, minlength=groups)
    full = counts.max().item()
    for unit in dict.fromkeys(
        (full, *reversed(GROUPS)) if full in GROUPS or full % GROUPS[-1] == 0 else reversed(GROUPS)
    ):
        ragged = (counts % unit).nonzero().flatten().tolist()
        if len(ragged) > 1:
            continue
        order = [g for g in range(groups) if g not in ragged] + ragged
        rank = torch.empty(groups, dtype=torch.long, device=g_idx.device)
        rank[torch.tensor(order, device=g_idx.device)] = torch.arange(groups, device=g_idx.device)
        units = torch.tensor([-(-c // unit) for c in counts[order].tolist()], device=g_idx.device)
        source = torch.tensor(order, device=g_idx.device).repeat_interleave(units)
        return torch.argsort(rank[g_idx], stable=True), source, unit if len(source) > 1 else len(g_idx)
    raise ArgumentError(
        "g_idx",
        sorted(set(counts.tolist())),
        f"channels for each group must share a unit of {GROUPS[0]}, {GROUPS[1]} or {GROUPS[2]}",
        "import the unsharded layer (a slice along K of an act-order layer cuts groups), or requantize with quantize()",
    )


def _canonical(codes, scales, zeros, bias, group_size, perm=None) -> QuantizedWeight:
    return QuantizedWeight.canonical(codes, scales, zeros, group_size=group_size, bias=bias, perm=perm)


def _exact_groups(k: int, groups: int, group_size: int | None) -> int:
    """AWQ's group size: every group is full."""
    size = k if group_size in (-1, None) and groups == 1 else k // groups if group_size is None else group_size
    if size < 1 or k % size or k // size != groups:
        raise ArgumentError(
            "group_size",
            group_size,
            f"K = {k} with {groups} rows of scales needs K % group_size = 0 and K / group_size = {groups}",
            "pass the group size that the checkpoint's config states, -1 for one group",
        )
    return size


def _ceil_groups(k: int, groups: int, group_size: int | None) -> int:
    """Group size over K with perhaps a ragged last group: the one stated, else the supported one that fits."""
    fits = [k] if groups == 1 else [g for g in GROUPS if -(-k // g) == groups] or [-(-k // groups)]
    size = fits[0] if group_size is None or (group_size == -1 and groups == 1) else group_size
    if size < 1 or -(-k // size) != groups:
        raise ArgumentError(
            "group_size",
            group_size,
            f"K = {k} with {groups} scales for each row needs ceil(K / group_size) = {groups}",
            "pass the group size that the checkpoint's config states, -1 for one group",
        )
    return size


def _whole(group_size: int | None) -> int | None:
    if group_size is not None and type(group_size) is not int:
        remedy = "pass the group size that the checkpoint's config states, -1 for one group"
        raise ArgumentError("group_size", group_size, "must be an integer", remedy)
    return group_size


def check_weight_shape(shape: torch.Tensor | tuple[int, int], n: int) -> tuple[int, int]:
    """(N, K) of a compressed-tensors layer, as integers."""
    try:
        found = tuple(int(size) for size in shape)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = None
    if found is None or len(found) != 2 or found[0] != n or found[1] < 1:
        raise ArgumentError(
            "weight_shape",
            found or shape,
            f"must be (N, K) with N = {n} scale rows",
            "pass the layer's weight_shape tensor",
        )
    return found


def _check_index(name: str, index: torch.Tensor) -> None:
    """A vector of group numbers."""
    if str(getattr(index, "dtype", None)) not in ("torch.int32", "torch.int64") or index.ndim != 1:
        seen = f"{index.dtype} {list(index.shape)}" if hasattr(index, "dtype") else type(index).__name__
        remedy = "pass the layer's tensors as the checkpoint stores them"
        raise ArgumentError(name, seen, "must be int32 [K], the group of each channel", remedy)
    weights.check_dense(name, index)


def _check_bits(bits: float, argument: str = "bits") -> None:
    if not isinstance(bits, int | float):
        raise ArgumentError(argument, bits, "must be the number 4", "pass what the checkpoint's config states")
    if bits != 4:
        bits = int(bits) if bits % 1 == 0 else round(bits, 2)
        raise ArgumentError(
            argument,
            bits,
            f"W4A16 reads 4-bit codes; the words hold {bits} bits for each weight",
            "quantize the model to 4 bits",
        )


def _check_float(name: str, tensor: torch.Tensor, shape: str) -> None:
    if not hasattr(tensor, "dtype"):
        raise ArgumentError(name, tensor, f"must be a float tensor {shape}", "add the layer's tensor of that name")
    if (
        tensor.ndim != 2
        or 0 in tensor.shape
        or str(tensor.dtype) not in ("torch.float16", "torch.bfloat16", "torch.float32")
    ):
        raise _shape_error(name, tensor, f"f16, bf16 or f32 {shape}")
    weights.check_dense(name, tensor)


def _check_words(name: str, words: torch.Tensor, shape: tuple[int | None, int | None]) -> tuple[int, int]:
    """Check an int32 word tensor against a shape with at most one open size; return its shape."""
    wanted = f"int32 [{', '.join('*' if size is None else str(size) for size in shape)}]"
    if not hasattr(words, "dtype"):
        raise ArgumentError(name, words, f"must be {wanted}", "add the layer's tensor of that name")
    fits = (
        words.ndim == 2 and all(want in (None, have) for want, have in zip(shape, words.shape)) and 0 not in words.shape
    )
    if not fits or str(words.dtype) != "torch.int32":
        raise _shape_error(name, words, wanted)
    weights.check_dense(name, words)
    return tuple(words.shape)


def _shape_error(name: str, tensor: torch.Tensor, wanted: str) -> ArgumentError:
    seen = weights.described(tensor)
    return ArgumentError(
        name, seen, f"must be {wanted} to match the scales", "pass the layer's tensors as the checkpoint stores them"
    )
