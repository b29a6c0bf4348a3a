"""The comparison run of W4A8's pipelines: rows of autotune's, with a column for each way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from terrazzo.ablation.w4a8 import op
from terrazzo.autotune.gemm_bench import OURS
from terrazzo.autotune.w4a8_bench import W4A8Settings, W4A8Shape
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import w4a8
from terrazzo.ops.w4a8 import op as production

if TYPE_CHECKING:
    import torch
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target

WAYS = (
    ("basic", "vadd4"),
    ("multistage", "vadd4"),
    ("basic", "xor"),
    ("basic_overlapped", "xor"),
    ("excp", "xor"),
    ("imfp", "xor"),
    ("pingpong", "xor"),
)
"""(pipeline, dequantization) of each column; the first is the baseline."""


def is_ours(pipeline: str, dequantization: str) -> bool:
    """Whether `w4a8.gemm` has this way."""
    return pipeline in production.PIPELINES and dequantization in production.DEQUANTIZATIONS


def multiply(x: Any, w: Any, way: tuple[str, str], **out: Any) -> torch.Tensor:
    """The product of quantized activations by one way."""
    gemm = w4a8.gemm if is_ours(*way) else op.gemm
    return gemm(x, w, pipeline=way[0], dequantization=way[1], **out)


@dataclass(frozen=True)
class WaysSettings(W4A8Settings):
    """Settings of a run whose columns are `ways`; calls that quantize are left out."""

    ways: tuple[tuple[str, str], ...] = WAYS


def request(way: tuple[str, str], m: int, n: int, k: int, settings: WaysSettings, target: Target) -> KernelRequest:
    """The kernel of a way.

    Raises:
        ArgumentError: it does not serve the problem.
    """
    facts = dict(group_size=settings.group, out_dtype=settings.dtype, pipeline=way[0], dequantization=way[1])
    if is_ours(*way):
        return production.plan(m, n, k, **facts, bias=False, target=target).request
    return op.plan(m, n, k, **facts, target=target).request


class WaysShape(W4A8Shape):
    """Rows of W4A8 with the columns of `WaysSettings`."""

    @classmethod
    def serving(
        cls, m: int, n: int, k: int, settings: WaysSettings, target: Target
    ) -> dict[tuple[str, str], KernelRequest]:
        """The ways that serve a problem, each with its kernel."""
        found = {}
        for way in settings.ways:
            try:
                found[way] = request(way, m, n, k, settings, target)
            except ArgumentError:
                continue
        return found

    @classmethod
    def requests(
        cls, n: int, k: int, m: int | Sequence[int], settings: WaysSettings, target: Target
    ) -> list[KernelRequest]:
        found = []
        for tokens in (m,) if isinstance(m, int) else m:
            found += W4A8Shape.requests(n, k, tokens, settings, target)
            found += cls.serving(tokens, n, k, settings, target).values()
        return list(dict.fromkeys(found))

    def calls(self, x: torch.Tensor) -> dict[str, Callable[[Any, torch.Tensor | None], torch.Tensor]]:
        quantized = w4a8.quantize_activations(x)
        made = {OURS: lambda packed, out: w4a8.gemm(quantized, packed, out=out, out_dtype=self.dtype)}
        for way in self.serving(x.shape[0], self.n, self.k, self.settings, self.target):
            made["_".join(way)] = lambda packed, out, way=way: multiply(
                quantized, packed, way, out=out, out_dtype=self.dtype
            )
        return made

    def side_calls(self, x: torch.Tensor) -> dict[str, Callable[[], object]]:
        return {}
