"""Rows of a weight, some at a time, and division that rounds once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 25}


def row_chunks(n: int, k: int, device: str) -> list[slice]:
    """Slices of rows that hold at most `_CHUNK` weights each."""
    rows = max(1, _CHUNK.get(device, _CHUNK["cuda"]) // k)
    return [slice(lo, min(lo + rows, n)) for lo in range(0, n, rows)]


def divide(values: torch.Tensor, number: float) -> torch.Tensor:
    """values / number, rounded once: on CUDA, division by a Python number multiplies with its rounded reciprocal."""
    return values / values.new_full((), number)
