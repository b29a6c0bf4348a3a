"""What searches share: rows of a weight, some at a time, the best of what was tried, division that rounds once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 25}


def row_chunks(n: int, k: int, device: str) -> list[slice]:
    """Slices of rows that hold at most `_CHUNK` weights each."""
    rows = max(1, _CHUNK.get(device, _CHUNK["cuda"]) // k)
    return [slice(lo, min(lo + rows, n)) for lo in range(0, n, rows)]


def best_of(tried: Iterable[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Of (errors [...], values [...] or [..., g], ...) tried, each value of the least error; of equals the first."""
    import torch

    best: list[torch.Tensor] = []
    for found in tried:
        if not best:
            best = list(found)
            continue
        better = found[0] < best[0]
        masks = [better if value.ndim == better.ndim else better[..., None] for value in found]
        best = [torch.where(*each) for each in zip(masks, found, best, strict=True)]
    return best[1:]


def divide(values: torch.Tensor, number: float) -> torch.Tensor:
    """values / number, rounded once: on CUDA, division by a Python number multiplies with its rounded reciprocal."""
    return values / values.new_full((), number)
