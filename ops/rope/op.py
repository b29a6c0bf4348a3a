"""The kernel of rotary positions for a call: choices, checks, launch, and requests for ahead-of-time compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, row_calls, weights
from terrazzo.ops.rope import program
from terrazzo.ops.tiles import heads as tiles

if TYPE_CHECKING:
    from types import ModuleType

    import torch


class Call(NamedTuple):
    """Arguments of `apply_rope`."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    layout: str
    norm: str
    eps: float
    numerics: str
    target: str | None = None

    @property
    def choices(self) -> Choices:
        """Of its kernel."""
        positions = "none" if self.positions is None else str(getattr(self.positions, "dtype", ""))[6:]
        facts = self.head_dim, self.rotary_dim, self.layout, weights.dtype_name(self.qkv), self.norm, self.numerics
        return Choices(*facts, positions)


@dataclass(frozen=True)
class Choices(row_calls.Choices):
    """What chooses a kernel, for any number of heads and tokens; as in program.build."""

    NAME: ClassVar[str] = "rope.apply_rope"
    PROGRAM: ClassVar[ModuleType] = program
    head_dim: int
    rotary_dim: int
    layout: str = "neox"
    dtype: str = "float16"
    norm: str = "none"
    numerics: str = "fused"
    positions: str = "none"

    def check(self) -> None:
        """Raise ArgumentError unless a kernel serves these choices; `positions` is the operands' concern."""
        row_calls.check_choice("qkv", self.dtype, row_calls.DTYPES)
        row_calls.check_choice("layout", self.layout, tiles.LAYOUTS)
        row_calls.check_choice("norm", self.norm, tiles.NORMS)
        row_calls.check_choice("numerics", self.numerics, tiles.NUMERICS)
        sizes = ("head_dim", self.head_dim, tiles.MOST_DIMS), ("rotary_dim", self.rotary_dim, self.head_dim)
        for name, value, most in sizes:
            if type(value) is not int or value % 16 or not 0 < value <= most:
                raise ArgumentError(name, value, f"must be a multiple of 16 up to {most}", "pass that of the model")


def kernel_requests(
    head_dim: int,
    *,
    rotary_dim: int | None = None,
    layout: str = "neox",
    dtype: str = "float16",
    norm: str = "none",
    numerics: str = "fused",
    positions: str = "none",
    target: Target | str,
) -> list[KernelRequest]:
    """The kernel of `apply_rope`, one for all numbers of heads and tokens. Needs no GPU.

    Args:
        rotary_dim: None for head_dim. dtype: of qkv. positions: their dtype, "int32" or "int64"; "none" without.
        layout, norm, numerics: as in the call.
        target: an architecture is the program's, which the GPU here runs if it can; a device, a Target stand for both.

    Raises:
        ArgumentError: a value that no kernel serves. TargetError: an unknown target.
    """
    rotary = head_dim if rotary_dim is None else rotary_dim
    row_calls.check_choice("positions", positions, program.POSITIONS)
    return Choices(head_dim, rotary, layout, dtype, norm, numerics, positions).requests(1, target)


def check(call: Call) -> None:
    """Raise ArgumentError unless tensors fit each other, and a kernel serves the choices."""
    qkv, cos, sin, positions, q_weight, k_weight, heads, kv_heads, head_dim, rotary_dim, _, norm, eps, *_ = call
    launching.check_tensor(qkv, "qkv", "[T, (heads + 2 kv_heads) * head_dim]")
    call.choices.check()
    row_calls.check_rows(qkv, "apply_rope", "qkv", "[T, (heads + 2 kv_heads) * head_dim]")
    for name, value in (("heads", heads), ("kv_heads", kv_heads)):
        if type(value) is not int or value < 0:
            raise ArgumentError(name, value, "must be a number of heads", "pass that of the model")
    needed = (heads + kv_heads) * head_dim
    if qkv.ndim != 2 or qkv.shape[1] < needed:
        raise ArgumentError("qkv", list(qkv.shape), f"must be [T, {needed} or more]", "join q, k and v by token")
    for name, table in (("cos", cos), ("sin", sin)):
        launching.check_tensor(table, name, "float32 [P, rotary_dim / 2]")
        fits = table.ndim == 2 and table.shape[1] >= rotary_dim // 2 and table.shape == cos.shape
        if not fits or weights.dtype_name(table) != "float32" or table.device != qkv.device:
            seen = f"{weights.described(table)} on {table.device}"
            constraint = f"must be float32 [P, {rotary_dim // 2} or more] on {qkv.device}, cos as sin"
            raise ArgumentError(name, seen, constraint, "make tables of angles in float32")
    if positions is None:
        if len(cos) < len(qkv):
            constraint = f"must have a row for each of the {len(qkv)} tokens where no positions are given"
            raise ArgumentError("cos", list(cos.shape), constraint, "pass positions")
    else:
        launching.check_tensor(positions, "positions", "int32 or int64 [T]")
        kind = weights.dtype_name(positions)
        if tuple(positions.shape) != (len(qkv),) or kind not in ("int32", "int64") or positions.device != qkv.device:
            seen = f"{weights.described(positions)} on {positions.device}"
            constraint = f"must be int32 or int64 [{len(qkv)}] on {qkv.device}"
            raise ArgumentError("positions", seen, constraint, "pass a position for each token")
    for name, vector in (("q_weight", q_weight), ("k_weight", k_weight)):
        if (vector is None) != (norm == "none"):
            seen = None if vector is None else "given"
            raise ArgumentError(name, seen, f"does not go with norm={norm!r}", "pass norm and both weights, or none")
        if vector is not None:
            row_calls.check_vector(vector, name, (head_dim,), qkv.device)
            if vector.dtype != qkv.dtype:
                constraint = f"must be {weights.dtype_name(qkv)}, as qkv"
                raise ArgumentError(name, weights.dtype_name(vector), constraint, "cast it")
    launching.check_eps(eps)


def run(call: Call, new: bool = False) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(q, k); None for a call whose equal was not launched before.

    Args:
        new: whether the call was checked, so that it is launched in any case.
    """
    import torch

    qkv, cos, sin, positions, q_weight, k_weight, heads, kv_heads, head_dim, rotary_dim, *_, eps, _, _ = call
    try:
        grad = qkv.requires_grad
        if not new and (type(qkv) is not torch.Tensor or not qkv.is_cuda or grad or torch.compiler.is_compiling()):
            return None
        m, width = qkv.shape[0], qkv.shape[1]
        key = (
            Call, row_calls.seen(qkv, qkv.shape[1:]), row_calls.seen(cos, cos.shape[1:]),
            row_calls.seen(sin, sin.shape == cos.shape),
            len(cos) >= m if positions is None else row_calls.seen(positions, positions.shape == (m,)),
            q_weight is not None and row_calls.seen(q_weight), k_weight is not None and row_calls.seen(k_weight),
            *map(type, call[6:10]), type(eps), *call[6:],
        )  # fmt: skip
        found = row_calls.ready.get(key)
    except row_calls.UNFIT:
        if new:
            raise
        return None
    if found is None:
        if not new:
            return None
        found = row_calls.prepare(key, m, call.choices, qkv, call.target, torch.int32, qkv.dtype)
    q, k = qkv.new_empty((m, heads, head_dim)), qkv.new_empty((m, kv_heads, head_dim))
    if m == 0 or heads + kv_heads == 0:
        return q, k
    *_, no_positions, no_weight = found
    if qkv.stride(1) != 1 or qkv.stride(0) != width or qkv.data_ptr() % 16 or width % 8:
        qkv = launching.aligned_copy(qkv[:, : (heads + kv_heads) * head_dim])
    args = (
        qkv, no_positions if positions is None else positions.contiguous(), _table(cos, rotary_dim),
        _table(sin, rotary_dim), no_weight if q_weight is None else row_calls.vector(q_weight),
        no_weight if k_weight is None else row_calls.vector(k_weight), q.view(m, -1), k.view(m, -1), heads, kv_heads,
        eps,
    )  # fmt: skip
    launching.launch(row_calls.ready, key, found, args)
    return q, k


def _table(t: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Rows of a table at multiples of 16 bytes."""
    if t.is_contiguous() and t.shape[1] % 4 == 0 and t.data_ptr() % 16 == 0:
        return t
    return launching.aligned_copy(t[:, : rotary_dim // 2])
