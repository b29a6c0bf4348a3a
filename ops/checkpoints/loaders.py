"""One layer, or all layers of a checkpoint, in the form of an operator family: one implementation for all families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import parts
from terrazzo.ops.checkpoints.conventions.base import Convention, LayerConfig
from terrazzo.ops.checkpoints.conventions.table import CONVENTIONS
from terrazzo.ops.checkpoints.patterns import compile_pattern, matches
from terrazzo.ops.checkpoints.reader import Checkpoint, natural
from terrazzo.ops.products.product import Product
from terrazzo.ops.products.table import PRODUCTS

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.shards import Share

WORDS = {"int8": "8-bit int", "e4m3": "8-bit float"} | {
    f"int8{form}": f"8-bit int,{form}" for form in (" static", " asymmetric", " static asymmetric")
}
WORDS["other"] = "as no kernel multiplies them"
"""What `LayerConfig.activations` names -> the same for messages."""
_BY_INPUT = sorted(PRODUCTS, key=lambda one: (not one.wide, not one.direct))
READERS = {
    name: tuple(dict.fromkeys(one.root for one in _BY_INPUT if name in one.conventions and not one.on_request))
    for name in CONVENTIONS
}
"""Convention -> operators that read such layers, for remedies; with 16-bit activations first."""
Canonical = TypeVar("Canonical")
Packed = TypeVar("Packed")


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a checkpoint: a weight, or the reason why there is none.

    Attributes:
        name: prefix of its tensors.
        weight: packed (canonical with `packed=False`), None when skipped.
        skipped: reason, "" when loaded.
    """

    name: str
    weight: Any = None
    skipped: str = ""


@dataclass(frozen=True, eq=False)
class Model:
    """The layers of a checkpoint that an operator family reads.

    Attributes:
        layers: name -> weight.
        skipped: name -> reason, for every other tensor of the checkpoint.
    """

    layers: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def report(self) -> str:
        """One line for each layer: what it became, or why it was skipped."""
        lines = [f"{len(self.layers)} layers loaded, {len(self.skipped)} skipped"]
        lines += [f"  loaded   {name}: {weight!r}" for name, weight in self.layers.items()]
        return "\n".join(lines + [f"  skipped  {name}: {reason}" for name, reason in self.skipped.items()])


@dataclass(frozen=True)
class Family(Generic[Canonical, Packed]):
    """What an operator family reads.

    Attributes:
        operator: its name under terrazzo.ops.
        readers: convention -> (tensors of a layer, its config, **options) -> canonical weight.
        pack: (canonical weight, target=) -> packed weight.
        activations: what a config may say of x: "int8", "e4m3"; "" for 16 bits.
        bits: of its codes, where others of the same convention have other bits.
    """

    operator: str
    readers: Mapping[str, Callable[..., Canonical]]
    pack: Callable[..., Packed]
    activations: tuple[str, ...]
    bits: int | None = None

    def refuses(self, convention: str, config: LayerConfig) -> str:
        """Why the family cannot take a layer of this convention and config, else ""."""
        if convention not in self.readers:
            return f"stored as {convention.replace('_', '-')}, which {self.operator} does not read"
        if self.bits is not None and config.format is not None and config.bits != self.bits:
            return f"{self.operator} reads {self.bits}-bit codes, and these have {config.bits} bits"
        if config.activations is not None and config.activations not in self.activations:
            if self.activations == ("",):
                return f"activations are quantized too ({WORDS[config.activations]})"
            return f"activations are quantized otherwise than by {self.operator} ({WORDS[config.activations]})"
        return ""

    def read(
        self, checkpoint: Checkpoint, name: str, device: torch.device, share: Share | None = None, **options: Any
    ) -> Canonical:
        """Canonical weight of one layer, or what a rank keeps of it: then only that is read where the files allow it.

        Raises:
            ArgumentError: no such layer, a reason why it cannot be read as its tensors say, or tensors that do not fit.
        """
        config, convention = checkpoint.layer(name), checkpoint.convention(name)
        if reason := config.skip or self.refuses(convention.name, config):
            lost = any(own in checkpoint.lost for own in checkpoint.leaves(name).values())
            remedy = "get the checkpoint's files again" if lost else self._remedy(convention.name, config)
            raise ArgumentError("name", name, f"cannot be read: {reason}", remedy)
        if config.format not in (None, *convention.formats, *convention.within):
            constraint = f"the tensors of {name!r} are {convention.name}"
            raise ArgumentError("format", config.format, constraint, "pass that format, or correct the config")
        found = None if share is None else parts.tensors(checkpoint, name, config, share, device)
        given = (checkpoint.tensors(name, device), config) if found is None else found
        try:
            made = self.readers[convention.name](*given, **options)
        except ArgumentError as error:
            if not name or name in f"{error.argument} {error.constraint}":
                raise
            constraint = f"{error.constraint} (layer {name!r})"
            raise type(error)(error.argument, error.value, constraint, error.remedy) from None
        return made if share is None or found is not None else share.of(made)

    def _remedy(self, convention: str, config: LayerConfig) -> str:
        """What a caller can do about a layer that a family does not take."""
        if config.excluded:
            return "read it as a float layer, which is what its config says"
        if config.skip:
            report = f"terrazzo.ops.{self.operator}.load_model(path).report() says which layers can be read"
            return f"get the model in another format; {report}"
        if convention in self.readers and config.bits == 8 and config.activations not in (None, ""):
            remedy = "load it with terrazzo.ops.w8a16, or with terrazzo.load(weight_only=True)"
            return f"{remedy}: activations then have 16 bits"
        others = [f"terrazzo.ops.{operator}" for operator in READERS[convention] if operator != self.operator]
        return f"load it with {' or '.join(others)}" if others else "get the model in another format"

    def one(
        self,
        path: str | Path,
        name: str | None,
        *,
        format: str | None = None,
        device: str | int | torch.device,
        **options: Any,
    ) -> Canonical:
        """Canonical weight of one layer: `read_layer`, with options of the reader."""
        to = weights.device_of(device)
        checkpoint = Checkpoint(path, format)
        if name is None:
            layers = [name for name, kind in checkpoint.layers().items() if kind in self.readers]
            if not layers:
                remedy = "iter_layers says what it holds; quantize() takes float weights"
                raise ArgumentError("path", str(path), "holds no quantized layer", remedy)
            if len(layers) != 1:
                constraint = f"the checkpoint has {len(layers)} quantized layers"
                raise ArgumentError("name", None, constraint, f"name one: {', '.join(sorted(layers, key=natural)[:6])}")
            (name,) = layers
        return self.read(checkpoint, name, to, **options)

    def each(
        self,
        path: str | Path,
        *,
        select: str = "",
        packed: bool = True,
        strict: bool = False,
        format: str | None = None,
        device: str | int | torch.device = "cpu",
        target: Target | str | None = None,
        **options: Any,
    ) -> Iterator[Layer]:
        """A checkpoint's layers one at a time: `iter_layers`, with options of the reader."""
        to = weights.device_of(device)
        compile_pattern(select, "select")
        checkpoint = Checkpoint(path, format)
        layers, others = checkpoint.layers(), checkpoint.others()
        for name in sorted({*layers, *others}, key=natural):
            if select and not matches(select, name, "select", search=True):
                continue
            if name not in layers:
                yield Layer(name, skipped=_other(checkpoint, name, others[name]))
                continue
            config = checkpoint.layer(name)  # what is wrong with the whole config is raised
            try:
                if reason := config.skip or self.refuses(layers[name], config):
                    if strict and not config.excluded:
                        self.read(checkpoint, name, to, **options)  # raises
                    yield Layer(name, skipped=reason)
                    continue
                weight = self.read(checkpoint, name, to, **options)
            except ArgumentError as error:
                if strict:
                    raise
                yield Layer(name, skipped=str(error))
                continue
            yield Layer(name, self.pack(weight, target=target) if packed else weight)
        for name in checkpoint.unread:
            if not select:
                yield Layer(name, skipped="a file that the index does not name")

    def read_layer(
        self, path: str | Path, name: str | None = None, *, device: str | int | torch.device = "cpu"
    ) -> Canonical:
        """Canonical weight of one layer of a checkpoint.

        Activations are what the module multiplies, whatever the config says of them; of `w8a8` they are what it says,
        and where it says nothing dynamic by token, or by 128 channels of blocks.

        Args:
            path: a .safetensors file or a Hugging Face folder; a config beside the file is read too.
            name: prefix of the layer's tensors; None when the checkpoint has only one layer.
            device: where the weight is built, as torch names it.

        Raises:
            ArgumentError: no such layer, a missing tensor, or a layer that its config or further tensors give another
                meaning (`load_model` skips it with the same reason).
        """
        return self.one(path, name, device=device)

    def load_layer(
        self,
        path: str | Path,
        name: str | None = None,
        *,
        device: str | int | torch.device = "cpu",
        target: Target | str | None = None,
    ) -> Packed:
        """`pack(read_layer(path, name, device=device), target=target)`."""
        return self.pack(self.one(path, name, device=device), target=target)

    def iter_layers(self, path: str | Path, **options: Any) -> Iterator[Layer]:
        """A checkpoint's layers one at a time, as `w4a16.iter_layers` does and with its options `select`, `packed`,
        `strict`, `device` and `target`."""
        yield from self.each(path, **options)

    def load_model(self, path: str | Path, **options: Any) -> Model:
        """All layers that `iter_layers(path, **options)` yields, as one object with a printable report."""
        model = Model()
        for layer in self.each(path, **options):
            if layer.weight is None:
                model.skipped[layer.name] = layer.skipped
            else:
                model.layers[layer.name] = layer.weight
        return model


def _other(checkpoint: Checkpoint, name: str, what: str) -> str:
    """Why a tensor outside of layers is not loaded."""
    if name in checkpoint.lost:
        return what
    config = checkpoint.config.layer(name)
    note = f" ({config.skip})" if config.skip else ""
    return f"stored as {what}, not quantized{note}"


def family_of(
    *products: Product,
    pack: Callable[..., Packed],
    made: Callable[..., Canonical] | None = None,
    read: Callable[..., Canonical] | None = None,
    bits: int | None = None,
) -> Family[Canonical, Packed]:
    """What reads layers for the products of a public module.

    Args:
        pack, bits: see `Family`.
        made: what a convention reads of a layer -> its canonical weight; None: it is one.
        read: in its place, (convention, product, tensors, config, **options) -> canonical weight.
    """

    def plain(convention: Convention, product: Product, *stored: Any, **options: Any) -> Any:
        found = convention.read(*stored, product, **options)
        return found if made is None else made(found)

    readers = {name: partial(read or plain, CONVENTIONS[name], one) for one in products for name in one.conventions}
    activations = dict.fromkeys(form for one in products for form in one.stated)
    return Family(products[0].module, readers, pack, tuple(activations), bits)
