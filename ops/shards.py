"""Shards of weights for tensor parallelism: the rows or columns that one of several ranks keeps.

Cut along N (dim 0), the ranks' products lie side by side; cut along K (dim 1), they are summed, and rank 0 alone keeps
the bias. Codes, scales and zero points are taken as they are, so a shard means the same numbers as the whole. Where a
shard begins and ends at packed blocks, packed tensors are cut as they are, in memory or on disk; elsewhere the weight
is unpacked and packed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from terrazzo.lowering.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.grouped import GroupedWeight
    from terrazzo.ops.weight.base import Canonical, Packed

Weight = TypeVar("Weight", bound="Sharded")
Span = tuple[int, int]
"""Features from the first up to the second."""
BY_ROW = ("codes", "scales", "factors", "zeros", "offsets", "channel_scales", "bias")
"""Tensors of canonical weights that have a row, or a value, for each output feature."""
BY_GROUP = ("scales", "zeros", "offsets")
"""Those with a column for each group of input channels."""
BY_COLUMN = ("codes", "smooth")
"""Tensors whose last dimension is input channels."""
ORDERS = ("perm", "permutation")
"""Orders of the input channels."""
PACKED = ("words", "params", "scales", "channel_scales", "smooth", "bias", *ORDERS)
"""Tensors of packed weights whose cut `plan` knows."""
ROW_GROUP = 16
"""Rows that share the scales of blocks in W8A8."""
BLOCK_N, BLOCK_K = 64, 128
"""What packed weights are padded to, and where they can be cut as they are."""


@dataclass(frozen=True)
class Part:
    """Features of one projection, or one of several that a weight joins.

    Attributes:
        size: features. unit: those that stay together, as a head's; 2 for interleaved gate and up rows.
        replicate: where there are fewer units than ranks, whether several ranks hold the same one (keys and values of
            grouped-query attention). Only along N: sums would count it twice.
    """

    size: int
    unit: int = 1
    replicate: bool = False

    def span(self, rank: int, world: int) -> Span:
        """What a rank keeps.

        Raises:
            ArgumentError: naming `world`, where it does not divide the units.
        """
        units = self.size // self.unit
        if self.size % self.unit:
            constraint = f"must divide the {self.size} features of a part"
            raise ArgumentError("unit", self.unit, constraint, "pass the size of a head")
        if self.replicate and units < world and world % units == 0:
            first = rank * units // world
            return first * self.unit, (first + 1) * self.unit
        if units % world:
            what = f"{units} units of {self.unit} features" if self.unit > 1 else f"{units} features"
            allowed = "divide or be a multiple of" if self.replicate else "divide"
            raise ArgumentError("world", world, f"must {allowed} the {what}", f"use one of {divisors(units)}")
        each = self.size // world
        return rank * each, (rank + 1) * each


def qkv(heads: int, kv_heads: int, head_dim: int) -> tuple[Part, Part, Part]:
    """Parts of joined q, k and v, cut by heads: fewer heads of keys and values than ranks are held by several."""
    kv = Part(kv_heads * head_dim, head_dim, replicate=True)
    return Part(heads * head_dim, head_dim), kv, kv


def gate_up(intermediate: int, *, interleaved: bool = False) -> tuple[Part, ...]:
    """Parts of joined gate and up: halves, or rows that take turns."""
    return (Part(2 * intermediate, 2),) if interleaved else (Part(intermediate), Part(intermediate))


def divisors(count: int, most: int = 64) -> list[int]:
    """Numbers of ranks up to `most` that divide a count."""
    return [world for world in range(1, min(count, most) + 1) if count % world == 0]


def check_rank(rank: object, world: object) -> None:
    """Raise ArgumentError unless these are a rank and a number of ranks."""
    if type(world) is not int or world < 1:
        raise ArgumentError("world", world, "must be an integer from 1 on", "pass the number of ranks")
    if type(rank) is not int or not 0 <= rank < world:
        constraint = f"must be 0..{world - 1}, one of {world} ranks"
        raise ArgumentError("rank", rank, constraint, "pass torch.distributed.get_rank()")


def spans_of(total: int, rank: int, world: int, parts: Sequence[Part | int] | None) -> tuple[Span, ...]:
    """What a rank keeps of `total` features that consist of `parts`; None is one part.

    Raises:
        ArgumentError: no rank, parts that are not the whole, or a world that does not divide them.
    """
    check_rank(rank, world)
    made = [part if isinstance(part, Part) else Part(part) for part in (parts or (total,))]
    if sum(part.size for part in made) != total:
        seen = [part.size for part in made]
        raise ArgumentError("parts", seen, f"must add up to {total} features", "pass the sizes of the joined layers")
    found, start = [], 0
    for part in made:
        low, high = part.span(rank, world)
        found.append((start + low, start + high))
        start += part.size
    return tuple(found)


@dataclass(frozen=True)
class Share:
    """What one rank keeps of a layer whose size is read later.

    Attributes:
        rank, world: which of how many ranks. dim: 0 cuts output features, 1 input features.
        unit, replicate: see `Part`.
    """

    rank: int
    world: int
    dim: int = 0
    unit: int = 1
    replicate: bool = False

    def part(self, size: int) -> Part:
        """The layer with so many features along `dim`."""
        return Part(size, self.unit, self.replicate)

    def size(self, size: int) -> int:
        """Features that the rank keeps of `size`."""
        low, high = self.part(size).span(self.rank, self.world)
        return high - low

    def cut(self, size: int, axis: int) -> Cut:
        """Of a tensor whose axis holds the features one by one."""
        return Cut(axis, spans_of(size, self.rank, self.world, (self.part(size),)))

    def of(self, weight: Weight) -> Weight:
        """The shard of a canonical or packed weight."""
        size = weight.n if self.dim == 0 else weight.k
        return weight.shard(self.rank, self.world, self.dim, parts=(self.part(size),))


class Sharded:
    """Of canonical and packed weights, and of experts: what a rank keeps."""

    def shard(
        self: Weight, rank: int, world: int, dim: int = 0, *, parts: Sequence[Part | int] | None = None
    ) -> Weight:
        """The weight [N', K] (dim 0) or [N, K'] (dim 1) that one of `world` ranks keeps, on the same device.

        Products of shards along N, side by side, are the whole's; those along K add up to it, x being cut alike, and
        only rank 0 has the bias. Of experts each is cut. Formats that quantize x make its scales from what a rank has.

        Args:
            parts: what N consists of where the weight joins layers, as features or `Part`: `shards.qkv(...)`,
                `shards.gate_up(...)`. Each is cut by itself. None for one layer.

        Raises:
            ArgumentError: naming rank, world, dim or parts: a world that does not divide the features, the heads, or
                (along K) the groups of scales; a weight with an order of input channels of its own, along K.
        """
        return shard(self, rank, world, dim, parts)


def shard(weight: Weight, rank: int, world: int, dim: int, parts: Sequence[Part | int] | None = None) -> Weight:
    """See `Sharded.shard`."""
    spans = checked_spans(weight, rank, world, dim, parts)
    if hasattr(weight, "stacked"):
        return _of_experts(weight, rank, world, dim, spans, parts)
    if not hasattr(weight, "words"):
        return _canonical(weight, dim, spans, rank)
    cuts = plan(weight, dim, spans, rank)
    if cuts is None:
        return _canonical(weight.unpack(), dim, spans, rank).pack(target=getattr(weight, "target", None))
    return cuts.apply(weight, lambda name, cut: _taken(getattr(weight, name), cut))


def checked_spans(
    weight: Sharded, rank: int, world: int, dim: int, parts: Sequence[Part | int] | None
) -> tuple[Span, ...]:
    """What a rank keeps of a weight along a dimension; errors of `Sharded.shard`."""
    if dim not in (0, 1) or isinstance(dim, bool):
        raise ArgumentError("dim", dim, "must be 0 (output features) or 1 (input features)", "pass dim=1 for o_proj")
    spans = spans_of(weight.n if dim == 0 else weight.k, rank, world, parts)
    if dim == 1 and world > 1:
        if any(part.replicate for part in parts or () if isinstance(part, Part)):
            raise ArgumentError("parts", "replicate", "must be False along K: sums would count a part twice", "drop it")
        _check_columns(getattr(weight, "stacked", weight), world, spans)
    if dim == 1 and len(spans) > 1:
        raise ArgumentError("parts", len(spans), "must be one part along K", "join layers along N only")
    return spans


def _check_columns(weight: Sharded, world: int, spans: Sequence[Span]) -> None:
    for name in ORDERS:
        if getattr(weight, name, None) is not None:
            constraint = "gives the input channels an order of its own, so a rank's channels are in all groups"
            remedy = "cut along N (dim=0), or quantize each rank's columns (no act-order, no plan)"
            raise ArgumentError(name, "given", constraint, remedy)
    k, size = weight.k, group_of(weight)
    if size < k and any(low % size or (high % size and high != k) for low, high in spans):
        whole = k // size if k % size == 0 else 1
        constraint = f"must cut K = {k} between groups of {size}, of which there are {-(-k // size)}"
        remedy = f"use one of {divisors(whole)}, or quantize with smaller groups, where the format has others"
        raise ArgumentError("world", world, constraint, remedy)


def group_of(weight: Sharded) -> int:
    """Input channels of a scale; W4Ax has blocks of 128, and W8A8 rows or such blocks."""
    return getattr(weight, "group_size", BLOCK_K if getattr(weight, "block", True) else weight.k)


def _one_group(weight: Sharded) -> bool:
    """Whether the format has rows of a single group, whatever K is."""
    return getattr(getattr(weight, "format", None), "one_group", False)


@dataclass(frozen=True)
class Cut:
    """Spans along one axis of a tensor, which are joined."""

    axis: int
    spans: tuple[Span, ...]

    def of(self, tensor: Any) -> torch.Tensor:
        """What it takes of a tensor, or of a slice of a safetensors file, read from there; memory of its own."""
        import torch

        index = [(*(slice(None),) * self.axis, slice(low, high)) for low, high in self.spans]
        found = [tensor[each] for each in index]
        return found[0].clone(memory_format=torch.contiguous_format) if len(found) == 1 else torch.cat(found, self.axis)


@dataclass(frozen=True)
class Plan:
    """How the tensors of a packed weight are cut.

    Attributes:
        cuts: tensor -> its cut; others stay whole. dropped: those that the shard does not have. facts: fields of the
            shard that differ.
    """

    cuts: dict[str, Cut]
    dropped: tuple[str, ...]
    facts: dict[str, int]

    def apply(self, weight: Weight, take: Callable[[str, Cut | None], torch.Tensor]) -> Weight:
        """The shard of a weight; `take` gives a tensor by its name and cut, None for all of it."""
        import torch

        held = [f.name for f in dataclasses.fields(weight) if torch.is_tensor(getattr(weight, f.name))]
        own = {name: take(name, self.cuts.get(name)) for name in held if name not in self.dropped}
        return dataclasses.replace(weight, **own, **dict.fromkeys(self.dropped), **self.facts)


def plan(weight: Packed, dim: int, spans: Sequence[Span], rank: int, lead: int = 0) -> Plan | None:
    """How a packed weight is cut as it is, or None where a span begins or ends inside of a block.

    Args:
        weight: its tensors may lie on meta. lead: dimensions in front of each tensor's own, 1 of experts.
    """
    import torch

    held = {f.name for f in dataclasses.fields(weight) if torch.is_tensor(getattr(weight, f.name))}
    extent, block = (weight.n, BLOCK_N) if dim == 0 else (weight.k, BLOCK_K)
    ends = [high for _, high in spans]
    whole = all(high % block == 0 or (high == extent and high == ends[-1]) for high in ends)
    if held - set(PACKED) or not whole or any(low % block for low, _ in spans):
        return None
    total = sum(high - low for low, high in spans)
    in_units = lambda size: tuple((low // size, -(-high // block) * block // size) for low, high in spans)
    cuts, dropped, facts = {}, (), {}
    bytes_ = getattr(weight, "block", None)  # of W8A8: whether scales are those of blocks, in both dimensions
    if dim == 0:
        facts["n"] = total
        cuts = {"words": Cut(lead + 1, in_units(BLOCK_N)), "params": Cut(lead + 1, in_units(BLOCK_N))}
        cuts |= {"channel_scales": Cut(lead, in_units(1)), "bias": Cut(lead, tuple(spans))}
        if bytes_ is not None:
            cuts["scales"] = Cut(lead + 1, in_units(ROW_GROUP if bytes_ else 1))
    else:
        if bytes_ is False and weight.codes == "int8":
            return None  # sums of codes stand beside the scales
        if bytes_:
            cuts["scales"] = Cut(lead, in_units(BLOCK_K))
        facts, form = _facts_of_columns(weight, spans, total), getattr(weight, "format", None)
        cuts["words"] = Cut(lead, in_units(form.block_k if form is not None else BLOCK_K))
        cuts["smooth"] = Cut(0, tuple(spans))
        size = group_of(weight) * getattr(form, "record_groups", 1)
        if "params" in held and not (_one_group(weight) and size >= weight.k):
            if _one_group(weight) and total <= size:
                return None  # a single group is stored otherwise
            records, stored = weight.params.shape[lead], -(-weight.k // BLOCK_K) * BLOCK_K // size
            cuts["params"] = Cut(lead, (*in_units(size), *([(stored, records)] if records > stored else [])))
        dropped = ("bias",) if rank else ()
    return Plan({name: cut for name, cut in cuts.items() if name in held}, dropped, facts)


def _facts_of_columns(weight: Sharded, spans: Sequence[Span], total: int) -> dict[str, int]:
    """Fields of a weight of some columns."""
    facts = {"k": total}
    if _one_group(weight):
        facts["group_size"] = min(weight.group_size, total)
    if hasattr(weight, "blocks8"):  # INT8 blocks are the last ones
        first8 = (weight.blocks - weight.blocks8) * BLOCK_K
        facts["blocks8"] = sum(max(0, -(-high // BLOCK_K) - max(low, first8) // BLOCK_K) for low, high in spans)
    return facts


def _canonical(weight: Canonical, dim: int, spans: Sequence[Span], rank: int) -> Canonical:
    import torch

    held = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}
    tensors = {name: t for name, t in held.items() if torch.is_tensor(t)}
    if unknown := set(tensors) - {*BY_ROW, *BY_COLUMN, *ORDERS}:
        raise LookupError(f"ops/shards.py does not know how {sorted(unknown)} of {type(weight).__name__} are cut")
    if dim == 0:
        rows = Cut(0, tuple(spans))
        return dataclasses.replace(weight, **{name: rows.of(tensors[name]) for name in BY_ROW if name in tensors})
    total, size, k = sum(high - low for low, high in spans), group_of(weight), weight.k
    last = lambda name: tensors[name].dim() - 1
    made = {name: Cut(last(name), tuple(spans)).of(tensors[name]) for name in BY_COLUMN if name in tensors}
    if size < k:
        groups = tuple((low // size, -(-high // size)) for low, high in spans)
        by_group = [name for name in BY_GROUP if name in tensors and tensors[name].dim() == 2]
        made |= {name: Cut(1, groups).of(tensors[name]) for name in by_group}
    facts = _facts_of_columns(weight, spans, total)
    if "k" not in held:  # the extent of its codes
        del facts["k"]
    elif total % BLOCK_K:  # codes are padded
        made["codes"] = torch.nn.functional.pad(made["codes"], (0, -total % BLOCK_K))
    if _one_group(weight) and hasattr(weight, "weight") and total <= size < k and "float" in weight.scale_dtype:
        row_factors = weight.format.row_factors  # of such a format, a row's only scale is its factor
        made["scales"] = made["scales"].float() if row_factors else made["scales"]
    if rank and "bias" in tensors:
        made["bias"] = None
    return dataclasses.replace(weight, **made, **facts)


def _of_experts(
    weight: GroupedWeight, rank: int, world: int, dim: int, spans: Sequence[Span], parts: Sequence[Part | int] | None
) -> GroupedWeight:
    one = weight.stacked
    cuts = plan(one, dim, spans, rank, lead=1)
    if cuts is None:
        made = [shard(weight[e], rank, world, dim, parts) for e in range(len(weight))]
        return type(weight).stack(made)
    return type(weight)(cuts.apply(one, lambda name, cut: _taken(getattr(one, name), cut)))


def _taken(tensor: torch.Tensor, cut: Cut | None) -> torch.Tensor:
    return tensor if cut is None else cut.of(tensor)
