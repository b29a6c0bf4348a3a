"""FMPQ: which input channels carry outliers, and the order that gathers them into the fewest blocks (specs.md E.1).

A block of 128 channels is INT8 if it holds an outlier, else INT4. Unordered, a handful of outliers would touch every
block; permuted, `ceil(outliers / 128)` blocks hold them all. INT8 blocks come last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import weights
from terrazzo.ops.weight import files

if TYPE_CHECKING:
    import torch

BLOCK = 128
TAU = 6.0
"""A channel is an outlier above this many medians: the paper states no threshold, this one is ours."""
PADDING = -1
"""Entry of a permutation that stands for no input channel: its activation is 0."""
FILE_VERSION = "terrazzo.fmpq/1"
_OCTAVE = 8  # bins of an octave: a percentile is at most 2^(1/8) too large
_LOW, _HIGH = -24, 24  # exponents that the histogram covers


@dataclass(eq=False)
class ActivationStatistics:
    """What calibration remembers of a layer's input, of any number of batches. Start with `empty`.

    Attributes:
        maximum: float32 [K], largest magnitude of each channel.
        squares: float64 [K], sum of squares of each channel.
        histogram: int32 [K, bins] of magnitudes on a logarithmic scale, where a percentile is asked for.
        tokens: rows seen.
        percentile: share of a channel's magnitudes that `magnitude` covers, None for all of them.
    """

    maximum: torch.Tensor = field(repr=False)
    squares: torch.Tensor = field(repr=False)
    histogram: torch.Tensor | None = field(default=None, repr=False)
    tokens: int = 0
    percentile: float | None = None

    @classmethod
    def empty(
        cls, k: int, *, percentile: float | None = None, device: str | int | torch.device = "cpu"
    ) -> ActivationStatistics:
        """Of no tokens yet, for k channels. `percentile` in (0, 1), for example 0.999: single spikes do not count.

        Raises:
            ArgumentError: k < 1, a percentile outside (0, 1), or no device.
        """
        import torch

        weights.check_count("k", k, "pass the layer's input features")
        device = weights.device_of(device)
        if percentile is not None and (not isinstance(percentile, float) or not 0 < percentile < 1):
            raise ArgumentError("percentile", percentile, "must be in (0, 1)", "leave it out for the maximum")
        bins = (_HIGH - _LOW) * _OCTAVE
        return cls(
            maximum=torch.zeros(k, dtype=torch.float32, device=device),
            squares=torch.zeros(k, dtype=torch.float64, device=device),
            histogram=None if percentile is None else torch.zeros(k, bins, dtype=torch.int32, device=device),
            percentile=percentile,
        )

    @property
    def k(self) -> int:
        """Channels."""
        return self.maximum.shape[0]

    def observe(self, x: torch.Tensor) -> ActivationStatistics:
        """Add the tokens of x, float [..., K] on any device; returns itself.

        Raises:
            ArgumentError: no tensor, another number of channels, or values that are not finite in float32.
        """
        import torch

        if not isinstance(x, torch.Tensor):
            raise ArgumentError("x", type(x).__name__, f"must be a tensor [..., {self.k}]", "pass this layer's input")
        weights.check_dense("x", x)
        if not x.ndim or x.shape[-1] != self.k or not x.dtype.is_floating_point:
            raise ArgumentError("x", list(x.shape), f"must be float [..., {self.k}]", "pass this layer's input")
        x = x.detach().reshape(-1, self.k).to(self.maximum.device, torch.float32).abs()
        if not x.numel():
            return self
        largest = x.amax(dim=0)
        if not bool(largest.isfinite().all()):
            raise ArgumentError("x", "NaN or infinity", "must be finite in float32", "leave broken samples out")
        torch.maximum(self.maximum, largest, out=self.maximum)
        self.squares += x.double().square_().sum(dim=0)
        if self.histogram is not None:
            bins = ((x.clamp(min=2.0**_LOW).log2() - _LOW) * _OCTAVE).long().clamp_(0, self.histogram.shape[1] - 1)
            self.histogram.scatter_add_(1, bins.T, torch.ones_like(bins.T, dtype=torch.int32))
        self.tokens += x.shape[0]
        return self

    def merge(self, other: ActivationStatistics) -> ActivationStatistics:
        """Add what another process has seen of the same layer; returns itself. ArgumentError for another layer's."""
        import torch

        _check_kind("other", other, ActivationStatistics)
        if other.k != self.k or other.percentile != self.percentile:
            seen = (other.k, other.percentile)
            raise ArgumentError("other", seen, f"must be of {(self.k, self.percentile)}", "merge statistics of a layer")
        torch.maximum(self.maximum, other.maximum.to(self.maximum.device), out=self.maximum)
        self.squares += other.squares.to(self.squares.device)
        if self.histogram is not None:
            self.histogram += other.histogram.to(self.histogram.device)
        self.tokens += other.tokens
        return self

    @property
    def magnitude(self) -> torch.Tensor:
        """float32 [K]: the largest magnitude of each channel, or the percentile's (upper edge of its bin)."""
        import torch

        if self.histogram is None:
            return self.maximum.clone()
        rank = self.histogram.long().cumsum(dim=1) >= self.percentile * self.tokens
        edge = torch.exp2((rank.int().argmax(dim=1) + 1).float() / _OCTAVE + _LOW)
        return torch.minimum(edge, self.maximum)

    @property
    def mean_square(self) -> torch.Tensor:
        """float32 [K]: how much an error of a channel's weight counts in the layer's output."""
        return (self.squares / max(self.tokens, 1)).float()

    def save(self, path: str | Path) -> None:
        """Write one safetensors file. Atomic."""
        files.save(self, path, FILE_VERSION)

    @classmethod
    def load(cls, path: str | Path, device: str | int | torch.device = "cpu") -> ActivationStatistics:
        """Read a file that `save` wrote; ArgumentError if it is no such file, or its values are no statistics."""
        found = files.load(cls, path, device, FILE_VERSION)
        k, again = found.maximum.shape[0] if found.maximum.ndim == 1 else 0, "calibrate again, and save that"
        weights.check_count("maximum", k, again)
        weights.check_tensor(found, "maximum", (k,), "float32", again)
        weights.check_tensor(found, "squares", (k,), "float64", again)
        if type(found.tokens) is not int or not 0 <= found.tokens < 2**63:
            raise ArgumentError("tokens", found.tokens, "must be a number of tokens", again)
        if (found.percentile is None) != (found.histogram is None) or not 0 < (found.percentile or 0.5) < 1:
            constraint = "must be in (0, 1), with a histogram"
            raise ArgumentError("percentile", found.percentile, constraint, again)
        if found.histogram is not None:
            weights.check_tensor(found, "histogram", (k, (_HIGH - _LOW) * _OCTAVE), "int32", again)
        for name in ("maximum", "squares", "histogram"):
            values = getattr(found, name)
            if values is not None and not bool((values.isfinite() & (values >= 0)).all()):
                raise ArgumentError(name, "negative, NaN or infinity", "must be finite, >= 0", again)
        return found


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """The order of a layer's input channels and the precision of its blocks of 128. Made by `plan_blocks`.

    Attributes:
        k: input channels.
        blocks8: INT8 blocks, the last ones; the others are INT4.
        permutation: int32 [Kp], Kp = k rounded up to 128: the channel at each place, PADDING for none; None for the
            channels' own order (padding last).
        outliers: bool [k].
        threshold: magnitude above which a channel is an outlier.
    """

    k: int
    blocks8: int
    permutation: torch.Tensor | None = field(repr=False)
    outliers: torch.Tensor = field(repr=False)
    threshold: float = 0.0

    @property
    def blocks(self) -> int:
        """Blocks of 128 channels, padding included."""
        return -(-self.k // BLOCK)

    @property
    def padded(self) -> int:
        """Kp."""
        return self.blocks * BLOCK

    @property
    def ratio(self) -> float:
        """Share of INT8 blocks."""
        return self.blocks8 / self.blocks

    def precisions(self) -> tuple[int, ...]:
        """Bits of each block: 4, ..., 4, 8, ..., 8."""
        return (4,) * (self.blocks - self.blocks8) + (8,) * self.blocks8

    def order(self) -> torch.Tensor:
        """int64 [Kp]: `permutation`, written out."""
        import torch

        if self.permutation is not None:
            return self.permutation.long()
        places = torch.arange(self.padded, device=self.outliers.device)
        return places.where(places < self.k, PADDING)

    def arrange(self, t: torch.Tensor) -> torch.Tensor:
        """t [..., k], of any dtype, to [..., Kp] in the plan's order; padding becomes 0.

        Raises:
            ArgumentError: another extent.
        """
        _check_extent("t", t, self.k)
        order = self.order().to(t.device)
        return t.index_select(-1, order.clamp(min=0)).masked_fill(order < 0, 0)

    def restore(self, t: torch.Tensor) -> torch.Tensor:
        """t [..., Kp], of any dtype, back to [..., k]: the inverse of `arrange`.

        Raises:
            ArgumentError: another extent.
        """
        _check_extent("t", t, self.padded)
        weights.check_dense("t", t)
        order = self.order().to(t.device)
        out = t.new_zeros(*t.shape[:-1], self.k)
        out[..., order[order >= 0]] = t[..., order >= 0]
        return out

    def folded(self) -> BlockPlan:
        """The plan for activations that already arrive in this order, see `fold`.

        Raises:
            ArgumentError: k is no multiple of 128: padding would stand between the channels.
        """
        if self.permutation is None:
            return self
        _check_foldable(self)
        return BlockPlan(self.k, self.blocks8, None, self.outliers[self.permutation.long()], self.threshold)

    def save(self, path: str | Path) -> None:
        """Write one safetensors file. Atomic."""
        files.save(self, path, FILE_VERSION)

    @classmethod
    def load(cls, path: str | Path, device: str | int | torch.device = "cpu") -> BlockPlan:
        """Read a file that `save` wrote; ArgumentError if it is no such file, or no plan."""
        read = lambda permutation=None, **rest: cls(permutation=permutation, **rest)
        plan = files.load(read, path, device, FILE_VERSION)
        weights.check_count("k", plan.k, "save the plan again")
        if type(plan.blocks8) is not int or not 0 <= plan.blocks8 <= plan.blocks:
            raise ArgumentError("blocks8", plan.blocks8, f"must be 0..{plan.blocks}", "save the plan again")
        weights.check_tensor(plan, "outliers", (plan.k,), "bool", "save the plan again")
        if plan.permutation is not None:
            check_permutation(plan.permutation, plan.k, plan.padded)
        return plan


def plan_blocks(
    statistics: ActivationStatistics | torch.Tensor,
    *,
    tau: float = TAU,
    floor: int = 0,
    ceiling: int | None = None,
    ratio: float | None = None,
) -> BlockPlan:
    """Find the outlier channels and gather them into the fewest blocks.

    A channel is an outlier if its magnitude exceeds `tau` times the median of the channels that carry anything. The
    INT8 blocks take the 128 * blocks8 channels of largest magnitude, so that what outliers leave free serves the next
    largest; both kinds keep the channels' own order, INT4 first.

    Args:
        statistics: of calibration, or magnitudes float [K].
        tau: outlier threshold, in medians.
        floor, ceiling: least and most INT8 blocks.
        ratio: share of INT8 blocks in [0, 1], rounded to whole blocks, whatever the outliers (the paper's kernel
            measurements use 0.25); excludes floor and ceiling.

    Raises:
        ArgumentError: for anything that does not fit.
    """
    own = isinstance(statistics, ActivationStatistics)
    c = statistics.magnitude if own else weights.as_tensor("statistics", statistics)
    if c.ndim != 1 or not len(c) or not c.dtype.is_floating_point:
        seen = f"{c.dtype} {list(c.shape)}"
        raise ArgumentError("statistics", seen, "must be float magnitudes [K]", "calibrate the layer")
    c = c.float()
    if not bool((c.isfinite() & (c >= 0)).all()):
        seen = "negative or not finite"
        raise ArgumentError("statistics", seen, "must be finite in float32, >= 0", "calibrate the layer again")
    if not isinstance(tau, (int, float)) or not tau > 0:
        raise ArgumentError("tau", tau, "must be a positive number", f"use {TAU}")
    k, blocks = len(c), -(-len(c) // BLOCK)
    most = blocks if ceiling is None else ceiling
    if type(floor) is not int or type(most) is not int or not 0 <= floor <= most <= blocks:
        constraint = f"must be integers, 0 <= floor <= ceiling <= {blocks}"
        raise ArgumentError("floor", (floor, ceiling), constraint, "count blocks of 128 channels")
    fits = ratio is None or (isinstance(ratio, (int, float)) and 0 <= ratio <= 1)
    if not fits or (ratio is not None and (floor or ceiling is not None)):
        seen = (ratio, floor, ceiling)
        raise ArgumentError("ratio", seen, "must be in [0, 1], without floor and ceiling", "pass one of them")
    carrying = c[c > 0]
    threshold = tau * float(carrying.median()) if len(carrying) else 0.0
    outliers = c > threshold
    wanted = -(-int(outliers.sum()) // BLOCK)
    blocks8 = min(max(wanted, floor), most) if ratio is None else int(ratio * blocks + 0.5)
    return BlockPlan(k, blocks8, _permutation(c, blocks, blocks8), outliers, threshold)


def _permutation(c: torch.Tensor, blocks: int, blocks8: int) -> torch.Tensor | None:
    """int32 [Kp], or None where the channels keep their order."""
    import torch

    k, padded = len(c), blocks * BLOCK
    ranked = torch.cat([c, c.new_full((padded - k,), -1.0)])
    largest = torch.sort(ranked, descending=True, stable=True).indices[: blocks8 * BLOCK]
    high = torch.zeros(padded, dtype=torch.bool, device=c.device)
    high[largest] = True
    order = torch.cat([torch.nonzero(~high), torch.nonzero(high)]).flatten()
    if torch.equal(order, torch.arange(padded, device=c.device)):
        return None
    return order.where(order < k, PADDING).to(torch.int32)


def check_permutation(permutation: torch.Tensor, k: int, padded: int) -> None:
    """Raise ArgumentError unless it holds every channel once, and nothing but padding beside them."""
    import torch

    if tuple(permutation.shape) != (padded,) or not weights.is_integer(permutation):
        seen = weights.described(permutation)
        raise ArgumentError("permutation", seen, f"must be integers [{padded}]", "use plan_blocks")
    expected = torch.cat([permutation.new_full((padded - k,), PADDING), torch.arange(k).to(permutation)])
    if not torch.equal(permutation.sort().values, expected):
        raise ArgumentError(
            "permutation", "not one", f"must hold 0..{k - 1} once and -1 for padding", "use plan_blocks"
        )


def fold(plan: BlockPlan, *tensors: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """Put the plan's order into what produces the activations, so that nothing is gathered at run time.

    Rows of the linear layers in front (all of them, where their outputs are multiplied element by element), their
    biases, or RMSNorm's weight when the hidden dimension itself is kept in this order. Quantize the weight with
    `plan.folded()` after `plan.arrange` of its columns, or with `quantize_weight(..., folded=True)`.

    Args:
        tensors: [..., k, ...] of any dtype, k entries along `dim`; new ones are returned in the plan's order.

    Raises:
        ArgumentError: k is no multiple of 128, or a tensor has another extent.
    """
    _check_kind("plan", plan, BlockPlan)
    _check_foldable(plan)
    if type(dim) is not int:
        raise ArgumentError("dim", dim, "must be an integer", "pass the dimension of the channels")
    for t in tensors:
        _check_extent("tensors", t, plan.k, dim)
    if plan.permutation is None:
        return tuple(tensors)
    return tuple(t.index_select(dim, plan.permutation.long().to(t.device)) for t in tensors)


def _check_foldable(plan: BlockPlan) -> None:
    if plan.k % BLOCK:
        raise ArgumentError(
            "plan", plan.k, f"K must be a multiple of {BLOCK} to be folded: padding lies inside the order",
            "let the activation quantizer permute",
        )  # fmt: skip


def _check_extent(name: str, t: torch.Tensor, size: int, dim: int = -1) -> None:
    import torch

    if not isinstance(t, torch.Tensor):
        raise ArgumentError(name, type(t).__name__, f"must be a tensor with {size} entries along {dim}", "convert it")
    if not t.is_meta:
        weights.check_dense(name, t)
    if not -t.ndim <= dim < t.ndim or t.shape[dim] != size:
        constraint = f"must have {size} entries along {dim}"
        raise ArgumentError(name, list(t.shape), constraint, "pass one of the layer of the plan")


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ArgumentError(name, type(value).__name__, f"must be {kind.__name__}", "see terrazzo.ops.w4ax")
