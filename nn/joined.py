"""Layers that a checkpoint has apart and one product serves: q, k and v; gate and up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import products
from terrazzo.nn.formats import Format, product_of
from terrazzo.nn.linear import Linear
from terrazzo.nn.module import stored_weight
from terrazzo.ops import weights
from terrazzo.ops.shards import BY_ROW
from torch import nn

if TYPE_CHECKING:
    from terrazzo.ops.w4ax.fmpq import BlockPlan
    from terrazzo.ops.weight.base import AnyCanonical as Canonical
    from terrazzo.ops.weight.base import AnyPacked as Packed

    Weight = Packed | Canonical
    Option = torch.Tensor | torch.dtype | BlockPlan | str | float | None
    """What quantizers take by name."""

APART = "quantize them alike, or keep these layers apart"


def join(
    parts: Sequence[Weight], argument: str = "parts", names: Sequence[str] | None = None, remedy: str = APART
) -> Packed:
    """The packed weight [N1 + N2 + ..., K] of packed or canonical weights [Ni, K] of one format.

    Args:
        names, remedy: what errors call the parts, and what they say to do.

    Raises:
        ArgumentError: no weights, or unlike ones: other families, groups, scale dtypes, input features, or another
            order of the input channels (`perm`, `smooth`, W4Ax's plan), which one product has in common.
    """
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ArgumentError(argument, weights.kind(parts), "must be a list of weights", "pass [q, k, v]")
    targets = {part.target for part in parts if hasattr(part, "target")}
    target = targets.pop() if len(targets) == 1 else None
    canonical = [part.unpack() if hasattr(part, "unpack") else part for part in parts]
    first, called = canonical[0], names or [f"{argument}[{at}]" for at in range(len(parts))]
    if not is_dataclass(first) or not hasattr(first, "codes"):
        raise ArgumentError(argument, weights.kind(first), "must be packed or canonical weights", "quantize them first")
    if any(type(part) is not type(first) for part in canonical):
        raise ArgumentError(argument, dict(zip(called, map(described, canonical))), "must be of one format", remedy)
    made: dict[str, Any] = {}
    for field in sorted(fields(first), key=lambda field: field.name in BY_ROW):  # group_size before its scales
        values = [getattr(part, field.name) for part in canonical]
        if field.name in BY_ROW and any(torch.is_tensor(value) for value in values):
            made[field.name] = _rows(field.name, values, canonical)
        elif not _same(values):
            seen = {name: "a vector of its own" if torch.is_tensor(it) else it for name, it in zip(called, values)}
            raise ArgumentError(field.name, seen, "must be the same for layers that one product joins", remedy)
        else:
            made[field.name] = values[0]
    return replace(first, **made).pack(target=target)


def at_one_scale(parts: Sequence[Canonical], names: Sequence[str]) -> list[Canonical]:
    """W8A8 weights of one input, whose static activations then have the largest scale of theirs, as engines do it.
    No scale is that of unlike zero points: they are refused."""
    scales = {getattr(part, "input_scale", None) for part in parts}
    if None in scales:
        return list(parts)
    stated = [(part.input_scale, part.input_zero) for part in parts]
    if len(set(stated)) > 1 and any(zero for _, zero in stated):
        constraint = f"layers of one input ({names[0]} to {names[-1]}) have unlike static scales with zero points"
        remedy = "pass weight_only=True, which multiplies 16-bit activations"
        raise ArgumentError("input_zero_point", [zero for _, zero in stated][:8], constraint, remedy)
    return [replace(part, input_scale=max(scales)) for part in parts]


def described(weight: Weight | torch.Tensor) -> str:
    """A canonical weight's operator and group in a message, "w4a16-g64"; of a float one its dtype."""
    if torch.is_tensor(weight):
        return weights.dtype_name(weight)
    group = getattr(weight, "group_size", None)
    return weights.kind(weight).partition(".")[0] + (f"-g{group if group != weight.k else 'K'}" if group else "")


def rows_of(canonical: Canonical, part: slice) -> Canonical:
    """The canonical weight of some output features of another one."""
    held = {name: getattr(canonical, name, None) for name in BY_ROW}
    return replace(canonical, **{name: t[part] for name, t in held.items() if torch.is_tensor(t)})


def joined_bias(floats: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Of float weights [Ni, K] below each other, zeros for those without one; None where none has one."""
    if all(bias is None for bias in biases):
        return None
    return torch.cat([w.new_zeros(len(w)) if bias is None else bias for w, bias in zip(floats, biases)])


def _rows(name: str, values: list, canonical: list) -> torch.Tensor:
    """Values of all parts, one below the other; zero points that are left out are 8 (of 8 bits: 128), biases 0."""
    like = next(value for value in values if value is not None)
    filled = []
    for value, part in zip(values, canonical):
        if value is None:
            size = part.scales.shape if name == "zeros" else (len(part.codes),)
            same = 1 << getattr(part, "bits", 4) - 1 if name == "zeros" else 0
            value = torch.full(size, same, dtype=like.dtype, device=like.device)
        if value.dtype != like.dtype or value.shape[1:] != like.shape[1:]:
            seen = f"{weights.described(value)} beside {weights.described(like)}"
            constraint = "must have one dtype, and one number of columns"
            raise ArgumentError(name, seen, constraint, "quantize the layers alike")
        filled.append(value)
    return torch.cat(filled)


def _same(values: list) -> bool:
    first = values[0]
    if torch.is_tensor(first):
        return all(torch.is_tensor(v) and v.shape == first.shape and torch.equal(v, first) for v in values[1:])
    return all(not torch.is_tensor(v) and v == first for v in values[1:])


def _check_sizes(sizes: object) -> None:
    if not isinstance(sizes, list | tuple) or not all(type(size) is int and size > 0 for size in sizes):
        seen = sizes if isinstance(sizes, list | tuple) else type(sizes).__name__
        raise ArgumentError("sizes", seen, "must be numbers of output features", "pass those of the parts")


class JoinedLinear(Linear):
    """One layer for several of a checkpoint; forward gives their results, views of one tensor.

    Args:
        packed: the joined weight. sizes: output features of each part.
    """

    def __init__(self, packed: Packed, sizes: Sequence[int]) -> None:
        super().__init__(packed)
        _check_sizes(sizes)
        if sum(sizes) != self.out_features:
            constraint = f"must add up to the weight's {self.out_features} output features"
            raise ArgumentError("sizes", list(sizes), constraint, "pass those of the parts")
        self.sizes = tuple(sizes)

    @classmethod
    def from_packed(cls, packed: Packed, sizes: Sequence[int] = ()) -> JoinedLinear:
        """Of a packed weight [N, K] that is joined already; sizes: the rows of each part, () for one."""
        return cls(packed, sizes)

    @classmethod
    def join(cls, *parts: Linear | Weight) -> JoinedLinear:
        """Of layers, packed or canonical weights, in order; see `joined.join`."""
        parts = tuple(part.packed if isinstance(part, Linear) else part for part in parts)
        return cls(join(parts), [part.n for part in parts])

    @classmethod
    def from_float(
        cls, source: Sequence[nn.Linear | torch.Tensor], format: str | Format = "w4a16-g128", **options: Option
    ) -> JoinedLinear:
        """Quantize float layers or weights [Ni, K] of `source` as one; format, options: see `Linear.from_float`."""
        if not isinstance(source, list | tuple) or not source:
            raise ArgumentError("source", weights.kind(source), "must be a list of layers or weights", "pass [q, k, v]")
        floats = [part.weight if isinstance(part, nn.Linear) else part for part in source]
        biases = [getattr(part, "bias", None) if isinstance(part, nn.Linear) else None for part in source]
        for each in floats:
            if not torch.is_tensor(each) or each.dim() != 2:
                raise ArgumentError("source", weights.described(each), "must be weights [Ni, K]", "pass [q, k, v]")
            if (each.shape[1], each.dtype, each.device) != (floats[0].shape[1], floats[0].dtype, floats[0].device):
                seen = f"{weights.described(each)} beside {weights.described(floats[0])}"
                constraint = "must have one K, dtype and device"
                raise ArgumentError("source", seen, constraint, "join layers of one input")
        bias = joined_bias(floats, biases)
        bias = None if bias is None else bias.detach()
        made = Format.parse(format).quantize(torch.cat([w.detach() for w in floats]), bias, **options)
        product_of(made)
        return cls(made, [len(w) for w in floats])

    @classmethod
    def from_state(
        cls, state: Mapping[str, torch.Tensor], prefix: str = "", *, sizes: Sequence[int] = ()
    ) -> JoinedLinear:
        """See `Linear.from_state`."""
        return cls(stored_weight(state, prefix), sizes)

    @classmethod
    def empty(
        cls, in_features: int, sizes: Sequence[int], format: str | Format = "w4a16-g128", **options: Option
    ) -> JoinedLinear:
        """See `Linear.empty`; `sizes` are the output features of the parts."""
        _check_sizes(sizes)
        return cls(Linear.empty(in_features, sum(sizes), format, **options)._make(), sizes)

    product = Linear.forward
    """All results side by side, [..., sum of sizes] in out_dtype, of x [..., K], float or quantized."""

    def forward(self, x: products.Activations, out_dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        return self.product(x, out_dtype).split(self.sizes, dim=-1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sizes={self.sizes}"


class QKVLinear(JoinedLinear):
    """q, k and v by one product: `QKVLinear.join(q, k, v)`."""


class GateUpLinear(JoinedLinear):
    """gate and up by one product: `GateUpLinear.join(gate, up)`."""
