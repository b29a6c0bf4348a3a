"""Which kinds of linear layers a model has: read from a checkpoint's tensors, or from its architecture.

Of a checkpoint only sizes, the scales of a few rows and, where they decide it, zero points are read, so that a folder
of any size takes seconds. That goes through the importer that `load_layer` uses, with codes of 0, once for all layers
that are stored alike.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w8a8
from terrazzo.ops.checkpoints.conventions.base import GROUP
from terrazzo.ops.checkpoints.reader import Checkpoint
from terrazzo.ops.products.table import PRODUCTS
from terrazzo.ops.products.ways import INTEGER
from terrazzo.ops.stored_layers import FAMILIES as READERS
from terrazzo.ops.stored_layers import operator_of

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.checkpoints.conventions.base import LayerConfig
    from terrazzo.schedules.models import Architecture

_TWO_LEVELS = {one.record for one in PRODUCTS if one.ways[0].rule == INTEGER}
FAMILIES = {name: (family, {"requantize": True} if name in _TWO_LEVELS else {}) for name, family in READERS.items()}
"""Operator -> what reads its layers, and with which options: those that read the most."""
_FEW_ROWS = 8
"""Output features of each layer that are read at least: a word of zero points has as many."""
_JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3"),
}  # fmt: skip
"""Layers that serving engines join, and their parts, side by side under one prefix."""
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(\w+)")
_ROW_PARALLEL = {"o_proj", "down_proj", "w2", "out_proj", "dense_4h_to_h", "c_proj"}
"""Layers whose input features are split by tensor parallelism; others' output features are."""
_KV = {"k_proj", "v_proj"}


@dataclass(frozen=True)
class Linear:
    """A kind of linear layer: what tells its kernels from those of others.

    Attributes:
        operator: record of a product. leaf: last part of its name, "down_proj".
        n, k, group_size: of the weight, as PackedWeight has them.
        symmetric, scale_dtype: of weight-only formats, False and "" of others.
        bias: whether it has one. experts: how many stand in one launch, 0 for a layer of its own.
        static, zeros, ue8m0: of W8A8, whether its activations have one scale for all, zero points, and scales that are
            powers of two.
        block: whether scales of W8A8 are those of 128 x 128 blocks; groups below K say it too.
    """

    operator: str
    leaf: str
    n: int
    k: int
    group_size: int
    symmetric: bool
    scale_dtype: str
    bias: bool = False
    experts: int = 0
    static: bool = False
    zeros: bool = False
    block: bool = False
    ue8m0: bool = False


@dataclass
class Layers:
    """The linear layers of a model.

    Attributes:
        kinds: kind -> names of its layers, in order of appearance.
        skipped: name -> why no kernels are named for this layer.
    """

    kinds: dict[Linear, list[str]] = field(default_factory=lambda: defaultdict(list))
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, kind: Linear) -> None:
        self.kinds[kind].append(name)


def of_folder(
    path: str | Path, operator: str | None = None, *, all_skipped: bool = False, target: Target | None = None
) -> Layers:
    """The quantized layers of a checkpoint's folder or file, as it stores them: see `joined`.

    Args:
        operator: which reads them; None: the one that its config means, on the target (None: any), see
            `stored_layers.operator_of`.
        all_skipped: whether layers of which none can be read are an answer too, with the reason of each.

    Raises:
        ArgumentError: nothing readable there, no layer that the operator can read, or an operator that reads none.
    """
    if operator is not None and operator not in FAMILIES:
        remedy = f"take one of {', '.join(FAMILIES)}, or none: the folder's config says which"
        raise ArgumentError("op", operator, "reads no stored layers", remedy)
    checkpoint, found = _Sampled(path), Layers()
    for name in checkpoint.layers():
        try:
            found.add(name, _kind(checkpoint, name, operator, target))
        except ArgumentError as error:
            found.skipped[name] = error.constraint.removeprefix("cannot be read: ")
    if not (found.kinds or (all_skipped and found.skipped)):
        reasons = "; ".join(list(dict.fromkeys(found.skipped.values()))[:3]) or "it holds none"
        constraint = f"has no quantized layer that can be read: {reasons}"
        raise ArgumentError("folder", str(path), constraint, "see --model and --shape")
    return found


def _kind(checkpoint: _Sampled, name: str, operator: str | None, target: Target | None) -> Linear:
    convention, config = checkpoint.layers()[name], checkpoint.layer(name)
    if config.skip:
        raise ArgumentError("name", name, config.skip, "load_model names the same reason")
    chosen = operator or operator_of(convention, config, target)
    facts = checkpoint.facts(name, chosen, config)
    n = checkpoint.output_features(name) or facts.n
    symmetric = facts.symmetric and checkpoint.is_even(name, n)
    return replace(facts, leaf=name.rpartition(".")[2], n=n, symmetric=symmetric)


class _Sampled(Checkpoint):
    """A checkpoint of which the first rows of each layer are read, without their codes."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._known: dict[tuple, Linear | ArgumentError] = {}

    def facts(self, prefix: str, operator: str, config: LayerConfig) -> Linear:
        """What the importer of an operator makes of the first rows of a layer."""
        stored = [(leaf, *map(str, self.describe(full))) for leaf, full in sorted(self.leaves(prefix).items())]
        key = (operator, config, *stored, *map(self._telling, self._small(prefix)))
        if key not in self._known:
            try:
                self._known[key] = self._linear(prefix, operator)
            except ArgumentError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, ArgumentError):
            raise found
        return found

    def _small(self, prefix: str) -> list[str]:
        """Tensors whose values decide what a layer is."""
        names = ("qzeros", "weight_zero_point", "input_zero_point", "g_idx", "weight_g_idx", "weight_shape")
        told = lambda leaf: leaf in names or leaf.startswith("weight.quant_state")
        return [full for leaf, full in self.leaves(prefix).items() if told(leaf) and full in self.places]

    def _telling(self, name: str) -> object:
        """The values of a small tensor; of zero points only whether they are all the same, and which."""
        values = self.tensor(name)
        if "zero" not in name.rpartition(".")[2]:
            return values.numpy().tobytes()
        return int(values.flatten()[0]) if values.numel() and bool((values == values.flatten()[0]).all()) else None

    def _linear(self, prefix: str, operator: str) -> Linear:
        family, options = FAMILIES[operator]
        weight = family.read(self, prefix, "cpu", **options)
        if isinstance(weight, w8a8.QuantizedWeight):
            own = dict(static=weight.input_scale is not None, block=weight.block)
            own |= dict(zeros=weight.asymmetric or weight.input_zero != 0, ue8m0=weight.ue8m0)
            operator = "w8a8" if weight.form == "int8" else "w8a8_fp8"
            bias = weight.bias is not None
            return Linear(operator, "", weight.n, weight.k, weight.group_size, False, "", bias, **own)
        facts = (weight.symmetric, weight.scale_dtype) if hasattr(weight, "scale_dtype") else (False, "")
        return Linear(operator, "", weight.n, weight.k, weight.group_size, *facts, weight.bias is not None)

    def tensor(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        import torch

        prefix, _, leaf = name.rpartition(".")
        if leaf == "weight_shape":
            n, k = super().tensor(name, device).tolist()
            return super().tensor(name, device).new_tensor([min(n, self._count(prefix)), k])
        at = self._rows(prefix, leaf)
        if at is None or name not in self.places:
            return super().tensor(name, device)
        view, (dimension, packed) = self._open(self.places[name], "cpu").get_slice(name), at
        if len(view.get_shape()) <= dimension:
            return super().tensor(name, device)
        count = -(-self._count(prefix) // self._packed(name, packed))
        if leaf in self.convention(prefix).codes:  # none decides anything; columns would touch every page of the file
            shape = view.get_shape()
            shape[dimension] = min(count, shape[dimension])
            return torch.zeros(shape, dtype=view[:1].dtype)
        return view[:count] if dimension == 0 else view[:, :count]

    def _rows(self, prefix: str, leaf: str) -> tuple[int, int] | None:
        """Dimension of a tensor's output features, and how many of them an element holds; None: it is read whole."""
        found = self.convention(prefix).leaf(leaf) if prefix in self.layers() else None
        if found is None or found.n is None or found.n[1] == GROUP:
            return None
        return found.n[0], found.features(0, self.config.layer(prefix).bits)

    def _count(self, prefix: str) -> int:
        """Output features that are read: all where scales may be those of blocks, or codes are one row."""
        convention = self.convention(prefix)
        blocks = any(leaf.n is not None and leaf.n[1] == GROUP for leaf in convention.leaves)
        return 1 << 30 if blocks or convention.leaves[0].n is None else max(_FEW_ROWS, convention.rows)

    def _packed(self, name: str, packed: int) -> int:
        """Output features of an element; zero points may be bytes."""
        return 1 if self.describe(name)[0] == "I8" else packed

    def output_features(self, prefix: str) -> int | None:
        """N of a layer; None where no tensor has them along a dimension of its own, and all are read."""
        held = self.leaves(prefix)
        found = (it for it in self.convention(prefix).leaves if it.name in held and it.n and it.n[1] == 1)
        own = next(found, None)
        return None if own is None else self.describe(held[own.name])[1][own.n[0]]

    def is_even(self, prefix: str, n: int) -> bool:
        """Whether all zero points of a layer are stored as its first ones are."""
        for leaf in ("qzeros", "weight_zero_point"):
            name = f"{prefix}.{leaf}"
            if name in self.places:
                stored, (dimension, packed) = super().tensor(name), self._rows(prefix, leaf)
                whole = n // self._packed(name, packed)  # a last word may be padded
                stored = stored.narrow(dimension, 0, max(whole, 1))
                return bool((stored == stored.flatten()[0]).all())
        return True


def of_architecture(
    model: Architecture,
    *,
    operator: str = "w4a16",
    group_size: int = 128,
    symmetric: bool = False,
    scale_dtype: str = "float16",
    static: bool = False,
    zeros: bool = False,
    ue8m0: bool = False,
) -> Layers:
    """The linear layers of an architecture whose weights are quantized one way; group_size 0 is K.

    Layers whose K is no multiple of the group have a short last group, as `quantize` makes it.
    """
    found = Layers()
    for layer in model.projections():
        group = layer.k if not group_size else min(group_size, layer.k)
        leaf = layer.name.rpartition(".")[2]
        own = (symmetric, scale_dtype, layer.bias)
        kind = Linear(operator, leaf, layer.n, layer.k, group, *own, static=static, zeros=zeros, ue8m0=ue8m0)
        prefix = {"o_proj": "attn", "q_proj": "attn", "k_proj": "attn", "v_proj": "attn"}.get(leaf, "mlp")
        if layer.count == 1:
            found.add(f"{prefix}.{layer.name}", kind)
            continue
        for expert in range(layer.count):
            found.add(f"{prefix}.experts.{expert}.{leaf}", kind)
    return found


def joined(found: Layers, parts: bool = True) -> Layers:
    """The layers, and beside them what engines make of them: qkv and gate_up as one, the experts of a layer as one.

    Args:
        parts: whether layers that became part of another are named, too.
    """
    made, within = Layers(skipped=dict(found.skipped)), set()
    by_name = {name: kind for kind, names in found.kinds.items() for name in names}
    for kind, names in found.kinds.items():
        made.kinds[kind] = list(names)
    families: dict[str, dict[str, Linear]] = defaultdict(dict)
    for name, kind in by_name.items():
        prefix, _, leaf = name.rpartition(".")
        families[prefix][leaf] = kind
    for prefix, leaves in families.items():
        for leaf, names in _JOINED.items():
            own = [leaves[part] for part in names if part in leaves]
            if len(own) == len(names) and len({_alike(it) for it in own}) == 1:
                kind = _beside(leaf, own)
                within |= {f"{prefix}.{part}" for part in names}
                by_name[f"{prefix}.{leaf}"] = kind
                made.add(f"{prefix}.{leaf}", kind)
    stacks: dict[tuple[str, str], dict[int, Linear]] = defaultdict(dict)
    for name, kind in by_name.items():
        if match := _EXPERT.fullmatch(name):
            stacks[match[1], match[3]][int(match[2])] = kind
    for (prefix, leaf), experts in stacks.items():
        kinds = {replace(kind, symmetric=False) for kind in experts.values()}
        own = {f"{prefix}.{expert}.{leaf}" for expert in experts}
        if own <= within and not parts:
            continue
        if len(kinds) == 1:
            within |= own
            symmetric = all(kind.symmetric for kind in experts.values())
            made.add(f"{prefix}.{leaf}", replace(kinds.pop(), symmetric=symmetric, experts=len(experts)))
        else:
            made.skipped[f"{prefix}.{leaf}"] = "its experts differ in shape or format, so they are no single launch"
    if not parts:
        left = {kind: [name for name in names if name not in within] for kind, names in made.kinds.items()}
        made.kinds = {kind: names for kind, names in left.items() if names}
    return made


def _alike(part: Linear) -> tuple[object, ...]:
    """What layers that are joined have in common."""
    inputs = part.static, part.zeros, part.ue8m0
    return part.operator, part.k, part.group_size, part.scale_dtype, part.block, *inputs


def _beside(leaf: str, parts: list[Linear]) -> Linear:
    """Parts one above the other: zero points of 8 where only some have any."""
    rows, biased = sum(part.n for part in parts), any(part.bias for part in parts)
    return replace(parts[0], leaf=leaf, n=rows, symmetric=all(part.symmetric for part in parts), bias=biased)


def split(found: Layers, ranks: int, kv_heads: int) -> Layers:
    """One rank's part of layers that are not joined yet: output features are split, of o_proj and down_proj input
    features.

    Where there are more ranks than kv heads, several ranks share a kv head. The bias of a layer whose input is split is
    added by one rank only, so its kernels are named with and without.

    Raises:
        ArgumentError: a layer that cannot be split into so many parts.
    """
    if ranks == 1:
        return found
    made = Layers(skipped=dict(found.skipped))
    for kind, names in found.kinds.items():
        if kind.leaf == "qkv_proj" and kv_heads % ranks:
            made.skipped |= dict.fromkeys(names, f"{ranks} ranks cannot share its {kv_heads} kv heads evenly")
            continue
        for shard in _shards(kind, names[0], ranks, kv_heads):
            made.kinds[shard] += names
    return made


def _shards(kind: Linear, name: str, ranks: int, kv_heads: int) -> list[Linear]:
    parts = min(ranks, kv_heads) if kind.leaf in _KV else ranks
    if kind.leaf in _ROW_PARALLEL:
        one_group = kind.group_size >= kind.k and not kind.block
        unit = 8 if one_group else kind.group_size
        if kind.k % (unit * parts):
            constraint = f"{name} has K = {kind.k}, which {parts} ranks cannot share in whole groups of {unit}"
            raise ArgumentError("tensor_parallel", ranks, constraint, "use fewer ranks")
        k = kind.k // parts
        shard = replace(kind, k=k, group_size=k if one_group else kind.group_size)
        return [shard, replace(shard, bias=False)] if kind.bias else [shard]
    if kind.n % parts:
        constraint = f"{name} has N = {kind.n}, which {parts} ranks cannot share"
        raise ArgumentError("tensor_parallel", ranks, constraint, "use fewer ranks")
    return [replace(kind, n=kind.n // parts)]
