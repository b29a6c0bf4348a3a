"""Routing of tokens to experts and back, in torch operators that never wait for the GPU.

    routing = sort_by_expert(expert_ids, experts)        # expert_ids [T, top_k]
    h = grouped_gemm(gather(x, routing), w1, routing.offsets)
    ...
    y = combine(grouped_gemm(h, w2, routing.offsets), routing, gates)

A pick is one (token, slot) pair; there are T * top_k of them, whatever the ids are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import launching, weights

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.quantized import QuantizedActivations


__all__ = [
    "Routing",
    "combine",
    "gather",
    "sort_by_expert",
]


def __dir__() -> list[str]:
    return sorted(__all__)


@dataclass(frozen=True, eq=False)
class Routing:
    """Where each pick goes. P = T * top_k.

    Attributes:
        tokens: int64 [P], the token of each sorted row.
        positions: int64 [T, top_k], the sorted row of each pick; the inverse.
        offsets: int32 [E + 1], first sorted row of each expert.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    offsets: torch.Tensor


def sort_by_expert(expert_ids: torch.Tensor, experts: int) -> Routing:
    """Sort picks by expert, stably: picks of one expert stay in the order of their tokens.

    Args:
        expert_ids: integers [T, top_k], 0..experts-1. A pick outside (of an expert that lives elsewhere, say) lies
            before offsets[0] or from offsets[E] on: no expert owns it, and `combine` must give it no weight.
        experts: E.

    Raises:
        ArgumentError: ids that are no integers or not [T, top_k]; experts that are no positive number.
    """
    import torch

    launching.check_tensor(expert_ids, "expert_ids", "integers [T, top_k]")
    weights.check_count("experts", experts, "pass the number of experts")
    if not expert_ids.is_meta:  # shapes alone may be asked for
        weights.check_dense("expert_ids", expert_ids)
    if expert_ids.ndim != 2 or not weights.is_integer(expert_ids):
        seen = f"{weights.dtype_name(expert_ids)} {list(expert_ids.shape)}"
        raise ArgumentError("expert_ids", seen, "must be integers [T, top_k]", "pass topk(...).indices")
    if expert_ids.numel() >= launching.LARGEST:
        constraint = f"must have less than {launching.LARGEST} picks"
        raise ArgumentError("expert_ids", list(expert_ids.shape), constraint, "route fewer tokens at a time")
    ids, order = expert_ids.flatten().long().sort(stable=True)
    every = torch.arange(experts + 1, device=ids.device)
    positions = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return Routing(
        tokens=order // max(expert_ids.shape[1], 1),
        positions=positions.view(expert_ids.shape),
        offsets=torch.searchsorted(ids, every).int(),
    )


def gather(x: torch.Tensor | QuantizedActivations, routing: Routing) -> torch.Tensor | QuantizedActivations:
    """The rows of x [T, K], float or quantized, one for each pick, sorted by expert: [P, K]. Rows are quantized once.

    Raises:
        ArgumentError: x is not of the T tokens that the routing is of, or lies elsewhere.
    """
    _check_routing(routing)
    quantized = hasattr(x, "of_tokens")
    if not quantized:
        launching.check_tensor(x, "x", "[T, K], or QuantizedActivations of w4a8")
    tokens = len(routing.positions)
    if len(x.shape) != 2 or x.shape[0] != tokens or x.device != routing.tokens.device:
        seen, constraint = f"{list(x.shape)} on {x.device}", f"must be [{tokens}, K] on {routing.tokens.device}"
        raise ArgumentError("x", seen, constraint, "pass the tokens that were routed")
    return x.of_tokens(routing.tokens) if quantized else x.index_select(0, routing.tokens)


def combine(y: torch.Tensor, routing: Routing, gates: torch.Tensor) -> torch.Tensor:
    """out[t] = sum over slots j, in order, of gates[t, j] * y[positions[t, j]], in float32 and rounded once.

    A pick whose gate is 0 adds nothing, whatever its row holds (rows of no expert are never written).

    Args:
        y: [P, N], rows sorted by expert. routing: of `sort_by_expert`. gates: [T, top_k].

    Returns:
        [T, N] in y's dtype; the same bits in every run, since nothing is added atomically.

    Raises:
        ArgumentError: shapes, dtypes or devices that do not fit.
    """
    import torch

    _check_routing(routing)
    picks, device = list(routing.positions.shape), routing.positions.device
    for name, given, shape in (("gates", gates, picks), ("y", y, [len(routing.tokens)])):
        what = "float [{}, {}]" if name == "gates" else "float [{}, N]"
        launching.check_tensor(given, name, what, *shape)
        fits = list(given.shape) == picks if name == "gates" else given.ndim == 2 and len(given) == len(routing.tokens)
        if not fits or not given.dtype.is_floating_point or given.device != device:
            seen = f"{weights.dtype_name(given)} {list(given.shape)} on {given.device}"
            remedy = "pass a gate for each pick" if name == "gates" else "pass a row for each pick"
            raise ArgumentError(name, seen, f"must be {what.format(*shape)} on {device}", remedy)
    total = torch.zeros(len(gates), y.shape[1], dtype=torch.float32, device=y.device)
    for slot in range(gates.shape[1]):
        gate = gates[:, slot, None].float()
        rows = y.index_select(0, routing.positions[:, slot]).float()
        total = torch.where(gate == 0, total, torch.addcmul(total, gate, rows))
    return total.to(y.dtype)


def _check_routing(routing: Routing) -> None:
    if not isinstance(routing, Routing):
        raise ArgumentError("routing", type(routing).__name__, "must be a Routing", "make one with sort_by_expert")
