"""`Experts`: a mixture's feed-forward layers, each product one launch for the tokens of all experts."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn import glue, products
from terrazzo.nn.formats import Format
from terrazzo.nn.joined import join
from terrazzo.nn.module import PackedModule
from terrazzo.ops import moe, weights
from terrazzo.ops import stored_layers as stored
from terrazzo.ops.grouped import GroupedWeight
from torch import nn

if TYPE_CHECKING:
    from terrazzo.nn.joined import Option
    from terrazzo.ops.weight.base import AnyCanonical as Canonical
    from terrazzo.ops.weight.base import AnyPacked as Packed

    Weights = Sequence[Packed | Canonical]
    from terrazzo.lowering.targets import Target


class GroupedLinear(PackedModule):
    """y[i] = x[i] w[e]^T + bias[e] for rows sorted by expert.

    Args:
        packed: GroupedWeight of E experts.
    """

    def __init__(self, packed: GroupedWeight) -> None:
        if not isinstance(packed, GroupedWeight):
            remedy = "use GroupedWeight.stack"
            raise ArgumentError("packed", type(packed).__name__, "must be a GroupedWeight", remedy)
        super().__init__(packed)

    def forward(
        self, x: products.Activations, offsets: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """y [M, N] in out_dtype of x [M, K], float or quantized; offsets: int32 [E + 1].

        See `ops.w4a16.grouped_gemm`.
        """
        x = products.autocast(x)
        found = self.on_cpu(x, out_dtype, offsets)
        return products.grouped_gemm(x, self.packed, offsets, out_dtype) if found is None else found


class Experts(nn.Module):
    """The experts of a layer: the router's choice in, the weighted sum of their outputs out.

    Args:
        gate_up: GroupedWeight of the joined gate and up projections. down: of the down projections.
        activation: key of `glue.ACTIVATIONS`.

    Raises:
        ArgumentError: numbers of experts or sizes that do not fit.
    """

    def __init__(self, gate_up: GroupedWeight, down: GroupedWeight, activation: str = "silu") -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = GroupedLinear(gate_up), GroupedLinear(down)
        if len(gate_up) != len(down) or gate_up.n != 2 * down.k:
            seen = f"{len(down)} experts of {down.k} features beside {len(gate_up)} of {gate_up.n}"
            raise ArgumentError("down", seen, "must take what gate and up give", "stack the same experts")
        self.activation = known_activation(activation)

    @classmethod
    def stack(cls, gates: Weights, ups: Weights, downs: Weights, activation: str = "silu") -> Experts:
        """Of each expert's packed or canonical weights. Experts of which only some have zero points stack: 8 (of 8
        bits: 128) is given to the others.

        Raises:
            ArgumentError: experts that differ in anything but values; act-order, as experts share the order of x.
        """
        given = {"gates": gates, "ups": ups, "downs": downs}
        for name, each in given.items():
            _check_experts(name, each)
            if len(each) != len(gates):
                raise ArgumentError(
                    name, len(each), f"must be {len(gates)} experts, as gates", "stack the same experts"
                )
        joined = [join([gate, up]) for gate, up in zip(gates, ups)]
        return cls.of_packed(joined, [join([each]) for each in downs], activation)

    @classmethod
    def of_packed(cls, gate_up: Weights, down: Weights, activation: str = "silu") -> Experts:
        """Of each expert's packed weights: gate_up [2 I, hidden] joined, down [hidden, I]; activation: see `stack`."""
        for name, each in (("gate_up", gate_up), ("down", down)):
            _check_experts(name, each)
        return cls(GroupedWeight.stack(list(gate_up)), GroupedWeight.stack(list(down)), activation)

    @classmethod
    def from_float(
        cls,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        format: str | Format = "w4a16-g128",
        activation: str = "silu",
        **options: Option,
    ) -> Experts:
        """Quantize experts one by one.

        Args:
            gate_up: float [E, 2 I, hidden], gate before up. down: float [E, hidden, I].
            format: see `Format.parse`. activation: "silu" or another of `ops.activation`.
            options: of the family's `quantize`.

        Raises:
            ArgumentError: an unknown format, values or sizes that cannot be quantized.
        """
        for name, each in (("gate_up", gate_up), ("down", down)):
            _check_experts(name, each, "pass float [E, N, K]")
        make = Format.parse(format).quantize_experts
        return cls.of_packed(make(gate_up, **options), make(down, **options), activation)

    @classmethod
    def from_gpt_oss(
        cls,
        gate_up: Sequence[torch.Tensor],
        down: Sequence[torch.Tensor],
        target: Target | str | None = None,
        *,
        activations: str | None = None,
    ) -> Experts:
        """gpt-oss's experts as published in MXFP4: interleaved gate and up, biases, SwiGLU with its bound of 7.

        Args:
            gate_up: blocks uint8 [E, 2 I, hidden / 32, 16], scales uint8 [E, 2 I, hidden / 32], bias [E, 2 I].
            down: the same of [E, hidden, I]. target: to pack for; None takes the tensors' device.
            activations: "e4m3" quantizes them for each product, with a scale for each token; "mxfp8" with one for each
                32 channels; None keeps 16 bits.

        Raises:
            ArgumentError: see `ops.mxfp4.from_gpt_oss`, and `ops.mxfp4_fp8`.
        """
        make = import_module(f"terrazzo.ops.{stored.of_mxfp4(activations).module}").from_gpt_oss
        return cls(make(*gate_up, gate_up="interleaved", target=target), make(*down, target=target), "swiglu_oai")

    def __len__(self) -> int:
        return self.gate_up_proj._facts["experts"]

    def forward(self, x: torch.Tensor, expert_ids: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """[T, hidden]: the sum over slots j of gates[t, j] times expert expert_ids[t, j] of x[t].

        Args:
            x: float16 or bfloat16 [T, hidden]. expert_ids: integers [T, top_k]. gates: float [T, top_k].
        """
        x, kind = products.autocast(x), x.device.type
        if torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return self(x, expert_ids, gates)
        routing = moe.sort_by_expert(expert_ids, len(self))
        rows = moe.gather(products.quantize(x, self.gate_up_proj.packed), routing)
        return moe.combine(self.of_sorted(rows, routing.offsets, x.dtype), routing, gates)

    def of_sorted(self, rows: products.Activations, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Each expert's outputs [P, hidden] in `dtype`, without weights, of rows sorted by expert.

        Args:
            rows: [P, hidden], as `products.quantize` gives them. offsets: int32 [E + 1], first row of each expert.
        """
        h = self.gate_up_proj(rows, offsets, dtype)
        return self.down_proj(products.gated(h, self.activation, self.down_proj), offsets, dtype)


def _check_experts(name: str, given: object, remedy: str = "pass a list with the weight of each expert") -> None:
    sized = (isinstance(given, torch.Tensor) and given.dim()) or isinstance(given, list | tuple)
    if not sized or not len(given):
        seen = weights.described(given) if torch.is_tensor(given) or not sized else []
        raise ArgumentError(name, seen, "must hold one expert or more", remedy)


def known_activation(name: str) -> str:
    """The name, where a gated form of it exists; else an ArgumentError."""
    if not isinstance(name, str) or name not in glue.ACTIVATIONS:
        raise ArgumentError("activation", name, f"must be one of {tuple(glue.ACTIVATIONS)}", "keep this layer in float")
    return name
