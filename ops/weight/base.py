"""The two forms of a weight: canonical, in plain rows, and packed, in the layout that kernels read.

A product's classes are dataclasses of its fields. They add what their planes hold: `_planes` makes those of a packed
weight from a canonical one, and `_rows` the other way round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.products.planes import Size
from terrazzo.ops.shards import Sharded, group_of
from terrazzo.ops.weight import files

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.products.product import Product

Weight = TypeVar("Weight", bound="Canonical[Any] | Packed[Any]")
Form = TypeVar("Form")
"""The other form of a weight."""
AnyCanonical: TypeAlias = "Canonical[Any]"
AnyPacked: TypeAlias = "Packed[Any]"
"""Weights of whatever product."""
Fields: TypeAlias = "dict[str, torch.Tensor | str | None]"
"""Of a form: name -> value."""


class Canonical(Sharded, Generic[Form]):
    """Of a canonical weight, a dataclass with `codes` [N, ...] and `k`: what does not depend on the product.

    Attributes:
        _product: that its products are of. _shown: what stands in front of its name where it is shown.
        packed_kind: class of its packed form.
    """

    _product: ClassVar[Product]
    _shown: ClassVar[str] = ""
    packed_kind: ClassVar[type[Packed[Any]]]
    codes: torch.Tensor

    @property
    def n(self) -> int:
        """Output features."""
        return self.codes.shape[0]

    def to(self: Weight, device: str | int | torch.device) -> Weight:
        """The same weight on another device."""
        return weights.move(self, device)

    def pack(self, *, target: Target | str | None = None) -> Form:
        """See `pack` of the product's module."""
        return self.packed_kind._of(self, target)

    def _summary(self) -> str:
        """Its facts, for people."""
        parts = [f"group={self.group_size}"]
        return ", ".join(parts + [name for name in ("smooth", "bias") if getattr(self, name, None) is not None])

    def __repr__(self) -> str:
        return f"{self._shown}{type(self).__name__}(N={self.n}, K={self.k}, {self._summary()})"


class Plain(Canonical[Form]):
    """Of a canonical weight whose codes are not padded."""

    @property
    def k(self) -> int:
        """Input features."""
        return self.codes.shape[1]


class Packed(Sharded, Generic[Form]):
    """Of a packed weight, a dataclass with `words`, `n`, `k` and `layout`: what does not depend on the product.

    It is no torch module and has no parameters: `terrazzo.nn.Linear` is.

    Attributes:
        _product, _shown: see `Canonical`. VERSION: named in its files; another one is refused, but for OTHER_VERSIONS.
        GROUPS: group sizes that kernels read; a row of one group is k.
        canonical_kind: class of its canonical form.
        _planes: (canonical weight, architecture or None for any) -> fields of the packed form that the canonical one
            lacks, but layout and target. ArgumentError for an architecture that does not multiply such a weight.
        _rows: fields of the canonical form that this one does not have, or has otherwise.
        expected_layout: identity of the layout that the kernels of this version read.
    """

    _product: ClassVar[Product]
    _shown: ClassVar[str] = ""
    VERSION: ClassVar[str]
    OTHER_VERSIONS: ClassVar[tuple[str, ...]] = ()
    GROUPS: ClassVar[tuple[int, ...]] = (32, 64, 128)
    canonical_kind: ClassVar[type[Canonical[Any]]]
    _planes: ClassVar[Callable[[Any, str | None], Fields]]
    _rows: Callable[[], Fields]
    expected_layout: Callable[[], str]
    words: torch.Tensor
    n: int
    k: int
    layout: str

    def __init_subclass__(cls, of: type[Canonical[Any]] | None = None) -> None:
        """of: class of the canonical form, whose packed form this is."""
        super().__init_subclass__()
        if of is not None:
            cls.canonical_kind, of.packed_kind = of, cls
            cls._product, cls._shown = vars(cls).get("_product", of._product), of._shown

    @classmethod
    def _of(cls: type[Weight], weight: Canonical[Any], target: Target | str | None = None) -> Weight:
        """A canonical weight, packed on the device where its codes are; see `pack` of the product's module."""
        arch = weights.arch_of(target, weight.codes.device)
        shared = {f.name: getattr(weight, f.name) for f in dataclasses.fields(cls) if hasattr(weight, f.name)}
        made = cls(**shared | cls._planes(weight, arch) | {"layout": "", "target": arch})
        return dataclasses.replace(made, layout=made.expected_layout())

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Plane -> its shape and dtype, of planes that follow from n, k and the plain fields."""
        product, zeros = self._product, not getattr(self, "symmetric", True)
        own = getattr(self, "scale_dtype", ""), zeros, getattr(self, "block", False)
        size = Size(self.n, self.k, group_of(self), *own)
        shapes = product.shapes(size)
        return {plane.name: (shapes[plane.name], plane.dtype) for plane in product.planes if plane.name in shapes}

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        """Bytes that a kernel streams: words and scales, padding included."""
        return sum(getattr(self, name).nbytes for name in self._shapes())

    def to(self: Weight, device: str | int | torch.device) -> Weight:
        """The same weight on another device."""
        return weights.move(self, device)

    def unpack(self) -> Form:
        """Inverse of `pack`: the same codes and scales; those of groups of zeros may be others."""
        kind = self.canonical_kind
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(kind) if hasattr(self, f.name)}
        return kind(**shared | self._rows())

    def dequantize(self) -> torch.Tensor:
        """float64 [N, K], read back from the packed bytes."""
        return self.unpack().dequantize()

    def save(self, path: str | Path) -> None:
        """Write one safetensors file: the tensors, and sizes, layout identity and version in its metadata. Atomic."""
        files.save(self, path, self.VERSION)

    @classmethod
    def load(cls: type[Weight], path: str | Path, device: str | int | torch.device = "cpu") -> Weight:
        """Read a file that `save` wrote.

        Raises:
            ArgumentError: it is no such file, or its tensors do not have the sizes that its metadata states.
            LayoutMismatchError: it was packed with another layout than this version's.
        """
        weight = files.load(cls, path, device, cls.VERSION, *cls.OTHER_VERSIONS)
        weight.check_stored("path")
        return weight

    def check_stored(self, argument: str = "words") -> None:
        """Raise an error for what no weight has, sizes, layout and values: of weights that come from a file.

        Args:
            argument: of errors about the layout.
        """
        self.check_facts()
        self.check_layout(self.expected_layout(), argument)
        self.check_sizes()
        weights.check_vectors(self)
        self.check_values()
        if self.bias is not None:
            weights.check_finite("bias", self.bias, "the file is damaged: get it again")

    @classmethod
    def alike(cls: type[Weight], experts: list[Weight]) -> list[Weight]:
        """The weights of experts, stored alike where a format can do that without changing one."""
        return experts

    def check_facts(self) -> None:
        """Raise ArgumentError unless n, k and group_size are numbers that a weight can have."""
        for name in ("n", "k", "group_size"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ArgumentError(name, value, "must be a positive integer", "pack the weight again")
        if self.group_size not in (*self.GROUPS, self.k):
            constraint = f"must be one of {self.GROUPS}, or K = {self.k}"
            raise ArgumentError("group_size", self.group_size, constraint, "pack the weight again")

    def check_sizes(self) -> None:
        """Raise ArgumentError unless the tensors have the shapes and dtypes that n, k and the plain fields ask for."""
        for name, (shape, dtype) in self._shapes().items():
            weights.check_tensor(self, name, shape, dtype)

    def check_values(self) -> None:
        """Raise ArgumentError for values that no weight has; read where they come from a file."""
        for name in ("channel_scales", "smooth"):
            if (values := getattr(self, name, None)) is not None:
                weights.check_finite(name, values, "save the weight again")
        if getattr(self, "smooth", None) is not None and not bool((self.smooth > 0).all()):
            raise ArgumentError("smooth", float(self.smooth.min()), "must be positive", "save the weight again")

    def check_layout(self, identity: str, argument: str = "w") -> None:
        """Raise LayoutMismatchError unless the weight was packed with the layout named `identity`."""
        weights.check_layout(self.layout, identity, argument)

    _summary = Canonical._summary
    __repr__ = Canonical.__repr__
