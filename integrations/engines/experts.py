"""4-bit experts of an engine's layers: how checkpoints store them, what a loader fills, and packed weights of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from terrazzo.integrations.engines import weights
from terrazzo.integrations.engines.weights import Stored, Wanted

if TYPE_CHECKING:
    from terrazzo.ops.quantized import QuantizedActivations


@dataclass(frozen=True)
class Form:
    """How a checkpoint stores experts.

    Attributes:
        convention: "awq", "gptq", "packed" (compressed-tensors, words) or "bytes" (compressed-tensors, int8).
        group_size: -1 is one group. zero_points: whether there are some. activations: key of `weights.ACTIVATIONS`.
    """

    convention: str
    group_size: int
    zero_points: bool = False
    activations: str = "16"

    @property
    def turned(self) -> bool:
        """Whether input features come first."""
        return self.convention in ("awq", "gptq")

    def wanted(self, hidden: int, inner: int, whole_inner: int, experts: int, dtype: str) -> tuple[Wanted, Wanted]:
        """(gate and up, down) of a rank: hidden and inner features, inner ones of all ranks."""
        weight = "int4" if self.convention == "bytes" else "uint4" if self.zero_points else "uint4b8"
        facts = dict(
            zero_points=self.zero_points, act_order=False, dtype=dtype, activations=self.activations, weight=weight,
            experts=experts,
        )  # fmt: skip
        group = lambda k: k if self.group_size == -1 else self.group_size
        return (
            Wanted(n=2 * inner, k=hidden, full_k=hidden, group_size=group(hidden), **facts),
            Wanted(n=hidden, k=inner, full_k=whole_inner, group_size=group(inner), **facts),
        )

    def tensors(self, n: int, k: int, dtype: torch.dtype) -> Iterator[tuple[str, tuple[int, int], torch.dtype]]:
        """(name, shape, dtype) of the tensors of an expert [n, k], as the checkpoint has them."""
        groups = 1 if self.group_size == -1 else k // self.group_size
        sided = lambda rows, columns: (columns, rows) if self.turned else (rows, columns)
        if self.convention == "bytes":
            yield "weight", sided(n, k), torch.int8
        elif self.convention == "awq":
            yield "qweight", sided(n // 8, k), torch.int32
        else:
            yield "qweight" if self.turned else "weight_packed", sided(n, k // 8), torch.int32
        yield "scales" if self.turned else "weight_scale", sided(n, groups), dtype
        if self.turned or self.zero_points:
            yield "qzeros" if self.turned else "weight_zero_point", sided(n // 8, groups), torch.int32

    def beside(self, k: int) -> dict[str, tuple[int, ...]]:
        """int32 tensors of an expert that loaders fill and nothing reads: name -> shape."""
        return {"gptq": {"g_idx": (k,)}, "packed": {"weight_shape": (2,)}}.get(self.convention, {})

    def stored(self, get: Callable[[str], torch.Tensor]) -> Stored:
        """Loaded tensors [E, ...] of `tensors`, by name."""
        if self.convention == "awq":
            return weights.from_awq(get("qweight"), get("scales"), get("qzeros") if self.zero_points else None)
        if self.convention == "gptq":
            return weights.from_gptq(get("qweight"), get("scales"))
        zeros = get("weight_zero_point").flatten(0, 1) if self.zero_points else None
        codes = get("weight" if self.convention == "bytes" else "weight_packed")
        return Stored(codes.flatten(0, 1), get("weight_scale").flatten(0, 1), zeros)


def moved(made: QuantizedActivations, q: torch.Tensor, tokens: torch.Tensor) -> QuantizedActivations:
    """Quantized activations of sorted rows: codes `q` that are sorted already, and what else belongs to `tokens`."""
    held = {name: getattr(made, name) for name in ("scales", "row_sums", "zeros")}
    sorted_ = {name: each.index_select(0, tokens) for name, each in held.items() if each is not None}
    return replace(made, q=q.view(made.q.dtype), **sorted_, shape=(len(tokens), made.k))
