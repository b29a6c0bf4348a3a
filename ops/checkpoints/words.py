"""Words of codes of 2, 4 or 8 bits in checkpoints, and checks of the tensors that hold them.

Every word is an int32 that holds 8 codes, nibble i in bits 4i..4i+3, or 16 of 2 bits, or 4 of 8 bits, in that order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.conventions.base import Tensors


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, 8C]: the nibbles of each word in natural order."""
    return codes_of(words, 4)


def codes_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] -> uint8 [R, 32 C / bits]: the codes of each word in natural order."""
    return parts_of(word_bytes(words, words.shape[0], -1), bits)


def parts_of(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., 8 C / bits]: the codes of each byte of [..., C], from its lowest bits on."""
    import torch

    return torch.stack([values >> at & (1 << bits) - 1 for at in range(0, 8, bits)], dim=-1).flatten(-2)


def word_bytes(words: torch.Tensor, *shape: int) -> torch.Tensor:
    return weights.as_bytes(words).view(shape)  # little-endian: byte b holds nibbles 2b and 2b + 1


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] of 4-bit codes uint8 [..., K]: two in a byte, the first in its lower half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of `codes_of`: uint8 [R, C] -> int32 [R, ceil(C * bits / 32)], zeros after the last code."""
    import torch

    rows, columns = codes.shape
    whole = torch.nn.functional.pad(codes, (0, -columns % (32 // bits)))
    return (pairs(whole) if bits == 4 else whole).contiguous().view(rows, -1).view(torch.int32)


def check_bits(bits: float, argument: str = "bits", wanted: int = 4) -> None:
    if not isinstance(bits, int | float):
        raise ArgumentError(argument, bits, f"must be the number {wanted}", "pass what the checkpoint's config states")
    if bits != wanted:
        bits = int(bits) if bits % 1 == 0 else round(bits, 2)
        other = {4: "w4a16", 8: "w8a16"}.get(bits)
        constraint = f"{wanted}-bit codes are read; the words hold {bits} bits for each weight"
        remedy = f"load it with {other}" if other else "quantize the model to 4 or 8 bits"
        if wanted == 2:  # of GPTQ alone, where the config states them
            remedy = "state the bits that the words have in its config, or quantize the model to 2, 4 or 8 bits"
        raise ArgumentError(argument, bits, constraint, remedy)


def check_float(name: str, tensor: torch.Tensor, shape: str) -> None:
    if not hasattr(tensor, "dtype"):
        seen = weights.described(tensor)
        raise ArgumentError(name, seen, f"must be a float tensor {shape}", "add the layer's tensor of that name")
    check_plain(name, tensor)
    if (
        tensor.ndim != 2
        or 0 in tensor.shape
        or str(tensor.dtype) not in ("torch.float16", "torch.bfloat16", "torch.float32")
    ):
        raise shape_error(name, tensor, f"f16, bf16 or f32 {shape}")


def check_words(name: str, words: torch.Tensor, shape: tuple[int | None, int | None]) -> tuple[int, int]:
    """Check an int32 word tensor against a shape with at most one open size; return its shape."""
    wanted = f"int32 [{', '.join('*' if size is None else str(size) for size in shape)}]"
    if not hasattr(words, "dtype"):
        seen = weights.described(words)
        raise ArgumentError(name, seen, f"must be {wanted}", "add the layer's tensor of that name")
    check_plain(name, words)
    fits = (
        words.ndim == 2 and all(want in (None, have) for want, have in zip(shape, words.shape)) and 0 not in words.shape
    )
    if not fits or str(words.dtype) != "torch.int32":
        raise shape_error(name, words, wanted)
    return tuple(words.shape)


def check_index(name: str, index: torch.Tensor) -> None:
    """A vector of group numbers."""
    check_plain(name, index)
    if str(getattr(index, "dtype", None)) not in ("torch.int32", "torch.int64") or index.ndim != 1:
        seen = f"{index.dtype} {list(index.shape)}" if hasattr(index, "dtype") else type(index).__name__
        remedy = "pass the layer's tensors as the checkpoint stores them"
        raise ArgumentError(name, seen, "must be int32 [K], the group of each channel", remedy)


def check_plain(name: str, tensor: object) -> None:
    """Raise ArgumentError for tensors that are not dense, or hold no data; what is no tensor is refused elsewhere."""
    import torch

    if isinstance(tensor, torch.Tensor):
        weights.check_dense(name, tensor)


def shape_error(name: str, tensor: torch.Tensor, wanted: str) -> ArgumentError:
    seen = weights.described(tensor)
    return ArgumentError(
        name, seen, f"must be {wanted} to match the scales", "pass the layer's tensors as the checkpoint stores them"
    )


def check_group(group_size: int | None) -> int | None:
    if group_size is not None and type(group_size) is not int:
        remedy = "pass the group size that the checkpoint's config states, -1 for one group"
        raise ArgumentError("group_size", group_size, "must be an integer", remedy)
    return group_size


def check_int8(name: str, tensor: torch.Tensor | None, shape: tuple[int | None, int | None]) -> None:
    import torch

    check_plain(name, tensor)
    fits = isinstance(tensor, torch.Tensor) and tensor.dtype == torch.int8 and tensor.ndim == 2 and tensor.numel()
    if not fits or any(want not in (None, size) for want, size in zip(shape, tensor.shape)):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        constraint = f"must be a tensor, int8 [{wanted}]"
        raise ArgumentError(name, weights.described(tensor), constraint, "add the layer's tensor")


def static_scale(tensors: Tensors, announced: bool, unknown: bool) -> dict[str, float]:
    """`input_scale` of a layer whose activations have one scale, as its config announces, or where nothing is known."""
    scale = tensors.get("input_scale")
    if announced and scale is None:
        raise ArgumentError("input_scale", None, "the config states static activations", "get the missing shard")
    if scale is None or not (announced or unknown):
        return {}
    return {"input_scale": one_number("input_scale", scale)}


def one_number(name: str, value: torch.Tensor) -> float:
    if value.numel() != 1:
        seen = weights.described(value)
        raise ArgumentError(name, seen, "must be one number for all tokens", "take the largest of joined layers")
    return float(value.float())
