"""What operators on rows do before a launch: checks, what they allocate, vectors in float32 that are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.ops import derived, launching, quantized, weights
from terrazzo.schedules import rows

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

DTYPES = ("float16", "bfloat16")


def check_columns(k: int, name: str = "x") -> None:
    """Raise ArgumentError unless rows of k values are whole vectors that a CTA holds."""
    if type(k) is not int or not 0 < k <= rows.MAX_COLUMNS or k % rows.VECTOR:
        constraint = f"must have rows of a multiple of {rows.VECTOR} values, at most {rows.MAX_COLUMNS}"
        raise ArgumentError(name, k, constraint, "pad rows with zeros, or split them")


def check_choice(name: str, value: Any, known: tuple) -> None:
    """Raise ArgumentError unless a value is one of the known ones."""
    if value not in known:
        raise ArgumentError(name, value, f"must be one of {known}", f"leave {name} out")


def check_rows(x: Any, operator: str, name: str = "x", what: str = "[..., K]") -> None:
    """Raise ArgumentError unless x is a float16 or bfloat16 tensor of rows, without a gradient to keep."""
    launching.check_tensor(x, name, what)
    if x.requires_grad:
        launching.check_no_grad(x, operator, name)
    if weights.dtype_name(x) not in DTYPES:
        raise ArgumentError(name, weights.dtype_name(x), f"must be one of {DTYPES}", "cast the activations")
    if not x.ndim or not x.shape[-1]:
        raise ArgumentError(name, list(x.shape), f"must be {what}", "pass activations")


def check_vector(vector: Any, name: str, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ArgumentError unless a vector is a float tensor of this shape on x's device."""
    launching.check_tensor(vector, name, "float {}", list(shape))
    if tuple(vector.shape) != shape or not vector.dtype.is_floating_point or vector.device != device:
        seen = f"{weights.described(vector)} on {vector.device}"
        constraint = f"must be a float tensor {list(shape)} on {device}"
        raise ArgumentError(name, seen, constraint, "pass a value for each channel")


def bucket(m: int, index: int) -> int:
    """The bucket of M on a CUDA device."""
    return rows.bucket(launching.detect(index), m)


def vector(x: torch.Tensor) -> torch.Tensor:
    """x as kernels read vectors: contiguous, at a multiple of 16 bytes."""
    return launching.aligned_copy(x) if not x.is_contiguous() or x.data_ptr() % 16 else x


def kept(owner: torch.Tensor, other: torch.Tensor | None, kind: tuple, make: Callable[[], Any]) -> torch.Tensor:
    """A vector made of `owner` and `other`, kept with `owner` until one of them changes."""
    key, state = (*kind, id(other)), (derived.state_of(owner), derived.state_of(other))
    found = derived.find(owner, key, state)
    return derived.keep(owner, key, state, make, (other,)) if found is None else found


def inverse_of(smooth: torch.Tensor) -> torch.Tensor:
    """float32: 1 / smooth, kept with it."""
    return kept(smooth, None, ("rows", "inverse"), lambda: 1 / smooth.float())


def prepare(
    request: KernelRequest, m: int, operator: str, device: torch.device, matrices: tuple, vectors: tuple
) -> tuple:
    """(kernel, its launcher, a stand-in [1, 1] of each dtype of `matrices`, and [1] of each of `vectors`)."""
    kernel = launching.warm_kernel(request, m, operator, device)
    made = launching.stand_ins(device, *matrices, *vectors)
    made[: len(matrices)] = [t.view(1, 1) for t in made[: len(matrices)]]
    return (kernel, kernel.launcher(device.index), *map(launching.argument, made))


def allocate(
    x: torch.Tensor, shape: tuple[int, ...], quant: str | None, plain: bool, column_scales: bool
) -> tuple[Any, Any]:
    """(y or None, codes or None) with nothing in them."""
    y = x.new_empty(shape) if plain or quant is None else None
    return y, None if quant is None else quantized.allocate(x, shape, quant, column_scales)


def returned(y: Any, codes: Any) -> Any:
    """What a call gives: y, codes, or both."""
    return y if codes is None else codes if y is None else (codes, y)
