"""What the weights of every operator family share: files, devices, targets, checks of tensors."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from terrazzo.lowering.errors import ArgumentError, LayoutMismatchError

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.targets import Target

Weight = TypeVar("Weight")


class Canonical:
    """Of a canonical weight, a dataclass with `codes` [N, K]: what does not depend on the format."""

    codes: torch.Tensor

    @property
    def n(self) -> int:
        """Output features."""
        return self.codes.shape[0]

    @property
    def k(self) -> int:
        """Input features."""
        return self.codes.shape[1]

    def to(self: Weight, device: str | torch.device) -> Weight:
        """The same weight on another device."""
        return move(self, device)


class Packed:
    """Of a packed weight, a dataclass with `words`, `n`, `k` and `layout`: what does not depend on the format.

    A format adds `expected_layout()`, identity of the layout that its kernels read, and `check_sizes()`.

    Attributes:
        VERSION: named in its files; another one is refused.
    """

    VERSION: ClassVar[str]
    words: torch.Tensor
    n: int
    k: int
    layout: str

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def device(self) -> torch.device:
        return self.words.device

    def to(self: Weight, device: str | torch.device) -> Weight:
        """The same weight on another device."""
        return move(self, device)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file: the tensors, and sizes, layout identity and version in its metadata. Atomic."""
        save(self, path, self.VERSION)

    @classmethod
    def load(cls: type[Weight], path: str | Path, device: str | torch.device = "cpu") -> Weight:
        """Read a file that `save` wrote.

        Raises:
            ArgumentError: it is no such file, or its tensors do not have the sizes that its metadata states.
            LayoutMismatchError: it was packed with another layout than this version's.
        """
        weight = load(cls, path, device, cls.VERSION)
        weight.check_layout(weight.expected_layout(), "path")
        weight.check_sizes()
        return weight

    def check_layout(self, identity: str, argument: str = "w") -> None:
        """Raise LayoutMismatchError unless the weight was packed with the layout named `identity`."""
        check_layout(self.layout, identity, argument)


def dtype_name(tensor: torch.Tensor) -> str:
    """ "float16" of torch.float16."""
    return str(tensor.dtype).removeprefix("torch.")


def is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or dtype_name(tensor) == "bool")


def out_of_range(values: torch.Tensor, low: int, high: int) -> int | None:
    """First value outside low..high, or None."""
    bad = values > high if low == 0 and not values.dtype.is_signed else (values < low) | (values > high)
    return int(values[bad][0]) if bool(bad.any()) else None


def tensor_fields(weight: Any) -> dict[str, torch.Tensor]:
    """The fields of a weight that hold tensors."""
    import torch

    fields = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}
    return {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}


def move(weight: Weight, device: str | torch.device) -> Weight:
    """The same weight on another device."""
    return dataclasses.replace(weight, **{name: t.to(device) for name, t in tensor_fields(weight).items()})


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


def save(weight: Any, path: str | Path, version: str) -> None:
    """Write one safetensors file: the tensors, and version and plain fields in its metadata. Atomic."""
    from safetensors.torch import save_file

    tensors = {name: t.contiguous() for name, t in tensor_fields(weight).items()}
    facts = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight)}
    facts = {name: value for name, value in facts.items() if name not in tensors and value is not None}
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(tensors, scratch, metadata={"format": "pt", "version": version, "weight": json.dumps(facts)})
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def load(make: Callable[..., Weight], path: str | Path, device: str | torch.device, *versions: str) -> Weight:
    """Read a file that `save` wrote in one of `versions`: `make` is called with its tensors and plain fields.

    Raises:
        ArgumentError: it is no such file.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            meta = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ArgumentError(
            "path", str(path), f"must be a readable safetensors file ({error})", "write it with PackedWeight.save"
        ) from None
    if meta.get("version") not in versions:
        wanted = " or ".join(map(repr, versions))
        raise ArgumentError(
            "path",
            str(path),
            f"its metadata must name version {wanted}, it names {meta.get('version')!r}",
            "a checkpoint layer is read with load_layer; a packed weight of another version is packed again",
        )
    return make(**tensors, **json.loads(meta["weight"]))
