"""The kernel of rotary positions for a call: checks, launch, and requests for ahead-of-time compilation."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops import launching, row_calls, weights
from terrazzo.ops.rope import program
from terrazzo.ops.tiles import heads as tiles

if TYPE_CHECKING:
    import torch


@lru_cache(maxsize=256)
def plan(
    head_dim: int, *, rotary_dim: int, layout: str, dtype: str, norm: str, numerics: str, positions: str,
    target: Target, device: Target | None = None,
) -> KernelRequest:  # fmt: skip
    """The kernel for heads of `head_dim`, any number of them and of tokens; the rest is as in program.build."""
    params = dict(
        head_dim=head_dim, rotary_dim=rotary_dim, layout=layout, dtype=dtype, norm=norm, numerics=numerics,
        positions=positions,
    )  # fmt: skip
    flags = launching.ptx_flags(target, device)
    entry = f"{program.__name__}:build"
    return KernelRequest("rope.apply_rope", entry, tuple(params.items()), target, program.PASS_CONFIGS, flags)


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
    check_choices(head_dim, rotary, layout, dtype, norm, numerics)
    row_calls.check_choice("positions", positions, ("none", "int32", "int64"))
    at, device = launching.requested_targets(target)
    facts = dict(layout=layout, dtype=dtype, norm=norm, numerics=numerics, positions=positions)
    return [plan(head_dim, rotary_dim=rotary, **facts, target=at, device=device)]


def check_choices(head_dim: int, rotary_dim: int, layout: str, dtype: str, norm: str, numerics: str) -> None:
    """Raise ArgumentError unless a kernel serves these choices."""
    row_calls.check_choice("qkv", dtype, row_calls.DTYPES)
    row_calls.check_choice("layout", layout, tiles.LAYOUTS)
    row_calls.check_choice("norm", norm, tiles.NORMS)
    row_calls.check_choice("numerics", numerics, tiles.NUMERICS)
    for name, value, most in (("head_dim", head_dim, tiles.MOST_DIMS), ("rotary_dim", rotary_dim, head_dim)):
        if type(value) is not int or value % 16 or not 0 < value <= most:
            raise ArgumentError(name, value, f"must be a multiple of 16 up to {most}", "pass that of the model")


def check_operands(
    qkv: Any, cos: Any, sin: Any, positions: Any, q_weight: Any, k_weight: Any, heads: int, kv_heads: int,
    head_dim: int, rotary_dim: int, norm: str, eps: float,
) -> None:  # fmt: skip
    """Raise ArgumentError unless tensors fit each other."""
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


def run(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    layout: str,
    norm: str,
    eps: float,
    numerics: str,
    target: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The eager path of a call whose operands and choices were checked: q, k."""
    m, index = len(qkv), qkv.get_device()
    q, k = (qkv.new_empty((m, count, head_dim)) for count in (heads, kv_heads))
    kind = "none" if positions is None else str(positions.dtype)[6:]
    key = (index, qkv.dtype, head_dim, rotary_dim, layout, norm, numerics, kind, target)
    found = _kernels.get(key) or _prepare(key, qkv)
    if m == 0 or heads + kv_heads == 0:
        return q, k
    _, _, no_positions, no_weight = found
    if qkv.stride(1) != 1 or qkv.stride(0) != qkv.shape[1] or qkv.data_ptr() % 16 or qkv.shape[1] % 8:
        qkv = launching.aligned_copy(qkv[:, : (heads + kv_heads) * head_dim])
    cos, sin = (_table(t, rotary_dim) for t in (cos, sin))
    vectors = [no_weight if w is None else row_calls.vector(w) for w in (q_weight, k_weight)]
    where = no_positions if positions is None else positions.contiguous()
    args = (qkv, where, cos, sin, *vectors, q.view(m, -1), k.view(m, -1), heads, kv_heads, eps)
    launching.launch(_kernels, key, found, args)
    return q, k


_kernels: dict[tuple, tuple] = {}


def _table(t: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Rows of a table at multiples of 16 bytes."""
    if t.is_contiguous() and t.shape[1] % 4 == 0 and t.data_ptr() % 16 == 0:
        return t
    return launching.aligned_copy(t[:, : rotary_dim // 2])


def _prepare(key: tuple, qkv: torch.Tensor) -> tuple:
    """Kernel, its launcher and stand-ins for what is not there; kept."""
    import torch

    _, _, head_dim, rotary_dim, layout, norm, numerics, kind, target = key
    launching.check_tokens(max(1, len(qkv)))
    at, device = launching.targets(target, qkv.device, "qkv")
    request = plan(
        head_dim, rotary_dim=rotary_dim, layout=layout, dtype=weights.dtype_name(qkv), norm=norm, numerics=numerics,
        positions=kind, target=at, device=device,
    )  # fmt: skip
    stand_ins = (), (torch.int32, qkv.dtype)
    found = _kernels[key] = row_calls.prepare(request, len(qkv), "rope.apply_rope", qkv.device, *stand_ins)
    return found
