"""One layer, or all layers of a checkpoint, in the form of an operator family: one implementation for all families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.checkpoints import parts
from terrazzo.ops.checkpoints.config import LayerConfig
from terrazzo.ops.checkpoints.patterns import compile_pattern, matches
from terrazzo.ops.checkpoints.reader import Checkpoint, natural

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.shards import Share

WORDS = {"int8": "8-bit int", "e4m3": "8-bit float"} | {
    f"int8{form}": f"8-bit int,{form}" for form in (" static", " asymmetric", " static asymmetric")
}
WORDS["other"] = "as no kernel multiplies them"
"""What `LayerConfig.activations` names -> the same for messages."""
READERS = {
    "fp8": ("fp8", "w8a8"), "int_quantized": ("w8a16", "w8a8", "w4a8"), "mxfp4": ("mxfp4",), "nvfp4": ("nvfp4",),
    "qserve": ("w4a8",), "awq": ("w4a16",), "gptq": ("w4a16", "w8a16"),
    "compressed_tensors": ("w4a16", "w8a16", "w4a8"),
}  # fmt: skip
"""Convention -> operators that read such layers, for remedies; those of 16-bit activations first."""


@dataclass(frozen=True)
class Family:
    """What an operator family reads.

    Attributes:
        operator: its name under terrazzo.ops.
        readers: convention -> (tensors of a layer, its config, **options) -> canonical weight.
        pack: (canonical weight, target=) -> packed weight.
        activations: what a config may say of x: "int8", "e4m3"; "" for 16 bits.
        bits: of its codes, where others of the same convention have other bits.
    """

    operator: str
    readers: Mapping[str, Callable[..., Any]]
    pack: Callable[..., Any]
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


def read(
    family: Family,
    checkpoint: Checkpoint,
    name: str,
    device: torch.device,
    share: Share | None = None,
    **options: Any,
) -> Any:
    """Canonical weight of one layer, or what a rank keeps of it: then only that is read where the files allow it.

    Raises:
        ArgumentError: no such layer, a reason why it cannot be read as its tensors say, or tensors that do not fit.
    """
    config, convention = checkpoint.layer(name), checkpoint.layers()[name]
    if reason := config.skip or family.refuses(convention, config):
        lost = any(own in checkpoint.lost for own in checkpoint.leaves(name).values())
        remedy = "get the checkpoint's files again" if lost else _remedy(family, convention, config)
        raise ArgumentError("name", name, f"cannot be read: {reason}", remedy)
    stated = config.format
    if stated is not None and convention not in _SAME.get(stated, (stated.removesuffix("_v2"),)):
        raise ArgumentError(
            "format",
            stated,
            f"the tensors of {name!r} are {convention}",
            "pass that format, or correct the config",
        )
    found = None if share is None else parts.tensors(checkpoint, name, config, share, device)
    given = (checkpoint.tensors(name, device), config) if found is None else found
    try:
        made = family.readers[convention](*given, **options)
    except ArgumentError as error:
        if not name or name in f"{error.argument} {error.constraint}":
            raise
        constraint = f"{error.constraint} (layer {name!r})"
        raise type(error)(error.argument, error.value, constraint, error.remedy) from None
    return made if share is None or found is not None else share.of(made)


def _remedy(family: Family, convention: str, config: LayerConfig) -> str:
    """What a caller can do about a layer that a family does not take."""
    if config.excluded:
        return "read it as a float layer, which is what its config says"
    if config.skip:
        report = f"terrazzo.ops.{family.operator}.load_model(path).report() says which layers can be read"
        return f"get the model in another format; {report}"
    if convention in family.readers and config.bits == 8 and config.activations not in (None, ""):
        return "load it with terrazzo.ops.w8a16, or with terrazzo.load(weight_only=True): activations then have 16 bits"
    others = [f"terrazzo.ops.{operator}" for operator in READERS[convention] if operator != family.operator]
    return f"load it with {' or '.join(others)}" if others else "get the model in another format"


_SAME = {"compressed_tensors": ("compressed_tensors", "int_quantized", "mxfp4", "nvfp4", "fp8")}


def read_layer(
    family: Family,
    path: str | Path,
    name: str | None,
    *,
    format: str | None,
    device: str | int | torch.device,
    **options: Any,
) -> Any:
    """Canonical weight of one layer: see a family's `read_layer`."""
    to = weights.device_of(device)
    checkpoint = Checkpoint(path, format)
    if name is None:
        layers = [name for name, kind in checkpoint.layers().items() if kind in family.readers]
        if not layers:
            remedy = "iter_layers says what it holds; quantize() takes float weights"
            raise ArgumentError("path", str(path), "holds no quantized layer", remedy)
        if len(layers) != 1:
            raise ArgumentError(
                "name",
                None,
                f"the checkpoint has {len(layers)} quantized layers",
                f"name one: {', '.join(sorted(layers, key=natural)[:6])}",
            )
        (name,) = layers
    return read(family, checkpoint, name, to, **options)


def iter_layers(
    family: Family,
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
    """Read a checkpoint one layer at a time: see a family's `iter_layers`."""
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
            if reason := config.skip or family.refuses(layers[name], config):
                if strict and not config.excluded:
                    read(family, checkpoint, name, to, **options)  # raises
                yield Layer(name, skipped=reason)
                continue
            weight = read(family, checkpoint, name, to, **options)
        except ArgumentError as error:
            if strict:
                raise
            yield Layer(name, skipped=str(error))
            continue
        yield Layer(name, family.pack(weight, target=target) if packed else weight)
    for name in checkpoint.unread:
        if not select:
            yield Layer(name, skipped="a file that the index does not name")


def _other(checkpoint: Checkpoint, name: str, what: str) -> str:
    """Why a tensor outside of layers is not loaded."""
    if name in checkpoint.lost:
        return what
    config = checkpoint.config.layer(name)
    note = f" ({config.skip})" if config.skip else ""
    return f"stored as {what}, not quantized{note}"


def load_model(family: Family, path: str | Path, **options: Any) -> Model:
    """All layers that `iter_layers` yields, as one object with a printable report."""
    model = Model()
    for layer in iter_layers(family, path, **options):
        if layer.weight is None:
            model.skipped[layer.name] = layer.skipped
        else:
            model.layers[layer.name] = layer.weight
    return model
