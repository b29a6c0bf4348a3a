"""The two forms of a 4-bit weight: canonical (`QuantizedWeight`, one byte for each code) and packed (`PackedWeight`).

Every importer and the quantizer end in the canonical form; `pack` turns it into the one packed form that every W4A16
kernel reads. Both mean

    w[n, perm[j]] = (codes[n, j] - zeros[n, j // g]) * scales[n, j // g]        (perm[j] = j without act-order)

"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target

GROUPS = (32, 64, 128)
"""Group sizes that kernels read; one group for the whole of K is the fourth choice."""
SCALE_DTYPES = ("float16", "bfloat16", "float32")
LAYOUT = "w4a16"
BLOCK_N, BLOCK_K = 64, 128
"""Rows and input channels that a packed weight is padded to."""
FILE_VERSION = "terrazzo.w4a16/1"
_SCALE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, eq=False)
class QuantizedWeight(weights.Canonical):
    """A 4-bit weight [N, K] in plain rows. Build it with `canonical`, which checks it.

    Attributes:
        codes: uint8 [N, K], 0..15.
        scales: f16, bf16 or f32 [N, G], G = ceil(K / group_size).
        zeros: uint8 [N, G], 0..16 (16 occurs in GPTQ v1 checkpoints); None means 8 everywhere (symmetric).
        group_size: 32, 64, 128 or K.
        perm: int32 [K] | None; column j of `codes` is input channel perm[j] (act-order).
        bias: [N] | None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    group_size: int
    zeros: torch.Tensor | None = None
    perm: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @classmethod
    def canonical(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        *,
        group_size: int | None = None,
        perm: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> QuantizedWeight:
        """Check shapes, dtypes and values, and bring the weight to canonical form.

        Args:
            codes: integers [N, K], 0..15.
            scales: f16, bf16 or f32 [N, G]; finite.
            zeros: integers [N, G], 0..16, or None for 8. All 8 becomes None.
            group_size: input channels for each scale; None or -1 derives it from K and G. A multiple of 128 is
                expanded to 128 (its scales are repeated), a group that holds all of K becomes K.
            perm: integers [K], a permutation; the identity becomes None.
            bias: f16, bf16 or f32 [N].

        Raises:
            ArgumentError: for anything that does not fit; the message names the argument and the remedy.
        """
        import torch

        codes = weights.as_tensor("codes", codes)
        given = {"scales": scales, "zeros": zeros, "perm": perm, "bias": bias}
        scales, zeros, perm, bias = (
            None if t is None else weights.as_tensor(name, t, codes.device) for name, t in given.items()
        )
        n, k = _check_codes(codes)
        group_size = _check_scales(scales, n, k, group_size)
        zeros = _check_zeros(zeros, scales)
        if group_size not in (k, *GROUPS):
            if group_size % GROUPS[-1]:
                raise ArgumentError(
                    "group_size",
                    group_size,
                    f"must be one of {GROUPS}, a multiple of {GROUPS[-1]}, or K = {k}",
                    "requantize with a supported group size, or use quantize() on the float weight",
                )
            repeat = torch.arange(-(-k // GROUPS[-1]), device=scales.device) // (group_size // GROUPS[-1])
            scales, zeros = scales[:, repeat], None if zeros is None else zeros[:, repeat]
            group_size = GROUPS[-1]
        if perm is not None:
            perm = _check_perm(perm, k)
        if bias is not None and (tuple(bias.shape) != (n,) or weights.dtype_name(bias) not in SCALE_DTYPES):
            raise ArgumentError(
                "bias",
                f"{weights.dtype_name(bias)} {list(bias.shape)}",
                f"must be a float vector [{n}] of {' or '.join(SCALE_DTYPES)}",
                "pass one value for each output feature",
            )
        return cls(
            codes=codes.to(torch.uint8).contiguous(),
            scales=scales.contiguous(),
            group_size=group_size,
            zeros=None if zeros is None else zeros.contiguous(),
            perm=perm,
            bias=None if bias is None else bias.contiguous(),
        )

    @property
    def symmetric(self) -> bool:
        return self.zeros is None

    def pack(self, *, target: Target | str | None = None) -> PackedWeight:
        """See `pack`."""
        return pack(self, target=target)

    def dequantize(self, numerics: str = "exact", dtype: torch.dtype | None = None) -> torch.Tensor:
        """Float weight [N, K] in input-channel order; see `reference.dequantize`."""
        from terrazzo.ops.w4a16.reference import dequantize

        return dequantize(self, numerics, dtype)

    def __repr__(self) -> str:
        return f"QuantizedWeight(N={self.n}, K={self.k}, {_summary(self)})"


@dataclass(frozen=True, eq=False)
class PackedWeight(weights.Packed):
    """A 4-bit weight in the derived layout that every W4A16 kernel of every target reads. Np, Kp, Gp: padded sizes.

    Attributes:
        words: int32 [Kp/64, Np/64, 512]; 8 codes to a word, in the order of layout `w4a16`.
        params: uint8 [Gp, Np/64, R]; R = 64 scales (order: warp, g, pair), then, unless symmetric, 64 zeros in the
            same order.
        n, k: true sizes; Np = ceil(n/64)*64, Kp = ceil(k/128)*128, Gp = 1 when one group holds all of K, else
            Kp/group_size. Padded codes, scales and zeros are 0.
        group_size: 32, 64, 128 or k.
        scale_dtype: "float16", "bfloat16" or "float32".
        symmetric: True when there is no zeros plane and every zero point is 8.
        layout: identity of the layout that packed `words`; a kernel built for another one refuses the weight by name.
        perm: int32 [k] | None; y = x[..., perm] @ unpermuted^T (act-order).
        bias: [n] | None.
        target: architecture it was packed for, None for any (today one layout serves all targets).
    """

    VERSION = FILE_VERSION

    words: torch.Tensor
    params: torch.Tensor
    n: int
    k: int
    group_size: int
    scale_dtype: str
    symmetric: bool
    layout: str
    perm: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    target: str | None = None

    @property
    def groups(self) -> int:
        """Stored groups Gp."""
        return self.params.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel streams: words and params, padding included."""
        return self.words.numel() * 4 + self.params.numel()

    def unpack(self) -> QuantizedWeight:
        """Exact inverse of `pack`."""
        import torch

        layout, rows = _layout(), _rows()
        codes = layout.unpack(self.words, self.n, self.words.shape[0] * layout.block_k)
        scale_bytes, groups = BLOCK_N * _SCALE_BYTES[self.scale_dtype], -(-self.k // self.group_size)
        params = self.params.transpose(0, 1)
        scales = params[..., :scale_bytes].contiguous().view(getattr(torch, self.scale_dtype))
        zeros = None if self.symmetric else rows.unpack(params[..., scale_bytes:], self.n)
        return QuantizedWeight(
            codes=codes[:, : self.k].contiguous(),
            scales=rows.unpack(scales, self.n)[:, :groups].contiguous(),
            group_size=self.group_size,
            zeros=None if zeros is None else zeros[:, :groups].contiguous(),
            perm=self.perm,
            bias=self.bias,
        )

    def dequantize(self, numerics: str = "exact", dtype: torch.dtype | None = None) -> torch.Tensor:
        """Float weight [N, K] in input-channel order, read back from the packed bytes; see `reference.dequantize`."""
        return self.unpack().dequantize(numerics, dtype)

    def expected_layout(self) -> str:
        """Identity of the layout that the kernels of this version read."""
        return layout_identity(self)

    def check_facts(self) -> None:
        """Raise ArgumentError unless n, k, group_size and scale_dtype are such as `pack` writes."""
        super().check_facts()
        if self.scale_dtype not in SCALE_DTYPES:
            constraint = f"must be one of {SCALE_DTYPES}"
            raise ArgumentError("scale_dtype", self.scale_dtype, constraint, "pack the weight again")

    def check_values(self) -> None:
        """Raise ArgumentError unless perm is a permutation: x is gathered by it."""
        if self.perm is not None:
            _check_perm(self.perm, self.k)

    def check_sizes(self) -> None:
        """Raise ArgumentError unless words and params have the shapes and dtypes that n, k and group_size ask for."""
        np_, kp, gp, width = packed_sizes(self.n, self.k, self.group_size, self.scale_dtype, self.symmetric)
        for name, shape, dtype in (
            ("words", (kp // 64, np_ // BLOCK_N, 512), "int32"),
            ("params", (gp, np_ // BLOCK_N, width), "uint8"),
        ):
            weights.check_tensor(self, name, shape, dtype)

    def __repr__(self) -> str:
        return f"PackedWeight(N={self.n}, K={self.k}, {_summary(self)})"


def packed_sizes(n: int, k: int, group_size: int, scale_dtype: str, symmetric: bool) -> tuple[int, int, int, int]:
    """(Np, Kp, Gp, R): padded sizes, stored groups, bytes of params for 64 rows and one group."""
    np_, kp = -(-n // BLOCK_N) * BLOCK_N, -(-k // BLOCK_K) * BLOCK_K
    gp = 1 if group_size >= k else kp // group_size
    return np_, kp, gp, BLOCK_N * (_SCALE_BYTES[scale_dtype] + (not symmetric))


def layout_identity(weight: PackedWeight) -> str:
    """Of the layout that the kernels of this version read."""
    return _layout().identity


def pack(
    codes: torch.Tensor | QuantizedWeight,
    scales: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
    *,
    group_size: int | None = None,
    perm: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Pack a 4-bit weight for the kernels, on the device where its codes are.

    Args:
        codes: integers [N, K] 0..15, or a QuantizedWeight (then the other tensors must be left out).
        scales, zeros, group_size, perm, bias: see `QuantizedWeight.canonical`.
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Any N >= 1 and K >= 1: rows are padded to 64 and input channels to 128 with code 0 and scale 0.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`; a PackedWeight. TargetError: see `Target.parse`.
    """
    import torch

    if hasattr(codes, "words"):
        raise ArgumentError("codes", repr(codes), "is packed already", "call unpack() first to pack it again")
    if isinstance(codes, QuantizedWeight):
        given = {"scales": scales, "zeros": zeros, "group_size": group_size, "perm": perm, "bias": bias}
        for name in (name for name, value in given.items() if value is not None):
            raise ArgumentError(
                name, "given", "must be left out when codes is a QuantizedWeight", "put it into the QuantizedWeight"
            )
        weight = codes
    else:
        weight = QuantizedWeight.canonical(codes, scales, zeros, group_size=group_size, perm=perm, bias=bias)
    layout, rows = _layout(), _rows()
    np_, kp, gp, _ = packed_sizes(
        weight.n, weight.k, weight.group_size, weights.dtype_name(weight.scales), weight.symmetric
    )

    def padded(values: torch.Tensor, columns: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, columns - values.shape[1], 0, np_ - values.shape[0]))

    params = rows.pack(padded(weight.scales, gp)).contiguous().view(torch.uint8)
    if not weight.symmetric:
        params = torch.cat([params, rows.pack(padded(weight.zeros, gp))], dim=-1)
    return PackedWeight(
        words=layout.pack(padded(weight.codes, kp)).contiguous(),
        params=params.transpose(0, 1).contiguous(),
        n=weight.n,
        k=weight.k,
        group_size=weight.group_size,
        scale_dtype=weights.dtype_name(weight.scales),
        symmetric=weight.symmetric,
        layout=layout.identity,
        perm=weight.perm,
        bias=weight.bias,
        target=weights.arch_of(target, weight.codes.device),
    )


def _layout():
    from terrazzo.layouts.instances import get_instance

    return get_instance(LAYOUT)


def _rows():
    from terrazzo.layouts.rows import derive_rows

    layout = _layout()
    return derive_rows(layout.fragment, layout.block_rows)


def _summary(weight: QuantizedWeight | PackedWeight) -> str:
    parts = [
        f"group={'K' if weight.group_size >= weight.k else weight.group_size}",
        "symmetric" if weight.symmetric else "zeros",
    ]
    scale = weight.scale_dtype if isinstance(weight, PackedWeight) else weights.dtype_name(weight.scales)
    parts += [f"scales={scale}"] + ["act-order"] * (weight.perm is not None) + ["bias"] * (weight.bias is not None)
    return ", ".join(parts)


def _check_codes(codes: torch.Tensor) -> tuple[int, int]:
    if codes.ndim != 2 or 0 in codes.shape or not weights.is_integer(codes):
        raise ArgumentError(
            "codes",
            f"{weights.dtype_name(codes)} {list(codes.shape)}",
            "must be integers [N, K] with N, K >= 1",
            "pass one code for each weight; quantize() makes them from a float weight",
        )
    if (value := weights.out_of_range(codes, 0, 15)) is not None:
        raise ArgumentError(
            "codes", value, "must be in 0..15", "add 8 to signed codes; an 8-bit weight has no W4A16 form"
        )
    return tuple(codes.shape)


def _check_scales(scales: torch.Tensor, n: int, k: int, group_size: int | None) -> int:
    import torch

    if (
        scales is None
        or weights.dtype_name(scales) not in SCALE_DTYPES
        or scales.ndim != 2
        or scales.shape[0] != n
        or scales.shape[1] < 1
    ):
        seen = None if scales is None else f"{weights.dtype_name(scales)} {list(scales.shape)}"
        raise ArgumentError(
            "scales", seen, f"must be one of {SCALE_DTYPES}, shape [{n}, groups]", "transpose or convert them"
        )
    if not bool(torch.isfinite(scales).all()):
        bad = (~torch.isfinite(scales)).nonzero()[0].tolist()
        raise ArgumentError(
            "scales",
            float(scales[bad[0], bad[1]]),
            f"must be finite (row {bad[0]}, group {bad[1]})",
            "the checkpoint is damaged: get it again",
        )
    groups = scales.shape[1]
    if group_size in (None, -1):
        fits = (
            [k]
            if groups == 1
            else [g for g in GROUPS if -(-k // g) == groups]
            or ([k // groups] if k % (groups * GROUPS[-1]) == 0 else [])
        )
        if not fits or (group_size == -1 and groups != 1):
            raise ArgumentError(
                "scales",
                f"{groups} groups",
                f"no usual group size gives that many groups over K = {k}",
                "pass group_size, or all the scales",
            )
        return fits[0]
    if type(group_size) is not int or group_size < 1 or -(-k // group_size) != groups:
        raise ArgumentError(
            "group_size",
            group_size,
            f"K = {k} with {groups} scales for each row needs ceil(K / group_size) = {groups}",
            "pass the group size that the checkpoint's config states, -1 for one group",
        )
    return k if groups == 1 else group_size


def _check_zeros(zeros: torch.Tensor | None, scales: torch.Tensor) -> torch.Tensor | None:
    import torch

    if zeros is None:
        return None
    if not weights.is_integer(zeros) or zeros.shape != scales.shape:
        raise ArgumentError(
            "zeros",
            f"{weights.dtype_name(zeros)} {list(zeros.shape)}",
            f"must be integers {list(scales.shape)}, one for each scale",
            "round float zero points (w = (code - zero) * scale), or leave them out for 8",
        )
    if (value := weights.out_of_range(zeros, 0, 16)) is not None:
        raise ArgumentError(
            "zeros", value, "must be in 0..16", "add 8 to signed zero points; they count in units of a code"
        )
    return None if bool((zeros == 8).all()) else zeros.to(torch.uint8)


def _check_perm(perm: torch.Tensor, k: int) -> torch.Tensor | None:
    import torch

    natural = torch.arange(k, device=perm.device)
    if (
        not weights.is_integer(perm)
        or tuple(perm.shape) != (k,)
        or not bool((perm.long().sort().values == natural).all())
    ):
        raise ArgumentError(
            "perm",
            f"{weights.dtype_name(perm)} {list(perm.shape)}",
            f"must be a permutation of 0..{k - 1}",
            "pass argsort(g_idx, stable=True)",
        )
    return None if bool((perm == natural).all()) else perm.to(torch.int32).contiguous()
