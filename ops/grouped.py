"""What grouped GEMMs of all operators share: the stacked weights of many experts, and the checks of a call.

Tokens are sorted by expert (ops/moe.py): expert e owns the rows offsets[e] .. offsets[e + 1] - 1 of x and y.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, weights

if TYPE_CHECKING:
    import torch

PER_EXPERT = ("words", "params", "channel_scales", "bias")
"""Tensors of a packed weight that each expert has of its own."""
MOST_EXPERTS = 1024
"""Their table lies in shared memory."""


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """The packed weights of E experts, of one operator, shape and format. Build it with `stack`.

    Attributes:
        stacked: a PackedWeight whose tensors `PER_EXPERT` have a leading dimension E, for example words int32
            [E, Kp/128, Np/64, unit words] of W4A8. A smooth vector is shared by the experts.
    """

    stacked: Any

    @classmethod
    def stack(cls, experts: Sequence[Any]) -> GroupedWeight:
        """Stack the experts' PackedWeights; the tensors are copied.

        Raises:
            ArgumentError: no experts, too many, or experts that differ in anything but values.
        """
        import torch

        if not 1 <= len(experts) <= MOST_EXPERTS:
            raise ArgumentError("experts", len(experts), f"must be 1..{MOST_EXPERTS} weights", "split the experts")
        first, fields = experts[0], {}
        for field in dataclasses.fields(first):
            values = [_value(expert, field.name, first) for expert in experts]
            tensors = [torch.is_tensor(value) for value in values]
            if field.name == "perm" and any(tensors):
                raise ArgumentError("perm", "given", "experts share the order of x", "quantize without act-order")
            if not any(tensors):
                same = all(value == values[0] for value in values)
            elif field.name in PER_EXPERT:
                same = all(tensors) and all(v.shape == values[0].shape and v.dtype == values[0].dtype for v in values)
            else:
                same = all(tensors) and all(torch.equal(v, values[0]) for v in values)
            if not same:
                raise ArgumentError(
                    field.name, "different values", "must be the same for all experts", "pack the experts alike"
                )
            fields[field.name] = torch.stack(values) if field.name in PER_EXPERT and any(tensors) else values[0]
        return cls(type(first)(**fields))

    def __len__(self) -> int:
        """The number of experts."""
        return self.stacked.words.shape[0]

    def __getitem__(self, expert: int) -> Any:
        """The PackedWeight of one expert; its tensors are views."""
        if not -len(self) <= expert < len(self):
            raise IndexError(expert)
        own = {name: t[expert] for name, t in weights.tensor_fields(self.stacked).items() if name in PER_EXPERT}
        return dataclasses.replace(self.stacked, **own)

    @property
    def n(self) -> int:
        return self.stacked.n

    @property
    def k(self) -> int:
        return self.stacked.k

    @property
    def device(self) -> torch.device:
        return self.stacked.device

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' packed weights."""
        return self.stacked.nbytes

    def to(self, device: str | torch.device) -> GroupedWeight:
        """The same weights on another device."""
        return GroupedWeight(self.stacked.to(device))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file. Atomic."""
        weights.save(self.stacked, path, _version(type(self.stacked)))

    @classmethod
    def load(cls, make: type, path: str | Path, device: str | torch.device = "cpu") -> GroupedWeight:
        """Read a file that `save` wrote; `make` is the PackedWeight class of its operator.

        Raises:
            ArgumentError: it is no such file. LayoutMismatchError: it was packed with another layout.
        """
        loaded = cls(weights.load(make, path, device, _version(make)))
        loaded.check()
        return loaded

    def check(self) -> None:
        """Raise LayoutMismatchError or ArgumentError unless a kernel of this version can read the weights."""
        self[0].check_layout(sys.modules[type(self.stacked).__module__].layout_identity(self.stacked))
        self[0].check_sizes()
        for name, tensor in weights.tensor_fields(self.stacked).items():
            if name in PER_EXPERT and (tensor.shape[0] != len(self) or not tensor.is_contiguous()):
                raise ArgumentError(
                    name, list(tensor.shape), f"must be contiguous [{len(self)}, ...]", "stack the experts"
                )

    def __repr__(self) -> str:
        return f"GroupedWeight({len(self)} x {self[0]!r})"


def _value(expert: Any, name: str, first: Any) -> Any:
    if type(expert) is not type(first) or not hasattr(expert, "words"):
        raise ArgumentError(
            "experts", type(expert).__name__, "must be PackedWeights of one operator", "pack each expert"
        )
    return getattr(expert, name)


def _version(make: type) -> str:
    return sys.modules[make.__module__].FILE_VERSION + "/grouped"


def check_kind(w: Any, make: type, operator: str) -> None:
    if not isinstance(w, GroupedWeight) or not isinstance(w.stacked, make):
        seen = type(getattr(w, "stacked", w)).__name__
        raise ArgumentError("w", seen, f"must be a GroupedWeight of {operator}", "stack packed weights")


def check_once(w: GroupedWeight) -> None:
    """`check`, noted on the words, which outlive a GroupedWeight around them."""
    if not getattr(w.stacked.words, "_terrazzo_checked", False):
        w.check()
        w.stacked.words._terrazzo_checked = True


def check_rows(shape: Sequence[int], k: int) -> None:
    if len(shape) != 2 or shape[1] != k:
        raise ArgumentError("x", list(shape), f"must be [M, {k}], tokens sorted by expert", "see ops/moe.py")


def check_offsets(offsets: torch.Tensor, experts: int, device: torch.device) -> None:
    """The values are not read: that would wait for the GPU. The kernel keeps them inside 0..M."""
    if (
        tuple(offsets.shape) != (experts + 1,)
        or weights.dtype_name(offsets) != "int32"
        or offsets.device != device
        or not offsets.is_contiguous()
    ):
        raise ArgumentError(
            "expert_offsets",
            f"{weights.dtype_name(offsets)} {list(offsets.shape)} on {offsets.device}",
            f"must be contiguous int32 [{experts + 1}] on {device}",
            "use moe.sort_by_expert",
        )


def check_bias(bias: torch.Tensor, experts: int, n: int, dtype: torch.dtype | None, device: torch.device) -> None:
    """`dtype` None accepts any float."""
    if tuple(bias.shape) != (experts, n):
        raise ArgumentError("bias", list(bias.shape), f"must be [{experts}, {n}]", "stack the experts' biases")
    launching.check_bias(bias.view(-1), experts * n, dtype, device)


def check_target(target: Target, capability: str) -> None:
    if not target.supports(capability):
        raise ArgumentError(
            "target", target.arch, "grouped GEMMs need warpgroup instructions (sm_90a)", "call gemm for each expert"
        )
