"""What a convention is: the tensors of a layer, how they are told from others, and what reads them.

A `Method` is how a writer's config states layers. A writer may use several conventions, and several write the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from terrazzo.lowering.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.checkpoints.fields import Stated
    from terrazzo.ops.checkpoints.reader import Checkpoint
    from terrazzo.ops.products.product import Product

Tensors: TypeAlias = "dict[str, torch.Tensor]"
"""Of a layer, by what follows its name."""

WORD, GROUP = "word", "group"


@dataclass(frozen=True)
class Leaf:
    """A tensor of a layer.

    Attributes:
        name: what follows the layer's.
        n, k: (axis, features in one element) of output and of input features, None where it has no such axis. WORD is
            as many codes as an int32 holds, GROUP is the input features of a scale; 1 where it has one for each.
        optional: whether a layer may lack it.
        instead: the tensor that may stand in its place.
    """

    name: str
    n: tuple[int, int | str] | None = None
    k: tuple[int, int | str] | None = None
    optional: bool = False
    instead: str = ""

    def features(self, dim: int, bits: int) -> int | str:
        """Features of dimension `dim` in one element, or GROUP."""
        _, per = (self.n, self.k)[dim]
        return {2: 16, 8: 4}.get(bits, 8) if per == WORD else per


BIAS = Leaf("bias", n=(0, 1), optional=True)


@dataclass(frozen=True)
class LayerConfig:
    """What a checkpoint's config states about one layer. None: it does not say.

    Attributes:
        format: "awq", "gptq", "gptq_v2", "compressed_tensors", "qserve", "fp8", "nvfp4", "mxfp4" or
            "bitsandbytes".
        bits: bits for each code.
        group_size: input channels for each scale, -1 for one group.
        version: AWQ version or compressed-tensors format, as written.
        symmetric, desc_act: as written; of compressed-tensors, desc_act is its actorder by groups.
        activations: what x is quantized to, dynamically and for each token: "int8", "e4m3"; "" for 16 bits; None. Of
            weights in small floats "": their kernels multiply 16-bit x, whatever is stated. Of int8 weights also
            "int8 static", "int8 asymmetric", "int8 static asymmetric", and "other" of what no kernel multiplies.
        inputs: the same of fp8 weights, which W8A8 obeys: "e4m3", "e4m3 static", "e4m3 ue8m0", whose scales are rounded
            up to powers of two, "" or None. It refuses "e4m3 bounded", by `activation_scale_ub`, and "other", all else.
        skip: why the layer cannot be read as its tensors say, or why the config leaves it out, else "".
        excluded: `skip` says that the config leaves the layer out of quantization.
    """

    format: str | None = None
    bits: int = 4
    group_size: int | None = None
    version: str | None = None
    symmetric: bool | None = None
    desc_act: bool | None = None
    activations: str | None = None
    inputs: str | None = None
    skip: str = ""
    excluded: bool = False

    def bits_for(self, product: Product) -> int:
        """Bits that a reader is told: files without a config, for which 4 stands here, may be of 8."""
        return self.bits if product.codes.bits == 4 else product.codes.bits


@dataclass(frozen=True)
class Convention:
    """How the tensors of a layer hold its weight.

    Attributes:
        name: key of CONVENTIONS.
        leaves: tensors of a layer besides `bias`, the codes first.
        read: (tensors, config, product, **options) -> the codes and scales, for a product's canonical weight.
        direct: the same for products whose operands are the codes; None: no such product reads it.
        holds: (checkpoint, prefix, leaf of codes) -> whether a layer is of this convention; None: where no other is.
        formats: what a caller, or `LayerConfig.format`, names it.
        within: formats of writers that have layers of several conventions.
        group: input features of a scale, where it says so; 0: the config or the shapes do.
        rows: output features that are stored as one piece; tensors of such layers are not cut.
        divided: whether a vector beside a layer may divide its activations (AutoAWQ's ScaledActivation).
        versioned: whether the version that a config states is kept where a caller names the format.
        writes: products whose canonical weights `write` stores so. published: what compressed-tensors names it.
        write: (weight, whether it is to have a scale for each block of 128 x 128) -> its tensors without the bias, of
            which the reader makes it again.
    """

    name: str
    leaves: tuple[Leaf, ...]
    read: Callable[..., Any]
    direct: Callable[..., Any] | None = None
    holds: Callable[[Checkpoint, str, str], bool] | None = None
    formats: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    group: int = 0
    rows: int = 1
    divided: bool = False
    versioned: bool = False
    writes: tuple[Product, ...] = ()
    write: Callable[[Any], Tensors] | None = None
    published: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors that are read of a layer, whether they are there or not."""
        return tuple(leaf.name for leaf in (*self.leaves, BIAS))

    @property
    def codes(self) -> tuple[str, ...]:
        """Names that the tensor of codes may have."""
        return tuple(filter(None, (self.leaves[0].name, self.leaves[0].instead)))

    @property
    def scales(self) -> Leaf:
        """The tensor with a scale for each group."""
        return next(leaf for leaf in self.leaves if leaf.k is not None and leaf.k[1] == GROUP and not leaf.optional)

    @property
    def index(self) -> Leaf | None:
        """The tensor with the group of each input channel."""
        return next((leaf for leaf in self.leaves if leaf.k is not None and leaf.n is None), None)

    def leaf(self, name: str) -> Leaf | None:
        """The tensor of this name."""
        return next((leaf for leaf in (*self.leaves, BIAS) if leaf.name == name), None)


@dataclass(frozen=True)
class Method:
    """How a writer's config states its layers.

    Attributes:
        name: `quant_method`, and `Config.method`. aliases: other names of the same.
        layer: (config, name of a layer) -> what it states of it.
        read: fields of the config that `layer` obeys.
        neutral: fields that change nothing, whatever they hold.
        own: (config, name of a layer) -> fields that it states for this layer alone.
        unnamed: whether a config without a `quant_method` is such a one, of files that are older.
        file: of a folder, whose object `quantization` is such a config without its `quant_method`.
        by_tensors: whether a layer that it excludes is quantized all the same, where its tensors are codes.
    """

    name: str
    layer: Callable[[Stated, str], LayerConfig]
    read: str
    neutral: str
    aliases: tuple[str, ...] = ()
    own: Callable[[Stated, str], Stated] = lambda raw, name: {}
    unnamed: Callable[[Stated], bool] = lambda raw: False
    file: str = ""
    by_tensors: bool = False
    known: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", frozenset(f"{self.read} {self.neutral}".split()))


def needs_zeros(tensors: Mapping[str, torch.Tensor], kind: str, config: LayerConfig) -> None:
    """Raise ArgumentError where zero points are missing that the config does not say to be all the same."""
    if "qzeros" not in tensors and not config.symmetric:
        remedy = f"get the missing shard; for a symmetric layer call from_{kind} with qzeros=None"
        raise ArgumentError("qzeros", None, "the layer needs its zero points", remedy)
