"""Grouped GEMMs: stacked experts from one random weight, and how many rows each of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from terrazzo.autotune import gemm_bench, measure
from terrazzo.autotune.subjects import Subject

if TYPE_CHECKING:
    import torch
    from terrazzo.autotune.gemm_bench import Settings, Shape
    from terrazzo.lowering.request import KernelRequest
    from terrazzo.lowering.targets import Target
    from terrazzo.ops.grouped import GroupedWeight
    from terrazzo.ops.weight.base import AnyPacked as Packed

MOST_COPIES = 16


def turned(packed: Packed, experts: int) -> list[GroupedWeight]:
    """Packed weights whose rows are those of one weight, rotated by 64 for each expert; N must be a multiple of 64."""
    made = []
    for e in range(experts):
        tensors = {"words": packed.words.roll(e, 1)}
        if hasattr(packed, "params"):
            tensors["params"] = packed.params.roll(e, 1)
        elif hasattr(packed, "scales"):  # W8A8: of rows, or of 16 rows of a block
            tensors["scales"] = packed.scales.roll(e * (4 if packed.block else 64), 1)
        else:
            tensors["channel_scales"] = packed.channel_scales.roll(64 * e, 0)
        made.append(replace(packed, **{name: tensor.contiguous() for name, tensor in tensors.items()}))
    return made


def random_counts(m: int, experts: int) -> list[int]:
    """Rows of each expert: each of m rows goes to a random one."""
    import torch

    picks = torch.randint(experts, (m,), generator=torch.Generator().manual_seed(m))
    return torch.bincount(picks, minlength=experts).tolist()


class Grouped(Subject):
    """The experts of a grouped GEMM.

    Args:
        kind: rows of one expert. requests: of a number of rows, the kernels of the grouped operator.
    """

    def __init__(
        self,
        kind: type[Shape],
        n: int,
        k: int,
        experts: int,
        settings: Settings,
        target: Target,
        requests: Sequence[KernelRequest],
    ) -> None:
        alone = type(kind.__name__, (kind,), {"copies": lambda self, nbytes: 1})
        self.base = alone(n, k, settings, target, [], target.dram_gb_s)
        self.operator, self.experts, self.requests = self.base.module, experts, requests
        self.quantizes = hasattr(self.operator, "quantize_activations")
        self.stacks = [self.operator.GroupedWeight.stack(turned(self.base.packed[0], experts))]

    def inputs(self, m: int) -> tuple:
        import torch

        x = self.base.tokens(m)
        counts = torch.tensor(random_counts(m, self.experts))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int().to(gemm_bench.DEVICE)
        given = self.base.quantized(x) if self.quantizes else x
        return x, given, offsets, torch.arange(self.experts).repeat_interleave(counts)

    def copies(self, m: int) -> Sequence[Any]:
        """As many as the experts with rows need to exceed the L2 cache; made when first asked for."""
        active = sum(count > 0 for count in random_counts(m, self.experts))
        nbytes = self.stacks[0].nbytes // self.experts * active
        wanted = min(MOST_COPIES, measure.copies_beyond_l2(nbytes, self.base.target.l2_bytes))
        while len(self.stacks) < wanted:
            self.stacks.append(self.operator.GroupedWeight(clone(self.stacks[0].stacked)))
        return self.stacks[:wanted]

    def output(self, m: int) -> torch.Tensor:
        return measure.poisoned((m, self.base.n), self.base.dtype, gemm_bench.DEVICE)

    def launch(self, given: tuple, copy: GroupedWeight, out: torch.Tensor) -> None:
        _, x, offsets, _ = given
        more = {"out_dtype": self.base.dtype} if self.quantizes else {}
        self.operator.grouped_gemm(x, copy, offsets, out=out, **more)

    def kind(self, m: int) -> str:
        return next((str(value) for key, value in self.requests(m)[0].params if key == "numerics"), "")

    def expected(self, given: tuple, m: int) -> tuple:
        """Rows compared, reference and bound: by the first expert's weight, columns rotated as the owner's rows are."""
        import torch

        x, _, _, owner = given
        rows, reference, bound, _ = self.base.expected(x, self.requests(m))
        shift = 64 * owner.to(rows.device)[rows]
        columns = (torch.arange(self.base.n, device=rows.device)[None, :] - shift[:, None]) % self.base.n
        return rows, reference.gather(1, columns), bound.gather(1, columns)

    def wrong(self, out: torch.Tensor, expected: tuple) -> str:
        return gemm_bench.wrong(out, *expected)


def clone(packed: Packed) -> Packed:
    """A packed weight with tensors of its own."""
    from terrazzo.ops import weights

    return replace(packed, **{name: tensor.clone() for name, tensor in weights.tensor_fields(packed).items()})
