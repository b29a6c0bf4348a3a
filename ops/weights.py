"""What every operator asks of values that a caller passes: tensors, numbers, devices, paths."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target

Weight = TypeVar("Weight")
FLOATS = ("float16", "bfloat16", "float32")
BROKEN = (KeyError, AttributeError, TypeError, ValueError, OverflowError)
"""What safetensors raises, besides its own error, for tensors of dtypes that torch does not have."""


def dtype_name(tensor: torch.Tensor) -> str:
    """ "float16" of torch.float16."""
    return str(tensor.dtype).removeprefix("torch.")


def described(value: object) -> str | None:
    """What a caller passed for a tensor, for messages: "float16 [2, 3]", or the name of another type; None of None."""
    import torch

    if isinstance(value, torch.Tensor):
        return dtype_name(value) if value.is_nested else f"{dtype_name(value)} {list(value.shape)}"
    return None if value is None else type(value).__name__


def kind(value: object) -> str:
    """What a caller passed, for messages: "w4a8.PackedWeight", or the name of another type."""
    product = getattr(value, "_product", None)
    return f"{product.module}.{type(value).__name__}" if product else type(value).__name__


@contextmanager
def renamed(**names: str) -> Iterator[None]:
    """ArgumentErrors from inside name what the caller passed: argument of the canonical form -> the caller's."""
    try:
        yield
    except ArgumentError as error:
        if error.argument not in names:
            raise
        raise type(error)(names[error.argument], error.value, error.constraint, error.remedy) from None


def is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or dtype_name(tensor) == "bool")


def as_tensor(name: str, value: object, device: torch.device | None = None) -> torch.Tensor:
    """`value` as a tensor without a gradient, on `device` if given.

    Raises:
        ArgumentError: it is no tensor, array or list of numbers, or holds no data.
    """
    import torch

    if isinstance(value, torch.Tensor):
        check_dense(name, value)
    try:
        if isinstance(value, torch.Tensor) and device is None:  # a default device would move it
            tensor = value.detach()
        else:
            tensor = torch.as_tensor(value, device=device).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(name, type(value).__name__, "must be a tensor", "pass a tensor or an array") from error
    if dtype_name(tensor) in ("uint16", "uint32", "uint64"):  # torch compares these with nothing
        tensor = tensor.long()
    return tensor


def as_tensors(**given: object) -> Iterator[torch.Tensor | None]:
    """`as_tensor` of each, where the first one lies, which is needed; None of another stays None."""
    device = None
    for name, value in given.items():
        if value is None and device is not None:
            yield None
            continue
        tensor = as_tensor(name, value, device)
        device = device or tensor.device
        yield tensor


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise ArgumentError for sparse, nested, oneDNN and quantized tensors, and for those on the meta device."""
    import torch

    if tensor.is_nested or tensor.is_meta or tensor.is_quantized or tensor.layout is not torch.strided:
        form = "nested" if tensor.is_nested else str(tensor.layout)
        seen = f"{described(tensor)} on {tensor.device}, {form}"
        raise ArgumentError(name, seen, "must be dense and hold data", "load the checkpoint first, or call .to_dense()")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [..., bytes of the last dimension] of a tensor in row order."""
    import torch

    tensor = tensor.contiguous()
    if tensor.stride(-1) != 1:  # [G, 1] counts as contiguous with any last stride; a view of its bytes needs 1
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)


def path_of(path: object) -> Path:
    """The path that a caller named; ArgumentError for what is no path."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str) or "\0" in os.fspath(path):
        raise ArgumentError("path", path, "must be a str or os.PathLike without NUL", "name a file or folder")
    return Path(path)


def check_floats(name: str, value: object, shape: str, remedy: str) -> None:
    """Raise ArgumentError unless a value is a tensor of floats, up to 64 bits, that holds data."""
    import torch

    if isinstance(value, torch.Tensor):
        check_dense(name, value)
    if not isinstance(value, torch.Tensor) or dtype_name(value) not in (*FLOATS, "float64"):
        seen = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ArgumentError(name, seen, f"must be a float tensor {shape}", remedy)


def check_finite(name: str, value: torch.Tensor, remedy: str, least: float | None = None) -> None:
    """Raise ArgumentError for floats that are no float32, in which quantizers compute, or that are below `least`."""
    import torch

    if not value.numel() or value.is_meta:
        return
    if dtype_name(value) in (*FLOATS, "float64"):  # one pass: NaN is the smallest and the largest of what holds it
        low, high = torch.stack(value.aminmax()).tolist()
        finite = math.isfinite(low) and math.isfinite(high)
    else:
        low, finite = 0.0, bool(value.isfinite().all())
    if not finite:
        raise ArgumentError(name, "NaN or infinity", "must be finite", remedy)
    if least is not None and low < least:
        raise ArgumentError(name, low, f"must be at least {least:g}", remedy)
    if dtype_name(value) == "float64" and not bool(value.float().isfinite().all()):
        seen = float(value.abs().max())
        raise ArgumentError(name, seen, "must be in the range of float32, up to 3.4e38", "scale it down")


def check_matrix(weight: object) -> tuple[int, int]:
    """(N, K) of a float weight that can be quantized.

    Raises:
        ArgumentError: it is no matrix of floats, empty, without data, or beyond float32.
    """
    check_floats("weight", weight, "[N, K] with N, K >= 1", "pass nn.Linear.weight")
    if weight.ndim != 2 or 0 in weight.shape:
        raise ArgumentError("weight", list(weight.shape), "must be [N, K] with N, K >= 1", "pass nn.Linear.weight")
    check_finite("weight", weight, "repair the checkpoint")
    return weight.shape[0], weight.shape[1]


def as_tokens(x: object, weight: torch.Tensor) -> torch.Tensor:
    """Activations [..., K] of a weight [N, K] as [T, K]: leading dimensions are flattened, as `nn.Linear` takes them.

    Raises:
        ArgumentError: no floats, without tokens, of another K or device than the weight's, or not finite.
    """
    shape = f"[..., {weight.shape[1]}]"
    check_floats("x", x, shape, "pass this layer's input")
    if not x.ndim or not x.numel() or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        seen, constraint = f"{list(x.shape)} on {x.device}", f"must be activations {shape} of one token or more"
        raise ArgumentError("x", seen, f"{constraint}, on {weight.device}", "pass this layer's input")
    check_finite("x", x, "leave broken samples out")
    return x.reshape(-1, x.shape[-1])


def spread_rows(x: torch.Tensor, most: int) -> torch.Tensor:
    """At most so many rows of [T, K], evenly spread, in float32."""
    import torch

    ends = dict(dtype=torch.float64, device=x.device)
    return x[torch.linspace(0, len(x) - 1, min(len(x), most), **ends).round().long()].float()


def check_codes(codes: torch.Tensor, low: int, high: int, remedy: str) -> tuple[int, int]:
    """(N, K) of codes; ArgumentError unless they are integers [N, K] from `low` to `high`. remedy: for other ones."""
    if codes.ndim != 2 or 0 in codes.shape or not is_integer(codes):
        constraint, other = "must be integers [N, K] with N, K >= 1", "pass one code for each weight"
        raise ArgumentError("codes", described(codes), constraint, f"{other}; quantize() makes them from floats")
    if (value := out_of_range(codes, low, high)) is not None:
        raise ArgumentError("codes", value, f"must be in {low}..{high}", remedy)
    return codes.shape[0], codes.shape[1]


def check_vector(name: str, values: torch.Tensor | None, size: int) -> None:
    """Raise ArgumentError unless a value is a finite float vector of this size."""
    if values is None or tuple(values.shape) != (size,) or dtype_name(values) not in FLOATS:
        constraint = f"must be a float vector [{size}] of {' or '.join(FLOATS)}"
        what = "input channel" if name == "smooth" else "output feature"
        raise ArgumentError(name, described(values), constraint, f"pass one value for each {what}")
    check_finite(name, values, "repair the checkpoint")


def bias_of(bias: torch.Tensor | None, n: int) -> torch.Tensor | None:
    """A caller's bias [N], contiguous; None for none. ArgumentError for what is none."""
    if bias is None:
        return None
    check_vector("bias", bias, n)
    return bias.contiguous()


def smooth_of(smooth: torch.Tensor | None, k: int) -> torch.Tensor | None:
    """float32 [K] of a caller's smooth vector, None for none. ArgumentError for what is none."""
    if smooth is None:
        return None
    check_vector("smooth", smooth, k)
    if not bool((smooth > 0).all()):
        raise ArgumentError("smooth", float(smooth.min()), "must be positive", "clamp it before folding it")
    return smooth.float().contiguous()


def check_count(name: str, value: object, remedy: str = "use the default", most: int = 2**31 - 1) -> None:
    """Raise ArgumentError unless a value is a positive integer, at most `most`."""
    if type(value) is not int or value < 1:
        raise ArgumentError(name, value, "must be a positive integer", remedy)
    if value > most:
        raise ArgumentError(name, value if value < 10**18 else "a longer number", f"must be at most {most}", remedy)


def importance_of(importance: Any, k: int, device: torch.device) -> torch.Tensor | None:
    """float32 [K] weights of a quantizer's squared error, on a device; None for none.

    Raises:
        ArgumentError: another shape, or values that are negative or not finite.
    """
    if importance is None:
        return None
    given = as_tensor("importance", importance, device)
    if tuple(given.shape) != (k,) or given.is_complex() or not bool((given.float().isfinite() & (given >= 0)).all()):
        seen = f"{given.dtype} {list(given.shape)}"
        raise ArgumentError("importance", seen, f"must be finite [{k}], >= 0", "pass the inputs' mean square")
    return given.float()


def check_share(name: str, value: object) -> None:
    """Raise ArgumentError unless a value is a number above 0, up to 1."""
    if not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ArgumentError(name, value, "must be a number above 0, up to 1", "use the default")


def out_of_range(values: torch.Tensor, low: int, high: int) -> int | None:
    """First value outside low..high, or None."""
    bad = values > high if low == 0 and not values.dtype.is_signed else (values < low) | (values > high)
    return int(values[bad][0]) if bool(bad.any()) else None


def tensor_fields(weight: Any) -> dict[str, torch.Tensor]:
    """The fields of a weight that hold tensors."""
    import torch

    fields = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def device_of(device: str | int | torch.device) -> torch.device:
    """The torch device that a caller named, as torch takes it: "cuda", "cuda:1", "cpu", a torch.device, or the index of
    a GPU (torch.cuda.current_device()).

    Raises:
        ArgumentError: it is no device (a dtype, say), or a CUDA device that torch does not see.
    """
    import torch

    try:
        found = torch.device("cuda", device) if type(device) is int else torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        constraint = "must be a device"
        if isinstance(device, torch.dtype):
            constraint += ": the bytes of a weight have no other dtype"
        raise ArgumentError("device", device, constraint, "pass 'cuda', 'cuda:1', 0 or 'cpu'") from error
    if found.type == "cuda":
        if not torch.cuda.is_available():
            remedy = "pass 'cpu'; `terrazzo info` says why"
            raise ArgumentError("device", str(found), "torch sees no CUDA device", remedy)
        if found.index is not None and found.index >= torch.cuda.device_count():
            constraint = f"torch sees {torch.cuda.device_count()} CUDA devices"
            raise ArgumentError("device", str(found), constraint, "pass the index of one of them, from 0")
    return found


def device_name(device: torch.device) -> str:
    """What safetensors calls a device: "cuda" alone would be the first GPU there, not the current one."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if device.type == "cuda" and device.index is None else str(device)


def move(weight: Weight, device: str | int | torch.device) -> Weight:
    """The same weight on another device; ArgumentError for what is none."""
    to = device_of(device)
    return dataclasses.replace(weight, **{name: t.to(to) for name, t in tensor_fields(weight).items()})


def arch_of(target: Target | str | None, device: torch.device) -> str | None:
    """Architecture to record in a packed weight: of `target`, else of the CUDA device, else None (any)."""
    if target is None and device.type != "cuda":
        return None
    from terrazzo.lowering.targets import Target

    return (Target.detect(device) if target is None else Target.parse(target)).arch


def check_layout(stored: str, identity: str, argument: str) -> None:
    """Raise LayoutMismatchError unless a weight was packed with the layout named `identity`."""
    if stored != identity:
        raise LayoutMismatchError(
            argument,
            stored,
            f"must be packed with layout {identity}",
            "pack the canonical weight again with this version",
        )


def check_tensor(
    weight: Any, name: str, shape: tuple[int, ...], dtype: str, remedy: str = "pack the weight again"
) -> None:
    """Raise ArgumentError unless the weight's tensor `name` is contiguous and of this shape and dtype."""
    tensor = getattr(weight, name)
    if tuple(tensor.shape) != shape or dtype_name(tensor) != dtype or not tensor.is_contiguous():
        raise ArgumentError(
            name,
            f"{dtype_name(tensor)} {list(tensor.shape)}",
            f"must be contiguous {dtype} {list(shape)} for {weight!r}",
            remedy,
        )


def check_vectors(weight: Any) -> None:
    """Raise ArgumentError unless bias, permutation and smooth vector fit the weight and lie where its words are."""
    rules = (("bias", weight.n, FLOATS), ("perm", weight.k, ("int32",)), ("smooth", weight.k, ("float32",)))
    for name, size, dtypes in rules:
        t = getattr(weight, name, None)
        if t is None:
            continue
        device = weight.words.device
        if tuple(t.shape) != (size,) or dtype_name(t) not in dtypes or t.device != device or not t.is_contiguous():
            seen = f"{dtype_name(t)} {list(t.shape)} on {t.device}"
            constraint = f"must be contiguous {' or '.join(dtypes)} [{size}] on {device} for {weight!r}"
            raise ArgumentError(name, seen, constraint, "pack the weight again, or move it with .to()")
