"""W8A8: y[M, N] = x[M, K] w[N, K]^T (+ bias), both in int8 or in e4m3, multiplied as they are.

    w = terrazzo.ops.w8a8.quantize(weight)                      # int8, a scale for each row, x by token
    w = terrazzo.ops.w8a8.quantize(weight, codes="e4m3", granularity="block")     # DeepSeek's and Qwen's 128 x 128
    y = terrazzo.ops.w8a8.gemm(x, w)                            # x bfloat16 or float16, quantized as w wants it
    y = terrazzo.ops.w8a8.gemm(terrazzo.ops.w8a8.quantize_activations(x, w), w)
    y = terrazzo.ops.w8a8.grouped_gemm(x, terrazzo.ops.w8a8.GroupedWeight.stack(experts), expert_offsets)

`terrazzo.ops.w4a8.w8a8.reference` says what is computed, and how accurately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.checkpoints import loaders
from terrazzo.ops.checkpoints import w8a8 as published
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.w4a8.w8a8 import format as w8_format
from terrazzo.ops.w4a8.w8a8.entry import gemm, grouped_gemm, quantize_activations
from terrazzo.ops.w4a8.w8a8.format import PackedWeight, QuantizedWeight
from terrazzo.ops.w4a8.w8a8.grouped import grouped_requests
from terrazzo.ops.w4a8.w8a8.op import kernel_requests, weight_requests
from terrazzo.ops.w4a8.w8a8.quantizer import quantize, quantize_weight

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.checkpoints.config import LayerConfig
    from terrazzo.ops.dlpack import SupportsDLPack

__all__ = [
    "GroupedWeight",
    "PackedWeight",
    "QuantizedWeight",
    "gemm",
    "grouped_gemm",
    "grouped_requests",
    "iter_layers",
    "kernel_requests",
    "load_layer",
    "load_model",
    "pack",
    "quantize",
    "quantize_activations",
    "quantize_weight",
    "read_layer",
    "weight_requests",
]


def __dir__() -> list[str]:
    return sorted(__all__)


@dlpack.accepting
def pack(
    codes: SupportsDLPack | QuantizedWeight,
    scales: SupportsDLPack | None = None,
    *,
    target: Target | str | None = None,
    **options: Any,
) -> PackedWeight:
    """Pack a weight for the kernels, on the device where its codes are.

    Args:
        codes: int8 or float8_e4m3fn [N, K]; or a QuantizedWeight (then nothing but `target` may be given).
        scales: float [] or [1], [N] or [N, 1], or of e4m3 [ceil(N / 128), ceil(K / 128)].
        target: GPU target to record; None takes the codes' device, or any target for CPU codes.
        options: `input_scale`, `input_zero`, `asymmetric`, `smooth` and `bias`, see `QuantizedWeight.canonical`.

    Raises:
        ArgumentError: see `QuantizedWeight.canonical`. TargetError: see `Target.parse`.
    """
    if isinstance(codes, QuantizedWeight) and scales is None and not options:
        return w8_format.pack(codes, target=target)
    return w8_format.pack(QuantizedWeight.canonical(codes, scales, **options), target=target)


def _reader(arguments: Callable[..., dict[str, Any]]) -> Callable[..., QuantizedWeight]:
    """(tensors of a layer, its config) -> its weight. Errors of static activations name what does without them."""

    def read(tensors: dict[str, torch.Tensor], config: LayerConfig) -> QuantizedWeight:
        try:
            with weights.renamed(input_zero="input_zero_point"):
                return QuantizedWeight.canonical(**arguments(tensors, config))
        except ArgumentError as error:
            if error.argument not in ("input_scale", "input_zero_point"):
                raise
            remedy = f"{error.remedy}, or pass weight_only=True to terrazzo.load, which multiplies 16-bit activations"
            raise ArgumentError(error.argument, error.value, error.constraint, remedy) from None

    return read


FAMILY = loaders.Family(
    "w8a8",
    {"int_quantized": _reader(published.int8_arguments), "fp8": _reader(published.fp8_arguments)},
    w8_format.pack,
    activations=("", "int8", "int8 static", "int8 asymmetric", "int8 static asymmetric"),
    bits=8,
)
"""How layers of published checkpoints are read."""


def read_layer(
    path: str | Path, name: str | None = None, *, device: str | int | torch.device = "cpu"
) -> QuantizedWeight:
    """Canonical weight of one int8 or fp8 layer of a checkpoint, with activations as its config says; where that says
    nothing, dynamic by token, or by 128 channels of blocks.

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
    return pack(read_layer(path, name, device=device), target=target)


def iter_layers(path: str | Path, **options: Any) -> Iterator[loaders.Layer]:
    """A checkpoint's layers one at a time, as `w4a16.iter_layers` does and with its options `select`, `packed`,
    `strict`, `device` and `target`."""
    yield from loaders.iter_layers(FAMILY, path, **options)


def load_model(path: str | Path, **options: Any) -> loaders.Model:
    """All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
    return loaders.load_model(FAMILY, path, **options)
