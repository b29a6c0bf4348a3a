"""Routing of tokens to experts and back, in torch operators that never wait for the GPU.

    routing = sort_by_expert(expert_ids, experts)        # expert_ids [T, top_k]
    h = grouped_gemm(gather(x, routing), w1, routing.offsets)
    ...
    y = combine(grouped_gemm(h, w2, routing.offsets), routing, gates)

A pick is one (token, slot) pair; there are T * top_k of them, whatever the ids are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.w4a8.activations import QuantizedActivations


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
        ArgumentError: ids that are no integers or not [T, top_k].
    """
    import torch

    if expert_ids.ndim != 2 or not weights.is_integer(expert_ids):
        seen = f"{weights.dtype_name(expert_ids)} {list(expert_ids.shape)}"
        raise ArgumentError("expert_ids", seen, "must be integers [T, top_k]", "pass topk(...).indices")
    ids, order = expert_ids.flatten().long().sort(stable=True)
    every = torch.arange(experts + 1, device=ids.device)
    positions = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return Routing(
        tokens=order // max(expert_ids.shape[1], 1),
        positions=positions.view(expert_ids.shape),
        offsets=torch.searchsorted(ids, every).int(),
    )


def gather(x: torch.Tensor | QuantizedActivations, routing: Routing) -> torch.Tensor | QuantizedActivations:
    """The rows of x [T, K], one for each pick, sorted by expert: [P, K]. Quantized rows are quantized once."""
    import torch

    if torch.is_tensor(x):
        return x.index_select(0, routing.tokens)
    own = {name: getattr(x, name).index_select(0, routing.tokens) for name in ("q", "scales", "row_sums")}
    return replace(x, **own, shape=(len(routing.tokens), x.k))


def combine(y: torch.Tensor, routing: Routing, gates: torch.Tensor) -> torch.Tensor:
    """out[t] = sum over slots j, in order, of gates[t, j] * y[positions[t, j]], in float32 and rounded once.

    A pick whose gate is 0 adds nothing, whatever its row holds (rows of no expert are never written).

    Args:
        y: [P, N], rows sorted by expert. gates: [T, top_k].

    Returns:
        [T, N] in y's dtype; the same bits in every run, since nothing is added atomically.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    import torch

    if gates.shape != routing.positions.shape:
        raise ArgumentError(
            "gates", list(gates.shape), f"must be {list(routing.positions.shape)}", "pass a gate for each pick"
        )
    if y.ndim != 2 or len(y) != len(routing.tokens):
        raise ArgumentError("y", list(y.shape), f"must be [{len(routing.tokens)}, N]", "pass a row for each pick")
    total = torch.zeros(len(gates), y.shape[1], dtype=torch.float32, device=y.device)
    for slot in range(gates.shape[1]):
        gate = gates[:, slot, None].float()
        rows = y.index_select(0, routing.positions[:, slot]).float()
        total = torch.where(gate == 0, total, torch.addcmul(total, gate, rows))
    return total.to(y.dtype)
