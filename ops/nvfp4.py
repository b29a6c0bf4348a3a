"""NVFP4: y[M, N] = x[M, K] w[N, K]^T (+ bias), w in e2m1 codes with an e4m3 scale for each 16 k and a float32 of rows.

    w = terrazzo.ops.nvfp4.quantize(weight)        # or pack(codes, scales, factors), from_modelopt
    y = terrazzo.ops.nvfp4.gemm(x, w)              # x bfloat16 or float16; no weight is rounded

Format and numerics: `NVFP4` of terrazzo.ops.products.codes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.ops import dlpack
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints import nvfp4 as published
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.weight_only import format, grouped, op
from terrazzo.ops.weight_only.entry import gemm, grouped_gemm
from terrazzo.ops.weight_only.format import PackedWeight, QuantizedWeight
from terrazzo.ops.weight_only.op import weight_requests
from terrazzo.ops.weight_only.quantizer import quantize_nvfp4 as quantize_weight

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.checkpoints.config import LayerConfig
    from terrazzo.ops.dlpack import SupportsDLPack

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedWeight",
    "from_compressed_tensors",
    "from_modelopt",
    "gemm",
    "grouped_gemm",
    "grouped_requests",
    "iter_layers",
    "kernel_requests",
    "load_layer",
    "load_model",
    "pack",
    "quantize",
    "quantize_weight",
    "read_layer",
    "weight_requests",
]
GROUP_SIZE = 16
_FACTS = dict(symmetric=True, scale_dtype="e4m3", weight="nvfp4")


def _read(tensors: dict[str, Any], config: LayerConfig) -> QuantizedWeight:
    """By the names of its tensors: modelopt has weight_scale_2, compressed-tensors weight_global_scale."""
    return (published.unpack_modelopt if "weight" in tensors else published.unpack)(**tensors)


FAMILY = loaders.Family("nvfp4", {"nvfp4": _read}, format.pack, activations=("",))


def __dir__() -> list[str]:
    return sorted(__all__)


@dlpack.accepting
def pack(
    codes: SupportsDLPack | QuantizedWeight,
    scales: SupportsDLPack | None = None,
    factors: SupportsDLPack | None = None,
    *,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are.

    Args:
        codes: uint8 [N, K], 0..15: sign, two bits of exponent, one of mantissa; or a QuantizedWeight (then the other
            tensors must be left out).
        scales: float8_e4m3fn [N, ceil(K / 16)], or its bytes as uint8. A negative one changes signs of its codes.
        factors: float32 [], [1] or [N], above 0: what rows are multiplied by beside; None for 1. bias: [N].
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`. TargetError: see `Target.parse`.
    """
    return format.pack(format.made(codes, scales, bias, "nvfp4", GROUP_SIZE, factors), target=target)


@dlpack.accepting
def from_modelopt(
    weight: SupportsDLPack,
    weight_scale: SupportsDLPack,
    weight_scale_2: SupportsDLPack,
    *,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of modelopt's NVFP4 or W4A16_NVFP4, packed: codes times weight_scale times weight_scale_2.

    Args:
        weight: uint8 [N, K/2], the first of two codes in the lower half. weight_scale: float8_e4m3fn [N, K/16].
        weight_scale_2: float32 [] or [1]. bias: float [N]. target: see `pack`.

    Raises:
        ArgumentError: wrong shapes or dtypes (scales that are swizzled, too), or a scale that is NaN.
    """
    return format.pack(published.unpack_modelopt(weight, weight_scale, weight_scale_2, bias=bias), target=target)


@dlpack.accepting
def from_compressed_tensors(
    weight_packed: SupportsDLPack,
    weight_scale: SupportsDLPack,
    weight_global_scale: SupportsDLPack,
    *,
    bias: SupportsDLPack | None = None,
    target: Target | str | None = None,
) -> PackedWeight:
    """A layer of compressed-tensors' nvfp4-pack-quantized, packed: codes times weight_scale over weight_global_scale.

    Args:
        weight_packed: uint8 [N, K/2], the first of two codes in the lower half. weight_scale: float8_e4m3fn [N, K/16].
        weight_global_scale: float32 [1], a divisor. bias: float [N]. target: see `pack`.

    Raises:
        ArgumentError: wrong shapes or dtypes (scales that are swizzled, too), or a scale that is NaN.
    """
    return format.pack(published.unpack(weight_packed, weight_scale, weight_global_scale, bias=bias), target=target)


def quantize(
    weight: SupportsDLPack, *, bias: SupportsDLPack | None = None, target: Target | str | None = None
) -> PackedWeight:
    """Quantize and pack a float weight: `pack(quantize_weight(...), target=target)`.

    Args:
        weight: float [N, K], finite; it is quantized where it lies.
        bias: float [N], kept with the weight.
        target: GPU target to record, see `pack`.

    Raises:
        ArgumentError: see `quantize_weight`. TargetError: see `Target.parse`.
    """
    return format.pack(quantize_weight(weight, bias=bias), target=target)


def kernel_requests(
    n: int,
    k: int,
    *,
    group_size: int = GROUP_SIZE,
    m: int | Sequence[int] | None = None,
    dtype: str = "bfloat16",
    target: Target | str,
    bias: bool = False,
) -> list[KernelRequest]:
    """The kernels that serve an [n, k] weight: for the given M, or for every M (None). Needs no GPU.

    Args:
        n, k: of the weight. group_size: 16. m: numbers of tokens.
        dtype: of activations and output, "float16" or "bfloat16". bias: whether one is added.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    return op.kernel_requests(n, k, group_size=group_size, m=m, dtype=dtype, target=target, bias=bias, **_FACTS)


def grouped_requests(
    n: int,
    k: int,
    experts: int,
    *,
    group_size: int = GROUP_SIZE,
    m: int | tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
    bias: bool = False,
    target: Target | str = "sm_90a",
) -> list[KernelRequest]:
    """The kernels that `grouped_gemm` uses for these M (None: M of every bucket). Needs no GPU.

    Args:
        n, k: of each expert's weight. experts: number of them. m: tokens of all experts together.
        group_size, dtype, bias: see `kernel_requests`.

    Raises:
        ArgumentError: a value that no kernel serves.
        TargetError: an unknown target.
    """
    facts = dict(m=m, dtype=dtype, bias=bias, target=target)
    return grouped.grouped_requests(n, k, experts, group_size=group_size, **facts, **_FACTS)


def read_layer(
    path: str | Path, name: str | None = None, *, device: str | int | torch.device = "cpu"
) -> QuantizedWeight:
    """Canonical weight of one NVFP4 layer of a checkpoint; activations that it quantizes stay in 16 bits.

    Args:
        path: a .safetensors file or a Hugging Face folder; a config beside the file is read too.
        name: prefix of the layer's tensors; None when the checkpoint has only one layer.
        device: where the weight is built, as torch names it.

    Raises:
        ArgumentError: no such layer, a missing tensor, or a layer that its config or further tensors give another
            meaning (`load_model` skips it with the same reason).
    """
    return loaders.read_layer(FAMILY, path, name, format=None, device=device)


def load_layer(
    path: str | Path,
    name: str | None = None,
    *,
    device: str | int | torch.device = "cpu",
    target: Target | str | None = None,
) -> PackedWeight:
    """`pack(read_layer(path, name, device=device), target=target)`."""
    return format.pack(read_layer(path, name, device=device), target=target)


def iter_layers(path: str | Path, **options: Any) -> Iterator[loaders.Layer]:
    """A checkpoint's layers one at a time, as `w4a16.iter_layers` does and with its options `select`, `packed`,
    `strict`, `device` and `target`."""
    yield from loaders.iter_layers(FAMILY, path, **options)


def load_model(path: str | Path, **options: Any) -> loaders.Model:
    """All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
    return loaders.load_model(FAMILY, path, **options)
