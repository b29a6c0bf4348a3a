"""Quantized activations of W4Ax, and the call that makes them: residual sum or gate, RMSNorm, permutation, scales and
planes in one kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import derived, launching, weights
from terrazzo.ops.lasting import lasting
from terrazzo.ops.linear.mixed.scales import GRANULARITIES, UNIFORM
from terrazzo.ops.linear.quantize import quantize_blocks as program
from terrazzo.ops.w4ax.fmpq import BLOCK
from terrazzo.ops.w4ax.format import PackedWeight
from terrazzo.ops.w4ax.reference import arrange
from terrazzo.schedules import w4ax as schedules

if TYPE_CHECKING:
    import torch

DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True, eq=False)
class QuantizedActivations:
    """Activations in a weight's channel order, quantized by blocks of 128 channels; Kp: K rounded up to 128.

    Attributes:
        q4: uint8 [M, K4/2], INT4 blocks, two channels in a byte (two's complement, the even channel low). Without
            native s4 (`wide`) it has no columns.
        q8: int8 [M, 128 * blocks8], INT8 blocks; `wide`: [M, Kp], all blocks, INT4 ones in -7..7, or in -126..126 with
            two-level scales, which are then codes times the factors of their blocks.
        scales: float32 [Kp/128, M4], M4 = M rounded up to 4; columns from M on do not count.
        shape: of the activations, [..., K]; M is the product of the leading dimensions.
        blocks8: INT8 blocks, the last ones.
        order: name of the weight's permutation, `PackedWeight.order`.
        granularity: of the scales, see `quantize_activations`.
    """

    q4: torch.Tensor
    q8: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, ...]
    blocks8: int
    order: str = ""
    granularity: str = "block"

    @property
    def k(self) -> int:
        """Input features K."""
        return self.shape[-1]

    @property
    def m(self) -> int:
        """Number of tokens M."""
        return prod(self.shape[:-1])

    @property
    def blocks(self) -> int:
        """Blocks of 128 input channels, the last one padded."""
        return -(-self.k // BLOCK)

    @property
    def wide(self) -> bool:
        """Whether every block lies in bytes, for tensor cores without s4."""
        return self.blocks8 != self.blocks and self.q4.shape[1] == 0

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.q8.device

    @property
    def uniform(self) -> bool:
        """Whether, in bytes, all blocks of a token and precision have the same scale."""
        return self.granularity in UNIFORM

    def codes(self) -> torch.Tensor:
        """int8 [M, Kp]: the codes of both planes, in the weight's order, times their factors where `q8` holds these."""
        import torch

        if not self.q4.shape[1]:
            return self.q8
        pairs = torch.stack([self.q4 & 15, self.q4 >> 4], dim=-1).flatten(1)
        return torch.cat([(pairs ^ 8).to(torch.int8) - 8, self.q8], dim=1)

    def token_scales(self) -> torch.Tensor:
        """float32 [M, Kp/128]."""
        return self.scales[:, : self.m].T

    def dequantize(self) -> torch.Tensor:
        """float32 [M, Kp], in the weight's order."""
        return self.codes().float() * self.token_scales().repeat_interleave(BLOCK, dim=1)

    def of_tokens(self, rows: torch.Tensor) -> QuantizedActivations:
        """Those of some tokens, [P, K]: row rows[i] of each plane and column rows[i] of the scales become number i."""
        import torch

        self.check()
        scales = self.scales.index_select(1, rows)
        own = {name: getattr(self, name).index_select(0, rows) for name in ("q4", "q8")}
        own["scales"] = torch.nn.functional.pad(scales, (0, -len(rows) % 4)) if len(rows) % 4 else scales
        return replace(self, **own, shape=(len(rows), self.k))

    def check(self) -> None:
        """Raise ArgumentError unless the tensors have the shapes and dtypes of the attributes' description."""
        remedy = "quantize them with quantize_activations"
        m, low, high = sizes(self.m, self.k, self.blocks8, self.wide)
        if not 0 <= self.blocks8 <= self.blocks:
            raise ArgumentError("blocks8", self.blocks8, f"must be 0..{self.blocks}", remedy)
        weights.check_tensor(self, "q4", (m, low), "uint8", remedy)
        weights.check_tensor(self, "q8", (m, high), "int8", remedy)
        weights.check_tensor(self, "scales", (self.blocks, -(-m // 4) * 4), "float32", remedy)

    def __repr__(self) -> str:
        return (
            f"QuantizedActivations({list(self.shape)}, {self.blocks - self.blocks8} INT4, {self.blocks8} INT8 blocks)"
        )


def sizes(m: int, k: int, blocks8: int, wide: bool) -> tuple[int, int, int]:
    """M, columns of q4, columns of q8."""
    blocks = -(-k // BLOCK)
    return m, 0 if wide else (blocks - blocks8) * BLOCK // 2, (blocks if wide else blocks8) * BLOCK


def from_codes(
    q: torch.Tensor, scales: torch.Tensor, w: PackedWeight, granularity: str = "block"
) -> QuantizedActivations:
    """Activations of codes int8 [M, Kp] in the order of `w` and scales float32 [M, Kp/128] of a `granularity`."""
    import torch

    m, low, high = sizes(q.shape[0], w.k, w.blocks8, not w.native)
    pairs = q[:, : low * 2].view(torch.uint8) & 15
    return QuantizedActivations(
        q4=(pairs[:, 0::2] | pairs[:, 1::2] << 4).contiguous(),
        q8=q[:, q.shape[1] - high :].contiguous(),
        scales=torch.nn.functional.pad(scales.T, (0, -m % 4), value=1.0).contiguous(),
        shape=(m, w.k),
        blocks8=w.blocks8,
        order=w.order,
        granularity=granularity,
    )


@lru_cache(maxsize=1024)
def plan(
    m: int,
    k: int,
    blocks8: int,
    *,
    dtype: str,
    permuted: bool,
    norm: bool,
    granularity: str,
    wide: bool,
    front: str = "none",
    target: Target,
    device: Target | None = None,
) -> KernelRequest:
    """The kernel that quantizes m >= 1 rows of k values.

    Args:
        front: what comes with it, of `quantize_blocks.FRONTS`. device: the GPU, where that is newer than `target`.
    """
    warps = schedules.quantizer_warps(k, device or target, m)
    params = dict(
        k=k, blocks8=blocks8, dtype=dtype, permuted=permuted, gain=norm, granularity=granularity, wide=wide, warps=warps
    )
    if front != "none":
        params["front"] = front
    entry = f"{program.__name__}:build"
    flags = launching.ptx_flags(target, device)
    return KernelRequest("w4ax.quantize_blocks", entry, tuple(params.items()), target, program.PASS_CONFIGS, flags)


def run(
    x: torch.Tensor,
    w: PackedWeight,
    rms_weight: torch.Tensor | None,
    eps: float,
    granularity: str | None,
    static_scales: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
) -> QuantizedActivations:
    """The eager path of `quantize_activations`."""
    import torch

    granularity = granularity or ("two_level" if w.two_level else "block")
    if x.requires_grad:
        launching.check_no_grad(x, "quantize_activations")
    front = "none"
    if residual is not None or activation is not None or not x.shape or x.shape[-1] != w.k:
        front = front_of(x, w, rms_weight, residual, activation)
    if residual is not None:
        check_memory(x, residual)
    shape = (*x.shape[:-1], w.k)
    m, low, high = sizes(prod(shape[:-1]), w.k, w.blocks8, not w.native)
    of_weight, no_norm = (w.k, w.blocks8, w.layout, w.target, not w.order), rms_weight is None
    key = (m, *of_weight, x.dtype, x.device, no_norm, granularity, front)
    if rms_weight is not None:
        _check_norm(rms_weight, eps, w.k, x.device)
    static = None
    if static_scales is not None or granularity == "static":
        static = _static(static_scales, granularity, w.blocks, x.device)
    found = _kernels.get(key) or _prepare(key, x, w)
    gain = None if rms_weight is None else _gain(rms_weight, w)
    out = QuantizedActivations(
        torch.empty((m, low), dtype=torch.uint8, device=x.device),
        torch.empty((m, high), dtype=torch.int8, device=x.device),
        torch.empty((w.blocks, -(-m // 4) * 4), dtype=torch.float32, device=x.device),
        shape,
        w.blocks8,
        w.order,
        granularity,
    )
    if m == 0:
        return out
    if w.k % program.VECTOR:
        x = torch.nn.functional.pad(x, (0, -w.k % program.VECTOR))
    x = x.reshape(m, -1)
    if not x.is_contiguous() or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    kernel, none = found
    kernel(
        x,
        *(() if residual is None else (residual.view(m, -1),)),
        none["int32"] if w.permutation is None else w.permutation,
        none["float32"] if gain is None else gain,
        none["float32"] if static is None else static,
        out.q4 if low else none["uint8"],
        out.q8 if high else none["int8"],
        out.scales,
        eps,
    )
    return out


def front_of(
    x: torch.Tensor, w: PackedWeight, rms_weight: torch.Tensor | None, residual: torch.Tensor | None, activation: Any
) -> str:
    """What comes with the quantizer, of `quantize_blocks.FRONTS`; ArgumentError unless x and the residual fit it."""
    if activation is None and residual is None:
        if not x.shape or x.shape[-1] != w.k:
            launching.check_last(x, w.k)
        return "none"
    if w.k % program.VECTOR:  # x is padded with zeros otherwise, which a residual cannot be
        name = "activation" if residual is None else "residual"
        constraint = f"needs K to be a multiple of {program.VECTOR}, not {w.k}"
        raise ArgumentError(name, "given", constraint, "make 16-bit activations of it first")
    if activation is None:
        launching.check_tensor(residual, "residual", "[..., {}]", w.k)
        launching.check_last(x, w.k)
        if residual.requires_grad:
            launching.check_no_grad(residual, "quantize_activations", "residual")
        if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
            seen = f"{weights.described(residual)} on {residual.device}"
            constraint = f"must be {weights.described(x)} on {x.device}, as x"
            raise ArgumentError("residual", seen, constraint, "pass the residual of these tokens")
        return "residual"
    if activation not in program.GATES:
        raise ArgumentError("activation", activation, f"must be one of {program.GATES}", "leave it out")
    for name, given in (("rms_weight", rms_weight), ("residual", residual)):
        if given is not None:
            raise ArgumentError(name, "given", "does not go with activation", "leave one of them out")
    if not x.shape or x.shape[-1] != 2 * w.k:
        launching.check_last(x, 2 * w.k)
    return activation


def check_front(front: str, k: int) -> None:
    """Raise ArgumentError unless a quantizer of rows of k values has this front."""
    if front not in program.FRONTS or (front != "none" and k % program.VECTOR):
        constraint = f"must be one of {program.FRONTS}, where K is a multiple of {program.VECTOR}"
        raise ArgumentError("front", front, constraint, "leave it out")


def check_memory(x: torch.Tensor, residual: torch.Tensor) -> None:
    """Raise ArgumentError unless a residual can be written beside x; a traced call cannot ask."""
    if not residual.is_contiguous() or residual.data_ptr() % 16:
        seen, constraint = f"strides {list(residual.stride())}", "is written: contiguous, at a multiple of 16 bytes"
        raise ArgumentError("residual", seen, constraint, "pass residual.contiguous(), and keep it")
    if x.is_contiguous():  # else a copy is read
        launching.check_apart(residual, "residual", x=x)


def default_granularity(w: PackedWeight) -> str:
    """Of activations for `w`: as its own scales are."""
    return "two_level" if w.two_level else "block"


_kernels: dict[tuple, tuple] = {}


def _prepare(key: tuple, x: torch.Tensor, w: PackedWeight) -> tuple:
    """Kernel and stand-ins for what it does not read or write, remembered under `key`."""
    m, _, _, _, _, in_order, _, _, no_norm, granularity, front = key
    dtype = weights.dtype_name(x)
    if dtype not in DTYPES:
        raise ArgumentError("x", dtype, "must be float16 or bfloat16", "cast the activations")
    if granularity not in GRANULARITIES:
        raise ArgumentError("granularity", granularity, f"must be one of {GRANULARITIES}", "leave it out")
    launching.check_tokens(m)
    if not x.is_cuda or x.device != w.device:
        raise launching.elsewhere(x, w.device)
    if m == 0:
        return (None, None)
    target, device = launching.targets(w.target, x.device)
    request = plan(
        m, w.k, w.blocks8, dtype=dtype, permuted=not in_order, norm=not no_norm, granularity=granularity,
        wide=not w.native, front=front, target=target, device=device,
    )  # fmt: skip
    kernel = launching.warm_kernel(request, m, "w4ax.quantize_activations", x.device)
    found = _kernels[key] = (kernel, stand_ins(x.device))
    return found


@cache
def stand_ins(device: torch.device) -> dict[str, torch.Tensor]:
    """dtype -> a tensor for arguments that a kernel does not use."""
    import torch

    shapes = {"int32": (1,), "float32": (1,), "uint8": (1, 1), "int8": (1, 1)}
    zeros = lambda name: torch.zeros(shapes[name], dtype=getattr(torch, name), device=device)
    return lasting(device, lambda: {name: zeros(name) for name in shapes})


def _check_norm(rms_weight: torch.Tensor, eps: float, k: int, device: torch.device) -> None:
    launching.check_tensor(rms_weight, "rms_weight", "float [{}]", k)
    if tuple(rms_weight.shape) != (k,) or not rms_weight.dtype.is_floating_point or rms_weight.device != device:
        seen = f"{weights.dtype_name(rms_weight)} {list(rms_weight.shape)} on {rms_weight.device}"
        constraint = f"must be a float vector [{k}] on {device}"
        raise ArgumentError("rms_weight", seen, constraint, "pass a value for each channel")
    launching.check_eps(eps)


def _gain(rms_weight: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    """float32 [Kp] in the weight's order, kept with the vector that it was made of until that changes."""
    key, state = ("w4ax", w.order, w.blocks), derived.state_of(rms_weight)
    found = derived.find(rms_weight, key, state)
    make = lambda: arrange(rms_weight.float()[None], w.blocks, w.permutation)[0]
    return derived.keep(rms_weight, key, state, make) if found is None else found


def _static(scales: torch.Tensor | None, granularity: str, blocks: int, device: torch.device) -> torch.Tensor | None:
    if scales is not None:
        launching.check_tensor(scales, "static_scales", "float [{}]", blocks)
    if (granularity == "static") != (scales is not None):
        seen = None if scales is None else list(scales.shape)
        raise ArgumentError("static_scales", seen, "goes with granularity='static'", "pass both or none")
    if scales is None:
        return None
    if tuple(scales.shape) != (blocks,) or not scales.dtype.is_floating_point or scales.device != device:
        seen = f"{weights.dtype_name(scales)} {list(scales.shape)} on {scales.device}"
        raise ArgumentError("static_scales", seen, f"must be float [{blocks}] on {device}", "one for each block")
    return scales.float().contiguous()
