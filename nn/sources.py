"""Where modules come from: a published folder or state, or a state that terrazzo wrote; one layer at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.nn.dense import Dense
from terrazzo.nn.experts import Experts
from terrazzo.nn.formats import Format
from terrazzo.nn.joined import JoinedLinear, at_one_scale, described, join, joined_bias
from terrazzo.nn.linear import Linear
from terrazzo.nn.module import stored_weight
from terrazzo.ops import stored_layers as stored
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import Checkpoint, fields
from terrazzo.ops.checkpoints.conventions import mxfp4
from terrazzo.ops.grouped import GroupedWeight
from terrazzo.ops.products.table import BY_RECORD
from terrazzo.ops.shards import ORDERS, Cut, Part, Share, checked_spans, plan, spans_of
from terrazzo.ops.w4a8.importers import SOURCES as W4A8_SOURCES
from terrazzo.ops.w4a8.importers import two_levels
from torch import nn

if TYPE_CHECKING:
    from terrazzo.nn.architectures import Shape
    from terrazzo.nn.joined import Option
    from terrazzo.nn.reading import Asked
    from terrazzo.ops.weight.base import AnyCanonical as Canonical
    from terrazzo.ops.weight.base import AnyPacked as Packed

Shares = Sequence[Share | None]
Floats = tuple[torch.Tensor, torch.Tensor | None]
LEAVES = ("weight", "bias")
CUT = ("world", "unit", "parts", *ORDERS)
"""What errors of a cut name."""

AGAIN = re.compile(r"consolidated[\w.-]*\.safetensors")
"""Files that hold the whole model once more, in its authors' own names."""
FLOAT_LAYER = re.compile(r".*layers\.\d+\..*(\w_proj|\bw[123])(\.weight)?")
"""Names that weights of products have where they are float; those of FP8 layers have them, too."""

ALIKE = 'export the model again with one setting for these layers, or load its float folder with quantize="w4a16-g128"'
"""Where a config names what an exporter leaves in 16 bits, by its method."""

Keep = Callable[[Sequence[str], Sequence[int], "Packed"], None]
"""Called with the published names of layers, their output features, and the packed weight of all."""
Report = Callable[[str, "Packed", torch.Tensor | None], None]
"""Called with the name of a layer, its packed weight, and the float one that it was quantized of, or None."""


class Source:
    """What a builder asks for modules. Names are those of the published checkpoint, `own` those of our modules. A
    `share` says what one of several ranks keeps of a layer; None is all of it.

    Args:
        device: where modules are made. dtype: of activations and vectors.
    """

    layers: Mapping[str, str] = {}
    """Quantized layers of a published checkpoint, and their convention."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self.tensors)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the device."""
        if name not in self.tensors:
            raise ArgumentError("path", name, "is missing in the checkpoint", "get the missing shard")
        return self.tensors[name].detach().to(self.device)

    def take(self, name: str, cut: Cut | None) -> torch.Tensor:
        """What a cut takes of one tensor, on the device; None is all of it."""
        if cut is None:
            return self.read(name)
        get = getattr(self.tensors, "part", None)  # of files: nothing else is read
        return get(name, cut) if get is not None else cut.of(self.read(name))

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape_of(self, name: str) -> Sequence[int]:
        """Of one tensor, unread where it lies in a file."""
        get = getattr(self.tensors, "shape", None)
        return get(name) if get is not None and name in self.tensors else tuple(self.read(name).shape)

    def packs(self, name: str) -> bool:
        """Whether a layer, by its published name, is quantized here."""
        return self.has(f"{name}.words")

    def scales(self, part: str, shape: Shape) -> torch.Tensor | None:
        """float32 scales of keys ("k") or values ("v") that kernels read, for all layers, or None."""
        return None

    tensors: Mapping[str, torch.Tensor] = {}


class Published(Source):
    """Layers of a Hugging Face folder or state: 4-bit ones as they are, float ones quantized if asked for.

    Args:
        checkpoint: the folder's, or None for a state. asked: what `load` was asked for; the source, where that is a
            state, the format and options of float layers, the target, the report, activations. Its config may have
            fewer decoder layers than there are tensors of.
        device, dtype: see `Source`.

    Attributes:
        quantizes_activations: whether a layer was read that `activations` is about.
        seen: names of the tensors that modules were made of. consumed: of those that were quantized.
        keep: see `Keep`; None: nobody asks. again: whether 4-bit integers become `quantize`, which is W4A8.
    """

    def __init__(self, checkpoint: Checkpoint | None, asked: Asked, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.asked, self.quantizes_activations = asked, False
        arch = weights.arch_of(asked.target, device)
        self.runs_on = None if arch is None else Target.parse(arch)
        self.checkpoint, self.tensors = checkpoint, asked.source if checkpoint is None else {}
        self.layers = {} if checkpoint is None else checkpoint.layers()
        self.quantize, self.options, self.target = asked.form, dict(asked.options or {}), asked.target
        self.report = asked.report or (lambda name, packed, weight: None)
        self.seen: set[str] = set()
        self.consumed: set[str] = set()
        self.keep: Keep | None = None
        self.again = False
        self.cut_layers = asked.config is not None
        self.tuned: Callable[[str, torch.Tensor], Mapping[str, Option]] = lambda name, weight: {}

    def names(self) -> list[str]:
        if self.checkpoint is None:
            return super().names()
        places = self.checkpoint.places
        return [it for it in self.checkpoint.names() if it not in places or not AGAIN.fullmatch(places[it].name)]

    def has(self, name: str) -> bool:
        return name in self.checkpoint.places if self.checkpoint is not None else name in self.tensors

    def packs(self, name: str) -> bool:
        return name in self.layers

    def parts_of(self, name: str) -> set[str]:
        """Names of the tensors of a quantized layer that its importer reads; none of a float one."""
        if name not in self.layers:
            return set()
        held, read = self.checkpoint.leaves(name), self.checkpoint.read_leaves(name)
        return {whole for leaf, whole in held.items() if leaf in read}

    def has_float_layers(self) -> bool:
        """Whether a product of a decoder layer has float weights."""
        found = (name.removesuffix(".weight") for name in self.names() if FLOAT_LAYER.fullmatch(name))
        return any(name not in self.layers for name in found)

    def read(self, name: str) -> torch.Tensor:
        self.seen.add(name)
        return super().read(name) if self.checkpoint is None else self.checkpoint.tensor(name, self.device)

    def take(self, name: str, cut: Cut | None) -> torch.Tensor:
        self.seen.add(name)
        if cut is None or self.checkpoint is None:
            return super().take(name, cut)
        return self.checkpoint.part(name, cut, self.device)

    def vector(self, name: str, own: str) -> torch.Tensor:
        """An embedding or a router, in the model's dtype."""
        return cast(self.float_of(name), self.dtype, name)

    def gain(self, name: str, own: str, offset: float) -> torch.Tensor:
        """A norm's weight, with the offset added in float32."""
        return self.float_of(name).float() + offset if offset else self.vector(name, own)

    def pair(self, names: Sequence[str], own: str, offset: float) -> torch.Tensor:
        """[2, D] of two norms' weights."""
        both = [self.gain(name, own, offset) for name in names]
        if both[0].shape != both[1].shape:
            seen = [list(each.shape) for each in both]
            raise ArgumentError(f"{names[0]} and {names[1]}", seen, "must be [head_dim]", "get the checkpoint again")
        return torch.stack(both)

    def head(self, name: str, own: str, share: Share | None = None) -> Linear | Dense:
        """The head: in 16 bits, unless the checkpoint has it in 4."""
        if name in self.layers:
            return self.linear(name, own, share)
        weight, bias = self._part(name, share)
        return Dense(cast(weight, self.dtype, name), None if bias is None else cast(bias, self.dtype, name))

    def float_of(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """One tensor of 16 bits or more, or a part of it: bytes without their scales are not the weight.

        An embedding or router that the exporter quantized too is dequantized: nothing multiplies by its codes.
        """
        if (layer := name.removesuffix(".weight")) in self.layers:
            if (part := self._part(layer)).bias is None:
                return part.dequantize()
            constraint, remedy = "must have no bias, as no embedding or router has", "get the checkpoint again"
            raise ArgumentError(f"{layer}.bias", list(part.bias.shape), constraint, remedy)
        found = self.take(name, cut)
        if not found.is_floating_point() or found.element_size() < 2:
            constraint = "must be float of 16, 32 or 64 bits: its scales are not read"
            raise ArgumentError(name, str(found.dtype), constraint, "get the checkpoint in 16 bits, AWQ or GPTQ")
        return found

    def scales(self, part: str, shape: Shape) -> torch.Tensor | None:
        """[layers, 1, 1]: a number of each layer, as engines calibrate fp8 caches."""
        root = next((n.partition("layers.0.")[0] for n in self.names() if "layers.0.self_attn." in n), "model.")
        for own in (f"{part}_scale", f"{part}_proj.{part}_scale", f"attn.{part}_scale"):  # ModelOpt's is the second
            names = [f"{root}layers.{index}.self_attn.{own}" for index in range(shape.layers)]
            if all(map(self.has, names)):
                break
        else:
            return None
        found = [self.read(name).float().flatten() for name in names]
        if any(len(each) != 1 for each in found):
            seen = [len(each) for each in found]
            raise ArgumentError(names[0], seen, "must be one number for each layer", "use another format of kv")
        return torch.stack(found)[:, :, None]

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of one tensor, unread where it lies in a file."""
        if self.checkpoint is not None and name in self.checkpoint.places:
            return tuple(self.checkpoint.describe(name)[1])
        return super().shape_of(name)

    def _part(self, name: str, share: Share | None = None) -> Canonical | Floats:
        """Canonical weight of a 4-bit layer, or (weight, bias) of a float one; of a share of its rows or columns."""
        if name in self.layers:
            self.seen.update(self.checkpoint.leaves(name).values())
            config = self.checkpoint.layer(name)
            options = dict(weight_only=self.asked.weight_only, activations=self.asked.activations)
            operator = stored.operator_of(self.layers[name], config, self.runs_on, **options)
            self.quantizes_activations |= BY_RECORD[operator].on_request
            family = W4A8_SOURCES if self.again else stored.FAMILIES[operator]
            with _of_layer(name, share):
                return family.read(self.checkpoint, name, self.device, share)
        if self.checkpoint is not None and (why := fields.changed(self.checkpoint.config.raw, name, "float")):
            raise ArgumentError("name", name, f"cannot be read: {why}", "get the model without it")
        cut, held = None, f"{name}.bias"
        self.seen.add(held)
        if share is not None and len(whole := self.shape_of(f"{name}.weight")) == 2:
            with _of_layer(name, share):
                cut = share.cut(whole[share.dim], share.dim)
        weight = self.float_of(f"{name}.weight", cut)
        rows = cut if share is not None and share.dim == 0 else None
        alone = share is None or share.dim == 0 or share.rank == 0  # a sum over ranks has the bias once
        bias = self.float_of(held, rows) if alone and self.has(held) else None
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            seen = [list(t.shape) for t in (weight, bias) if t is not None]
            raise ArgumentError(f"{name}.weight", seen, "must be [N, K], and its bias [N]", "get the checkpoint again")
        return weight, bias

    def _made(
        self, names: Sequence[str], own: str, sizes: Sequence[int] = (), shares: Shares = (), **options: Option
    ) -> Packed | Floats:
        """One packed weight for some layers, of `sizes` outputs each, or (weight, bias) in 16 bits; `options` of its
        quantizer come before those of the source."""
        parts = [self._part(name, share) for name, share in zip(names, shares or (None,) * len(names))]
        for name, part, rows in zip(names, parts, sizes):
            seen = len(part[0]) if isinstance(part, tuple) else part.n
            if seen != rows:
                remedy = "take the checkpoint's own config.json"
                raise ArgumentError(name, f"{seen} outputs", f"must have {rows} by the config", remedy)
        if not any(isinstance(part, tuple) for part in parts):
            before = None
            if self.again:
                levels = [two_levels(part, name) for part, name in zip(parts, names)]
                before, parts = torch.cat([part.dequantize("post") for part in parts]), levels
            made = join(at_one_scale(parts, names), names[0], names, ALIKE)
            self.report(own, made, before)
            return made
        if not all(isinstance(part, tuple) for part in parts):
            each = [described(part[0] if isinstance(part, tuple) else part) for part in parts]
            constraint = "one is float beside quantized layers: those that one product joins must all be quantized"
            raise ArgumentError("path", dict(zip(names, each)), f"{constraint}, or none", ALIKE)
        if len({w.shape[1] for w, _ in parts}) > 1:
            seen = {name: list(w.shape) for name, (w, _) in zip(names, parts)}
            raise ArgumentError("path", seen, "layers of one input must have one K", "get the checkpoint again")
        weight, bias = torch.cat([w for w, _ in parts]), joined_bias(*zip(*parts))
        bias = None if bias is None else cast(bias, self.dtype, names[0])
        if self.quantize is None:
            return cast(weight, self.dtype, names[0]), bias
        with weights.renamed(**{leaf: " or ".join(f"{name}.{leaf}" for name in names) for leaf in LEAVES}):
            options = {**self.tuned(own, weight), **self.options, **options}
            made = quantized(self.quantize, weight, bias, self.dtype, options, self.target)
        self.report(own, made, weight)
        self._kept(names, [len(w) for w, _ in parts], made, *(f"{n}.{leaf}" for n in names for leaf in LEAVES))
        return made

    def _kept(self, names: Sequence[str], sizes: Sequence[int], made: Packed, *consumed: str) -> None:
        self.consumed.update(consumed)
        if self.keep is not None:
            self.keep(names, sizes, made)

    def linear(self, name: str, own: str, share: Share | None = None) -> Linear | Dense:
        """One projection."""
        made = self._made([name], own, shares=(share,))
        return Dense(*made) if isinstance(made, tuple) else Linear(made)

    def joined(
        self, kind: type[JoinedLinear], names: Sequence[str], sizes: Sequence[int], own: str, shares: Shares = ()
    ) -> nn.Module:
        """Several projections of the same input, of `sizes` outputs in all ranks."""
        sizes = sizes_of(sizes, shares)
        made = self._made(names, own, sizes, shares)
        return Dense(*made, sizes) if isinstance(made, tuple) else kind(made, sizes)

    def stacked(self, gate_up: str, down: str, activation: str, own: str, shares: Shares = (None, None)) -> Experts:
        """The experts of a layer in two float tensors, [E, 2 I, hidden] and [E, hidden, I].

        Args:
            shares: of gate and up, and of down.
        """
        if self.quantize is None:
            raise _float_experts(own)
        made = []
        for name, part, share in ((gate_up, "gate_up", shares[0]), (down, "down", shares[1])):
            floats = self.float_of(name, _cut_of_experts(name, self.shape_of(name), share))
            made.append(self._reported(self._of_experts(name, floats), own, part))
            leaves, rows = (("gate", "up"), floats.shape[1] // 2) if part == "gate_up" else (("down",), floats.shape[1])
            for e, packed in enumerate(made[-1]):
                names = [f"{name.rpartition('.')[0]}.{e}.{leaf}_proj" for leaf in leaves]
                self._kept(names, [rows] * len(leaves), packed, name)
        return Experts.of_packed(*made, activation)

    def _of_experts(
        self, name: str, floats: torch.Tensor, biases: Iterable[torch.Tensor | None] = repeat(None)
    ) -> Iterator[tuple[Packed, torch.Tensor]]:
        """(packed, float weight) of each of experts [E, N, K], the tensor of that name."""
        options = {**self.options, **self._shared_plan(floats)}
        for e, (weight, bias) in enumerate(zip(floats, biases)):
            with weights.renamed(weight=f"{name}[{e}]", bias=f"{name}_bias[{e}]"):
                made = quantized(self.quantize, weight.contiguous(), bias, self.dtype, options, self.target)
            yield made, weight

    def _reported(self, pairs: Iterable[tuple[Packed, torch.Tensor | None]], own: str, part: str) -> list[Packed]:
        made = []
        for e, (packed, weight) in enumerate(pairs):
            self.report(f"{own}.{e}.{part}", packed, weight)
            made.append(packed)
        return made

    def _shared_plan(self, experts: Iterable[torch.Tensor]) -> dict[str, Option]:
        """The option that experts share: W4Ax's plan, of the largest magnitudes in the columns of their weights."""
        if self.quantize is None or not self.quantize.product.planned or "plan" in self.options:
            return {}
        largest = [weight.float().abs().amax(0) for weight in experts]
        return {"plan": self.quantize.plan(torch.stack(largest).amax(0))} if largest else {}

    def _floats(self, names: Iterable[str], share: Share | None) -> Iterator[torch.Tensor]:
        """The weights of those of some layers that are float."""
        parts = (self._part(name, share) for name in names)
        return (part[0] for part in parts if isinstance(part, tuple))

    def interleaved(self, name: str, activation: str, own: str, shares: Shares = (None, None)) -> Experts:
        """gpt-oss's experts: rows 2 i are gates, 2 i + 1 ups, and both products have biases. As published in MXFP4,
        or float tensors [E, hidden, 2 I] and [E, I, hidden].

        Args:
            name: what stands before ".gate_up_proj_blocks", or ".gate_up_proj". shares: see `stacked`.
        """
        made = []
        for leaf, part, share in (("gate_up_proj", "gate_up", shares[0]), ("down_proj", "down", shares[1])):
            order = "interleaved" if part == "gate_up" else None
            if any(self.has(f"{name}.{leaf}_{of}") for of in ("blocks", "scales")):
                pack = stored.FAMILIES[stored.of_mxfp4(self.asked.activations).record].pack
                self.quantizes_activations |= self.asked.activations is not None
                pairs = ((pack(one, target=self.target), None) for one in self._small(f"{name}.{leaf}", order, share))
            elif self.quantize is None and self.has(f"{name}.{leaf}"):
                raise _float_experts(own)
            else:
                pairs = self._quantized(f"{name}.{leaf}", order, share)
            made.append(self._reported(pairs, own, part))
        return Experts.of_packed(*made, activation)

    def _small(self, name: str, order: str | None, share: Share | None) -> list[Canonical]:
        """Canonical weights of MXFP4 experts, or what a rank keeps of each."""
        own = {part: f"{name}_{part}" for part in ("blocks", "scales", "bias")}
        tensors = [self.read(each) for each in own.values()]
        with weights.renamed(**own, weight_packed=own["blocks"], weight_scale=own["scales"]):
            experts = mxfp4.unpack_experts(*tensors, gate_up=order)
        if share is None:
            return experts
        with _of_layer(name, share):
            if order is None:
                return [share.of(one) for one in experts]
            half = share.part(experts[0].n // 2)
            return [one.shard(share.rank, share.world, 0, parts=(half, half)) for one in experts]

    def _quantized(self, name: str, order: str | None, share: Share | None) -> Iterator[tuple[Packed, torch.Tensor]]:
        """`_of_experts` [E, K, N], or of what a rank keeps of them."""
        values = self.float_of(name).transpose(1, 2)
        bias = self.float_of(f"{name}_bias")
        if values.dim() != 3 or bias.shape != values.shape[:2]:
            seen = [list(each.shape) for each in (values.transpose(1, 2), bias)]
            raise ArgumentError(name, seen, "must be [E, K, N], and its bias [E, N]", "get the checkpoint again")
        if order is not None:
            values, bias = (torch.cat([t[:, 0::2], t[:, 1::2]], 1) for t in (values, bias))
        if (cut := _cut_of_experts(name, values.shape, share)) is not None:
            values = cut.of(values)
            alone = share.dim == 0 or share.rank == 0  # a sum over ranks has the bias once
            bias = None if not alone else cut.of(bias) if share.dim == 0 else bias
        return self._of_experts(name, values, repeat(None) if bias is None else cast(bias, self.dtype, f"{name}_bias"))

    def experts(
        self,
        gates: Sequence[str],
        ups: Sequence[str],
        downs: Sequence[str],
        activation: str,
        own: str,
        shares: Shares = (None, None),
    ) -> Experts:
        """The experts of a layer; shares of gate and up, and of down."""
        rows, columns = shares
        first = self._shared_plan(self._floats((*gates, *ups), rows))
        last = self._shared_plan(self._floats(downs, columns))
        both = [
            self._made([g, u], f"{own}.{e}.gate_up", shares=(rows, rows), **first)
            for e, (g, u) in enumerate(zip(gates, ups))
        ]
        back = [self._made([d], f"{own}.{e}.down", shares=(columns,), **last) for e, d in enumerate(downs)]
        if isinstance(both[0], tuple) or isinstance(back[0], tuple):
            raise _float_experts(own)
        return Experts.of_packed(at_one_scale(both, (*gates, *ups)), at_one_scale(back, downs), activation)


def _cut_of_experts(name: str, shape: Sequence[int], share: Share | None) -> Cut | None:
    """Of [E, 2 I, hidden], gate before up, or [E, hidden, I]."""
    if share is None or len(shape) != 3:
        return None
    with _of_layer(name, share):
        if share.dim == 1:
            return share.cut(shape[2], 2)
        half = share.part(shape[1] // 2)
        return Cut(1, spans_of(shape[1], share.rank, share.world, (half, half)))


def quantized(
    form: Format, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, options: Mapping[str, Option],
    target: str | None,
) -> Packed:  # fmt: skip
    """The packed weight of a float one, with what the format wants of a model's dtype."""
    given = dict(options) | ({} if target is None else {"target": target})
    if form.product.codes.symmetric:
        given.setdefault("scale_dtype", dtype)
    try:
        return form.quantize(weight, bias, **given)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        constraint = f"{form} does not take all of them ({error})"
        raise ArgumentError("options", sorted(options), constraint, "see its quantize") from None


def cast(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """`values` in the model's dtype.

    Raises:
        ArgumentError: finite values that become infinite in it.
    """
    made = values.to(dtype)
    if dtype == torch.float16 and values.dtype != dtype and bool((made.isinf() & values.isfinite()).any()):
        raise ArgumentError("dtype", "float16", f"{name} holds values beyond its range", "pass dtype=torch.bfloat16")
    return made


def _float_experts(own: str) -> ArgumentError:
    remedy = 'quantize them on load: quantize="w4a16-g128"'
    return ArgumentError("quantize", None, f"the experts of {own} are float, which has no operator", remedy)


class Stored(Source):
    """Modules of a state that `save_pretrained` wrote, by their own names.

    Args:
        tensors: the state. device, dtype: see `Source`.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self.tensors = tensors

    def scales(self, part: str, shape: Shape) -> torch.Tensor | None:
        return self.read(f"kv.{part}_static") if self.has(f"kv.{part}_static") else None

    def vector(self, name: str, own: str) -> torch.Tensor:
        return self.read(own).to(self.dtype)

    def gain(self, name: str, own: str, offset: float) -> torch.Tensor:
        return self.read(own)

    def pair(self, names: Sequence[str], own: str, offset: float) -> torch.Tensor:
        return self.read(own)

    def head(self, name: str, own: str, share: Share | None = None) -> Linear | Dense:
        return self.linear(name, own, share)

    def _state(self, own: str) -> dict[str, torch.Tensor]:
        return {name: self.read(name) for name in self.tensors if name.startswith(f"{own}.")}

    def _packed(
        self, own: str, dim: int, parts: Callable[[int], Sequence[Part]], share: Share
    ) -> Packed | GroupedWeight:
        """What a rank keeps of a packed weight, or of experts; `parts` of its size along `dim`."""
        prefix, noted = f"{own}.", f"{own}.weight_format"
        names = [name for name in self.tensors if name.startswith(prefix) and name != noted]
        form = {noted: self.read(noted)} if self.has(noted) else {}
        hollow = stored_weight(form | {name: torch.empty(self.shape_of(name), device="meta") for name in names}, prefix)
        grouped = isinstance(hollow, GroupedWeight)
        one, given = hollow.stacked if grouped else hollow, parts(hollow.n if dim == 0 else hollow.k)
        with _of_layer(own, share):
            spans = checked_spans(hollow, share.rank, share.world, dim, given)
            cuts = plan(one, dim, spans, share.rank, lead=int(grouped))
            if cuts is None:
                return stored_weight(self._state(own), prefix).shard(share.rank, share.world, dim, parts=given)
        made = cuts.apply(one, lambda name, cut: self.take(f"{prefix}{name}", cut))
        return GroupedWeight(made) if grouped else made

    def _dense(self, own: str, dim: int, parts: Callable[[int], Sequence[Part]], share: Share) -> tuple:
        """(weight, bias) of a float layer."""
        size = self.shape_of(f"{own}.weight")[dim]
        with _of_layer(own, share):
            cut = Cut(dim, spans_of(size, share.rank, share.world, parts(size)))
        held, alone = f"{own}.bias", dim == 0 or share.rank == 0
        bias = self.take(held, cut if dim == 0 else None) if alone and self.has(held) else None
        return self.take(f"{own}.weight", cut).to(self.dtype), bias

    def linear(self, name: str, own: str, share: Share | None = None) -> Linear | Dense:
        if share is not None:
            parts = lambda size: (share.part(size),)
            if self.has(f"{own}.weight"):
                return Dense(*self._dense(own, share.dim, parts, share))
            return Linear(self._packed(own, share.dim, parts, share))
        state = self._state(own)
        if f"{own}.weight" in state:
            return Dense(state[f"{own}.weight"].to(self.dtype), state.get(f"{own}.bias"))
        return Linear.from_state(state, f"{own}.")

    def joined(
        self, kind: type[JoinedLinear], names: Sequence[str], sizes: Sequence[int], own: str, shares: Shares = ()
    ) -> nn.Module:
        if shares:
            parts = lambda size: [share.part(each) for share, each in zip(shares, sizes)]
            if self.has(f"{own}.weight"):
                return Dense(*self._dense(own, 0, parts, shares[0]), sizes_of(sizes, shares))
            return kind(self._packed(own, 0, parts, shares[0]), sizes_of(sizes, shares))
        state = self._state(own)
        if f"{own}.weight" in state:
            return Dense(state[f"{own}.weight"].to(self.dtype), state.get(f"{own}.bias"), sizes)
        return kind.from_state(state, f"{own}.", sizes=sizes)

    def experts(
        self,
        gates: Sequence[str],
        ups: Sequence[str],
        downs: Sequence[str],
        activation: str,
        own: str,
        shares: Shares = (None, None),
    ) -> Experts:
        names, (rows, columns) = (f"{own}.gate_up_proj", f"{own}.down_proj"), shares
        if rows is None:
            return Experts(*(stored_weight(self._state(name), f"{name}.") for name in names), activation)
        halves = lambda size: (rows.part(size // 2), rows.part(size // 2))
        both = self._packed(names[0], 0, halves, rows)
        return Experts(both, self._packed(names[1], 1, lambda size: (columns.part(size),), columns), activation)

    def interleaved(self, name: str, activation: str, own: str, shares: Shares = (None, None)) -> Experts:
        return self.experts([], [], [], activation, own, shares)


def sizes_of(sizes: Sequence[int], shares: Shares) -> tuple[int, ...]:
    """What a rank keeps of each of some layers' output features."""
    return tuple(share.size(size) for share, size in zip(shares, sizes)) if shares else tuple(sizes)


@contextmanager
def _of_layer(name: str, share: Share | None) -> Iterator[None]:
    """Errors of a cut name the layer that cannot be cut."""
    try:
        yield
    except ArgumentError as error:
        if share is None or error.argument not in CUT:
            raise
        constraint = f"{name} cannot be shared by {share.world} ranks: {error.argument} {error.constraint}"
        raise ArgumentError("tensor_parallel", (share.rank, share.world), constraint, error.remedy) from None
