"""What grouped GEMMs of all operators share: the stacked weights of many experts, and the checks of a call.

Tokens are sorted by expert (ops/moe.py): expert e owns the rows offsets[e] .. offsets[e + 1] - 1 of x and y.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import launching, weights
from terrazzo.ops.products.table import PRODUCTS
from terrazzo.ops.shards import Sharded
from terrazzo.ops.weight import files
from terrazzo.ops.weight.base import Packed

if TYPE_CHECKING:
    import torch

PER_EXPERT = ("words", "params", "scales", "channel_scales", "bias")
"""Tensors of a packed weight that each expert has of its own."""
MOST_EXPERTS = 1024
"""Their table, 8 bytes each, lies in shared memory beside the ring: schedules of all sizes leave it room."""
FAMILIES = tuple(dict.fromkeys(f"{one.module}.PackedWeight" for one in PRODUCTS))
_GROUPED = "/grouped"
"""Behind the version that a single weight's file has."""


@dataclass(frozen=True, eq=False)
class GroupedWeight(Sharded):
    """The packed weights of E experts, of one operator, shape and format. Build it with `stack`.

    Attributes:
        stacked: a PackedWeight whose tensors `PER_EXPERT` have a leading dimension E, for example words int32
            [E, Kp/128, Np/64, unit words] of W4A8. A smooth vector, or the order of W4Ax's channels, is shared by the
            experts.
    """

    stacked: Any

    @classmethod
    def stack(cls, experts: Sequence[Any]) -> GroupedWeight:
        """Stack the experts' PackedWeights; the tensors are copied.

        Raises:
            ArgumentError: no experts, too many, or experts that differ in anything but values.
        """
        import torch

        if not isinstance(experts, (list, tuple)):
            seen = weights.kind(experts)
            raise ArgumentError("experts", seen, "must be a list of packed weights", "pass [w.pack() for w in made]")
        check_experts(len(experts))
        for expert in experts:
            if not isinstance(expert, Packed) or type(expert) is not type(experts[0]):
                seen, constraint = weights.kind(expert), f"must all be of one kind, {' or '.join(FAMILIES)}"
                raise ArgumentError("experts", seen, constraint, "pack each expert")
        experts = type(experts[0]).alike(experts)
        first, fields = experts[0], {}
        for field in dataclasses.fields(first):
            values = [getattr(expert, field.name) for expert in experts]
            tensors = [torch.is_tensor(value) for value in values]
            if field.name == "perm" and any(tensors):
                raise ArgumentError("perm", "given", "experts share the order of x", "quantize without act-order")
            if any(tensors):
                forms = dict.fromkeys(_form(v) for v in values)
                shared = field.name not in PER_EXPERT and len(forms) == 1
                same = len(forms) == 1 and not (shared and any(not torch.equal(v, values[0]) for v in values))
                seen = "different values" if shared else " and ".join(list(forms)[:2])
            else:
                same = all(value == values[0] for value in values)
                seen = " and ".join(map(str, list(dict.fromkeys(values))[:2]))
            if not same:
                raise ArgumentError(field.name, seen, "must be the same for all experts", "pack the experts alike")
            fields[field.name] = torch.stack(values) if field.name in PER_EXPERT and any(tensors) else values[0]
        return cls(type(first)(**fields))

    def __len__(self) -> int:
        """The number of experts."""
        return self.stacked.words.shape[0]

    def __getitem__(self, expert: int) -> Any:
        """The PackedWeight of one expert; its tensors are views."""
        if isinstance(expert, bool) or not hasattr(expert, "__index__"):
            raise ArgumentError("expert", expert, "must be an integer", "take one expert at a time: w[0]")
        if not -len(self) <= expert < len(self):
            raise IndexError(f"expert {expert} is none of {len(self)}, which are from 0 to {len(self) - 1}")
        own = {name: t[expert] for name, t in weights.tensor_fields(self.stacked).items() if name in PER_EXPERT}
        return dataclasses.replace(self.stacked, **own)

    @property
    def n(self) -> int:
        """Output features of each expert."""
        return self.stacked.n

    @property
    def k(self) -> int:
        """Input features of each expert."""
        return self.stacked.k

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.stacked.device

    @property
    def nbytes(self) -> int:
        """Bytes of all experts' packed weights."""
        return self.stacked.nbytes

    def to(self, device: str | int | torch.device) -> GroupedWeight:
        """The same weights on another device."""
        return GroupedWeight(self.stacked.to(device))

    def save(self, path: str | Path) -> None:
        """Write one safetensors file. Atomic."""
        files.save(self.stacked, path, self.stacked.VERSION + _GROUPED)

    @classmethod
    def load(cls, make: type, path: str | Path, device: str | int | torch.device = "cpu") -> GroupedWeight:
        """Read the file `path` that `save` wrote, onto `device`; `make` is the PackedWeight class of its operator.

        Raises:
            ArgumentError: it is no such file. LayoutMismatchError: it was packed with another layout.
        """
        if not (isinstance(make, type) and issubclass(make, Packed) and hasattr(make, "VERSION")):
            raise ArgumentError("make", str(make), f"must be one of {FAMILIES}", "pass w4a16.PackedWeight")
        loaded = cls(files.load(make, path, device, make.VERSION + _GROUPED))
        loaded.check_stored()
        return loaded

    def check_stored(self) -> None:
        """Raise an error for what no weight has, of weights that come from a file."""
        self.stacked.check_facts()
        self.check()
        for expert in range(len(self)):
            self[expert].check_values()
        if self.stacked.bias is not None:
            weights.check_finite("bias", self.stacked.bias, "the file is damaged: get it again")

    def check(self) -> None:
        """Raise LayoutMismatchError or ArgumentError unless a kernel of this version can read the weights."""
        if not self.stacked.words.ndim:
            constraint = "must have a leading dimension, one of each expert"
            raise ArgumentError("words", weights.described(self.stacked.words), constraint, "stack the experts")
        check_experts(len(self))
        for name, tensor in weights.tensor_fields(self.stacked).items():
            if name in PER_EXPERT and (
                not tensor.ndim
                or tensor.shape[0] != len(self)
                or not tensor.is_contiguous()
                or tensor.device != self.device
            ):
                seen = f"{list(tensor.shape)} on {tensor.device}"
                constraint = f"must be contiguous [{len(self)}, ...] on {self.device}"
                raise ArgumentError(name, seen, constraint, "stack the experts")
            if name in PER_EXPERT and tensor.is_cuda and tensor.data_ptr() % 16:
                constraint = "must lie at a multiple of 16 bytes, which kernels copy at a time"
                raise ArgumentError(name, f"a tensor at {tensor.data_ptr():#x}", constraint, "clone it")
        if getattr(self.stacked, "perm", None) is not None:
            raise ArgumentError("perm", "given", "act-order weights are no experts", "call gemm for each expert")
        one = self[0]
        one.check_layout(one.expected_layout())
        one.check_sizes()
        weights.check_vectors(one)

    def reference(
        self, product: Callable[..., torch.Tensor], x: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """y [M, N] of the rows offsets[e] .. offsets[e + 1] - 1 of x for each expert e; rows of no expert are 0.

        Args:
            x: float [M, K]. offsets: int32 [E + 1]. bias: float [E, N], or None.
            product: called with rows of x, an expert's weight and its bias [N] or None.

        Raises:
            ArgumentError: offsets that do not ascend within 0..M.
        """
        import torch

        bounds = offsets.tolist()
        if not all(low <= high for low, high in pairwise([0, *bounds, len(x)])):
            constraint = f"must ascend from 0 or more to at most the {len(x)} rows of x"
            raise ArgumentError("expert_offsets", bounds[:9], constraint, "use moe.sort_by_expert")
        parts = [
            product(x[low:high], self[e], None if bias is None else bias[e])
            for e, (low, high) in enumerate(pairwise(bounds))
        ]
        y = torch.cat(parts)
        return torch.nn.functional.pad(y, (0, 0, bounds[0], len(x) - bounds[-1]))

    def __repr__(self) -> str:
        return f"GroupedWeight({len(self)} x {self[0]!r})"


def _form(value: Any) -> str:
    """What tensors that are stacked must have in common."""
    return "none" if value is None else f"{weights.dtype_name(value)} {list(value.shape)} on {value.device}"


def check_experts(experts: int) -> None:
    """Raise ArgumentError unless kernels can serve this many experts."""
    if type(experts) is not int or not 1 <= experts <= MOST_EXPERTS:
        raise ArgumentError("experts", experts, f"must be an integer, 1..{MOST_EXPERTS}", "split the experts")


def all_tokens(experts: int) -> tuple[int, ...]:
    """Tokens of all experts together, one of every bucket: fewer than there are experts, and so many for each."""
    few = (1 << power for power in range((experts - 1).bit_length()))
    return (*few, *(tokens * experts for tokens in launching.ALL_TOKENS))


def check_request(n: int, k: int, experts: int, group_size: int, groups: tuple[int, ...]) -> None:
    """What requests of a grouped GEMM are asked before anything is planned."""
    launching.check_shape(n, k)
    check_experts(experts)
    launching.check_group(group_size, k, groups)


def check_kind(w: Any, make: type | tuple[type, ...], operator: str) -> None:
    if not isinstance(w, GroupedWeight) or not isinstance(w.stacked, make):
        seen = weights.kind(getattr(w, "stacked", w))
        raise ArgumentError("w", seen, f"must be a GroupedWeight of {operator}", "stack packed weights")


def check_once(w: GroupedWeight) -> None:
    """`check`, noted on the words, which outlive a GroupedWeight around them, with all that it looked at."""
    s = w.stacked
    if w.__dict__.get("_checked") == s.words.data_ptr() and hasattr(s.words, "_terrazzo_checked"):
        return  # the same object
    seen = _facts(s)
    if getattr(w.stacked.words, "_terrazzo_checked", None) != seen:
        w.check()
        w.stacked.words._terrazzo_checked = seen
    w.__dict__["_checked"] = s.words.data_ptr()


def _facts(stacked: Any) -> tuple:
    """The fields of a weight, addresses in the place of tensors."""
    values = [getattr(stacked, name) for name in _names(type(stacked))]
    return (type(stacked).__name__, *(v.data_ptr() if hasattr(v, "data_ptr") else v for v in values))


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def check_traced(
    x: Any, held: Any, w: GroupedWeight, offsets: Any, bias: Any, bias_dtype: torch.dtype | None = None
) -> None:
    """What traced calls are asked, and those whose x (tensor `held`) is no plain tensor: the rest is an opaque node.

    `bias_dtype` None accepts any float.
    """
    import torch

    launching.check_tensor(held, "x", "[M, {}]", w.k)
    launching.check_no_grad(held, "grouped_gemm")
    check_rows(x.shape, w.k)
    launching.check_tensor(offsets, "expert_offsets", "int32 [{}]", w.stacked.words.shape[0] + 1)
    if torch.compiler.is_compiling():
        return  # the node checks the rest: torch.compile hides the words of an error that it meets
    if held is x:
        check_dtype(x)
    check_offsets(offsets, len(w), held.device)
    if bias is not None:
        check_bias(bias, len(w), w.n, bias_dtype, held.device)


def check_apart(out: torch.Tensor | None, **read: torch.Tensor | None) -> None:
    """Raise ArgumentError if the kernel itself writes to `out` (see `written_to`), and reads some of it."""
    if out is not None and not out.data_ptr() % 16:
        launching.check_apart(out, "out", **read)


def written_to(y: torch.Tensor) -> torch.Tensor:
    """What a kernel writes to in the place of y: kernels store 16 bytes at a time. A copy of y, whose rows of no expert
    come back as they were."""
    return launching.aligned_copy(y) if y.data_ptr() % 16 else y


def copy_out(out: torch.Tensor | None, y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """y of a traced operator, in `out` if that is given, whose rows of no expert keep what they held."""
    import torch

    if out is None:
        return y
    launching.check_out(out, y.shape, y.dtype, y.device)
    rows = torch.arange(y.shape[0], device=y.device)[:, None]
    return out.copy_(torch.where((rows >= offsets[0]) & (rows < offsets[-1]), y, out))


def check_rows(shape: Sequence[int], k: int) -> None:
    if len(shape) != 2 or shape[1] != k:
        raise ArgumentError("x", list(shape), f"must be [M, {k}], tokens sorted by expert", "see ops/moe.py")


def check_dtype(x: torch.Tensor) -> None:
    import torch

    if x.dtype not in (torch.float16, torch.bfloat16):
        dtype = weights.dtype_name(x)
        raise ArgumentError("x", dtype, "must be float16 or bfloat16", "cast the activations")


def check_offsets(offsets: torch.Tensor, experts: int, device: torch.device) -> None:
    """The values are not read: that would wait for the GPU. The kernel keeps them inside 0..M."""
    launching.check_tensor(offsets, "expert_offsets", "int32 [{}]", experts + 1)
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
    launching.check_tensor(bias, "bias", "{} [{}, {}]", dtype or "float", experts, n)
    if tuple(bias.shape) != (experts, n) or not bias.is_contiguous():
        seen = f"{list(bias.shape)} strides {list(bias.stride())}"
        raise ArgumentError("bias", seen, f"must be contiguous [{experts}, {n}]", "stack the experts' biases")
    launching.check_bias(bias.view(-1), experts * n, dtype, device)
