"""Quantized activations as products read them, whichever kernel makes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from terrazzo.ops import weights

if TYPE_CHECKING:
    import torch

CODES = {"int8": "int8", "e4m3": "float8_e4m3fn"}
"""Form of quantized activations -> dtype of their codes."""
ALIGNMENT = 16
"""Columns that rows of q are padded to: rows of 16 bytes."""


@dataclass(frozen=True, eq=False)
class QuantizedActivations:
    """Activations x ~= q * scales (times the smooth vector that they were divided by), per token, symmetric.

    Attributes:
        q: int8 [M, K16], -127..127, or float8_e4m3fn, -448..448; K16 = K rounded up to 16, columns from K on are 0.
        scales: float32 [M].
        row_sums: int32 [M], sum of q over a row; 128 times it is what an unsigned weight adds to a product. e4m3: None.
        shape: of the activations, [..., K]; M is the product of the leading dimensions.
    """

    q: torch.Tensor
    scales: torch.Tensor
    row_sums: torch.Tensor | None
    shape: tuple[int, ...]

    @property
    def k(self) -> int:
        """Input features K."""
        return self.shape[-1]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.q.device

    @property
    def codes(self) -> str:
        """Form of q: "int8" or "e4m3"."""
        return "e4m3" if self.q.dtype.is_floating_point else "int8"

    def dequantize(self) -> torch.Tensor:
        """float32 [..., K]: q * scales."""
        return (self.q[:, : self.k].float() * self.scales[:, None]).view(self.shape)

    def check(self) -> None:
        """Raise ArgumentError unless the tensors have the shapes and dtypes of the attributes' description."""
        m, k = prod(self.shape[:-1]), padded(self.k)
        expected = [("q", (m, k), CODES[self.codes]), ("scales", (m,), "float32")]
        if self.codes == "int8":
            expected.append(("row_sums", (m,), "int32"))
        for name, shape, dtype in expected:
            weights.check_tensor(self, name, shape, dtype, "quantize them with quantize_activations")

    def of_tokens(self, rows: torch.Tensor) -> QuantizedActivations:
        """Those of some tokens, [P, K]: row rows[i] of each tensor becomes row i."""
        self.check()
        held = ("q", "scales", *(["row_sums"] if self.row_sums is not None else []))
        own = {name: getattr(self, name).index_select(0, rows) for name in held}
        return replace(self, **own, shape=(len(rows), self.k))

    def __repr__(self) -> str:
        return f"QuantizedActivations({list(self.shape)})"


def padded(k: int) -> int:
    """K16: columns of q for K input channels."""
    return -(-k // ALIGNMENT) * ALIGNMENT


def empty(shape: tuple[int, ...], device: torch.device, codes: str) -> QuantizedActivations:
    """Activations of this shape with nothing in them."""
    import torch

    m = prod(shape[:-1])
    q = torch.empty((m, padded(shape[-1])), dtype=getattr(torch, CODES[codes]), device=device)
    sums = torch.empty(m, dtype=torch.int32, device=device) if codes == "int8" else None
    return QuantizedActivations(q, torch.empty(m, dtype=torch.float32, device=device), sums, shape)
