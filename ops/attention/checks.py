"""What the attention operators ask of a call's arguments, before anything is launched."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import launching, weights
from terrazzo.ops.attention.cache.cache import PackedCache

if TYPE_CHECKING:
    import torch

DTYPES = ("float16", "bfloat16")
NUMBERS = (float, int, Real)  # in this order: an abstract type takes a microsecond to ask
MOST = 1e38
"""Largest scale: times log2(e), it is a float32."""
MOST_CAP = 1024
"""Largest softcap: tanh's error, times it, is below an ulp of a 16-bit weight."""
GRID = 65535
"""Most CTAs along the second and third dimension of a launch."""


@dataclass(frozen=True)
class Options:
    """How logits are made: scale * q.k, then the soft cap, then window and causal masks; sinks join the softmax.

    Args:
        scale: softmax scale; None is 1 / sqrt(head_dim).
        softcap: logits become softcap * tanh(logits / softcap); 0 for none.
        window: tokens that a row sees, the newest ones, itself included; 0 for all.
        sinks: [Hq] logits without a value, or None.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int = 0
    sinks: torch.Tensor | None = None

    def check(self) -> None:
        """Raise ArgumentError unless scale, softcap and window are numbers that a kernel takes."""
        scale, softcap, window = self.scale, self.softcap, self.window
        if scale is not None and not (isinstance(scale, NUMBERS) and -MOST <= scale <= MOST):
            constraint = f"must be finite, a number up to {MOST}"
            raise ArgumentError("scale", scale, constraint, "leave it out for 1 / sqrt(D)")
        if not (isinstance(softcap, NUMBERS) and 0 <= softcap <= MOST_CAP):
            constraint = (
                f"must be 0 (none) or positive, up to {MOST_CAP}: the kernels' tanh errs by 2^-22, logits by that many"
            )
            raise ArgumentError("softcap", softcap, constraint, "pass 0.0")
        if type(window) is not int or not 0 <= window < launching.LARGEST:
            constraint = f"must be 0 (all tokens) or positive, below {launching.LARGEST}"
            raise ArgumentError("window", window, constraint, "pass 0")


def check_facts(dtype: str, *, page: int = 0, residual: int = 0, **flags: bool) -> None:
    """Raise ArgumentError for another type than a kernel's parameter has: plans are kept by their arguments, and equal
    ones of other types (1 == True == 1.0) would get the kernel of whoever came first."""
    if type(dtype) is not str or dtype not in DTYPES:
        raise ArgumentError("dtype", dtype, f"must be one of {DTYPES}", "cast q, k and v")
    for name, value in (("page", page), ("residual", residual)):
        if type(value) is not int or value < 0:
            raise ArgumentError(name, value, "must be a number of tokens", "0 for none")
    launching.check_flags(**flags)


def check_kind(cache: PackedCache) -> None:
    """Raise ArgumentError unless it is a PackedCache; its tensors are checked by eager calls alone."""
    if not isinstance(cache, PackedCache):
        remedy = "a KVCache is read by its batches: cache.batch([sequence]).decode(q)"
        raise ArgumentError("cache", type(cache).__name__, "must be a PackedCache", remedy)


def check_tensors(**tensors: torch.Tensor | None) -> None:
    """What traced calls are asked of tensors; the rest is checked where the operator runs."""
    for name, x in tensors.items():
        if x is not None:
            launching.check_tensor(x, name, "see the operator's arguments")


def check_on_gpu(q: torch.Tensor) -> None:
    """What decode and prefill ask, after all else, of the place of q."""
    if not q.is_cuda:
        raise ArgumentError("q", str(q.device), "must be on a CUDA device, with the cache", "move both there")


def check_grid(batch: int, second: int) -> None:
    """Raise ArgumentError where a launch would have more CTAs along a dimension than CUDA takes."""
    if batch > GRID:
        raise ArgumentError("cache", batch, f"must have at most {GRID} sequences", "split the batch")
    if second > GRID:
        constraint = f"must have at most {GRID} tiles of rows for a sequence"
        raise ArgumentError("q", second, constraint, "pass fewer new tokens at a time")


def check_splits(splits: int | None, most: int) -> None:
    """Raise ArgumentError unless so many CTAs can share the tokens of a sequence; None: as many as pay."""
    if splits is not None and (type(splits) is not int or not 1 <= splits <= most):
        raise ArgumentError("splits", splits, f"must be 1..{most}", "leave it out")


def check_queries(q: torch.Tensor, cache: PackedCache, sinks: torch.Tensor | None) -> None:
    """Raise ArgumentError unless the heads of q [..., Hq, D] go with the cache's, and sinks are f32 [Hq] beside q."""
    heads, kv_heads = q.shape[-2], cache.pages.shape[1]
    if heads < 1 or heads % kv_heads:
        raise ArgumentError("q", list(q.shape), f"Hq must be a multiple of the {kv_heads} kv heads", "repeat heads")
    if sinks is not None:
        check_vector("sinks", sinks, "float32", heads, q.device, "cast or move it", contiguous=True)
    if q.device != cache.pages.device:
        where = f"must be on a CUDA device, with the cache ({cache.pages.device})"
        raise ArgumentError("q", str(q.device), where, "move it")


def check_starts(cu_seqlens: torch.Tensor, batch: int, x: torch.Tensor) -> None:
    """Raise ArgumentError unless it says where new tokens of `batch` sequences begin, beside x."""
    check_vector("cu_seqlens", cu_seqlens, "int32", batch + 1, x.device, "cast it")


def check_vector(
    name: str, x: torch.Tensor, dtype: str, size: int, device: torch.device, remedy: str, contiguous: bool = False
) -> None:
    """Raise ArgumentError unless x is [size] of this dtype on the device."""
    launching.check_tensor(x, name, "{} [{}]", dtype, size)
    fits = str(x.dtype) == f"torch.{dtype}" and tuple(x.shape) == (size,) and (x.is_contiguous() or not contiguous)
    if not fits or x.device != device:
        constraint = f"must be {'contiguous ' if contiguous else ''}{dtype} [{size}] on {device}"
        raise ArgumentError(name, f"{x.dtype} {list(x.shape)} on {x.device}", constraint, remedy)


def check_integers(name: str, x: torch.Tensor, size: int, device: torch.device, remedy: str) -> None:
    """Raise ArgumentError unless x is contiguous int32 or int64 [size] on the device."""
    launching.check_tensor(x, name, "int32 or int64 [{}]", size)
    fits = str(x.dtype) in ("torch.int32", "torch.int64") and tuple(x.shape) == (size,) and x.is_contiguous()
    if not fits or x.device != device:
        seen = f"{weights.described(x)} on {x.device}"
        raise ArgumentError(name, seen, f"must be contiguous int32 or int64 [{size}] on {device}", remedy)


def check_most_new(most_new: int) -> None:
    """Raise ArgumentError unless it is a number of tokens that kernels can count."""
    if type(most_new) is not int or not 0 <= most_new < launching.LARGEST:
        constraint = f"must be an integer, not negative, below {launching.LARGEST}"
        raise ArgumentError("most_new", most_new, constraint, "pass the longest sequence's new tokens")


def check_some_new(name: str, count: int, most_new: int, batch: int) -> None:
    """Raise ArgumentError where rows of new tokens belong to no sequence, so that no kernel would look at them."""
    if count and not (most_new and batch):
        seen = f"{count} tokens, most_new {most_new}, {batch} sequences"
        raise ArgumentError(name, seen, "has new tokens of no sequence", "pass the longest sequence's as most_new")
