"""What an attention backend of an engine does with plain tensors, on pages that the engine allocates.

A page has exactly the bytes of our tiles: 16 tokens of one kv head lie in one run, codes first and their scales behind,
as in vLLM's token-wise dtypes. So the engine's allocator, prefix cache and preemption work as they are; only what is in
a page is ours. New tokens are written by slot (page * page_size + offset), quantized as they come; attention reads
what the pages hold, in prefill too: outputs depend neither on the chunks in which a prompt came nor on who filled a
page that sequences share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention import checks, entry
from terrazzo.ops.attention.cache.cache import PackedCache, page_words
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.decoding import op, reference
from terrazzo.ops.attention.prefilling import prefill_op, prefill_reference
from terrazzo.ops.attention.writing import reference_writing, slot_writing
from terrazzo.ops.lasting import lasting
from terrazzo.ops.products.kv import HEAD_DIMS

if TYPE_CHECKING:
    import torch
    from terrazzo.schedules.models import Architecture

PAGE = 64
"""Tokens of a page unless the user names another: 4-bit keys and values of a head are then copied 8 KB at a time."""
MOST_ROWS = op.MAX_QUERY_TOKENS
"""New tokens of a sequence up to which a step is a decode: one, and those that are speculated."""


@dataclass(frozen=True)
class Kind:
    """What layers have in common that run the same kernels.

    Attributes:
        layout: formats of keys and values, head_dim.
        heads, kv_heads: of this process. page: tokens of a page. dtype: of q, k and v.
        window: newest tokens that a row sees, itself included; 0 for all. softcap: of logits, 0.0 for none.
        sinks: whether heads have a logit without a value.
        most_length: tokens of the longest sequence. most_rows: new tokens up to which a sequence is decoded.
    """

    layout: CacheLayout
    heads: int
    kv_heads: int
    page: int
    dtype: str
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    most_length: int = 8192
    most_rows: int = 1

    @property
    def token_bytes(self) -> int:
        """Of keys, values and scales of a token of one kv head."""
        return token_bytes(self.layout)

    def requests(self, target: Target) -> list[KernelRequest]:
        """Every kernel that steps of any size launch.

        Raises:
            ArgumentError: sizes that kernels do not have.
        """
        facts = dict(dtype=self.dtype, page=self.page, softcap=self.softcap > 0, sinks=self.sinks, target=target)
        rows = [n * self.heads // self.kv_heads for n in range(1, self.most_rows + 1)]
        found = [
            op.plan(self.layout, 2, self.kv_heads, each, 1, residual=0, **facts, balanced=True).request for each in rows
        ]
        if self.most_rows > 1:
            facts_of = dict(residual=0, **facts, balanced=True, ragged=True)
            found.append(op.plan(self.layout, 2, self.kv_heads, rows[-1], 1, **facts_of).request)
        found += prefill_op.prefill_requests(self.layout, residual=0, **facts)
        found.append(slot_writing.request(self.layout, self.dtype, self.page, "int64", target=target))
        return list(dict.fromkeys(found))


def token_bytes(layout: CacheLayout) -> int:
    """Bytes of keys, values and scales of one token and kv head."""
    return layout.words(layout.block_tokens) * 4 // layout.block_tokens


@dataclass(frozen=True)
class Caches:
    """The cache dtypes of an engine that our pages serve.

    Attributes:
        formats: the engine's name -> formats of keys and values. "auto" is the model's dtype.
    """

    formats: Mapping[str, tuple[str, str]]

    def layout_of(self, cache_dtype: str, dtype: str, head_dim: int) -> CacheLayout:
        """The bytes of a cache that the engine names; `dtype`, of the model, stands for "auto".

        Raises:
            ArgumentError: a cache, or a size of heads, that is not ours.
        """
        name = dtype if cache_dtype == "auto" else cache_dtype
        if name not in self.formats:
            constraint = f"must be auto or one of {tuple(self.formats)}"
            raise ArgumentError("kv_cache_dtype", cache_dtype, constraint, "name another")
        return CacheLayout(*self.formats[name], head_dim)

    def content(self, cache_dtype: str, head_dim: int) -> int:
        """Elements of a token and kv head in the dtype that a cache is stored in: bytes, or 16 bits of a plain one."""
        name = "float16" if cache_dtype == "auto" else cache_dtype
        found = token_bytes(self.layout_of(name, name, head_dim))
        return found // 2 if name in checks.DTYPES else found

    def refusal(
        self, cache_dtype: str | None, dtype: str, head_dim: int, page: int | None, *, sinks: bool = False,
        target: Target | None = None,
    ) -> str | None:  # fmt: skip
        """Why layers are not taken, None if they are. What does not depend on a layer's heads is asked before they are
        known: `target` has kernels for them in any number."""
        if dtype not in checks.DTYPES:
            return f"activations are {dtype}, kernels read {checks.DTYPES}"
        if head_dim not in HEAD_DIMS:
            return f"heads have {head_dim} dimensions, kernels have {HEAD_DIMS}"
        page, facts = PAGE if page is None else page, dict(dtype=dtype, residual=0, sinks=sinks, target=target)
        try:
            layout = self.layout_of(cache_dtype or "auto", dtype, head_dim)
            page_words(layout, page)
            if target is not None:
                prefill_op.prefill_requests(layout, page=page or PAGE, **facts)
        except ArgumentError as error:
            return str(error)
        return None

    def refusals(self, model: Architecture, dtype: str, target: Target) -> dict[str, str]:
        """Each cache dtype, and why a model's layers cannot have it: "" where they can."""
        facts = dict(sinks=model.sinks, target=target)
        every = ("auto", *self.formats)
        return {name: self.refusal(name, dtype, model.head_dim, None, **facts) or "" for name in every}

    def model_requests(
        self, model: Architecture, cache_dtype: str, dtype: str, target: Target, *, ranks: int = 1, most_rows: int = 1
    ) -> list[KernelRequest]:
        """Kernels of a model's attention over a cache, for a bundle.

        Raises:
            ArgumentError: a cache or heads that are not ours, heads that ranks cannot share.
        """
        if model.heads % ranks:
            raise ArgumentError("ranks", ranks, f"must share {model.heads} query heads", "use fewer ranks")
        kind = Kind(
            self.layout_of(cache_dtype, dtype, model.head_dim), model.heads // ranks, max(1, model.kv_heads // ranks),
            PAGE, dtype, softcap=float(bool(model.softcap)), sinks=model.sinks, most_rows=most_rows,
        )  # fmt: skip
        return kind.requests(target)


def pages_of(kv_cache: torch.Tensor, kind: Kind) -> torch.Tensor:
    """int32 [pages, Hkv, words] of what an engine allocated, [pages, Hkv, page, bytes of a token] in any dtype.

    Raises:
        ArgumentError: another size, or pages that do not lie one behind another, heads outermost.
    """
    import torch

    size = kv_cache.element_size() if kv_cache.dim() == 4 else 0
    wanted = (kind.kv_heads, kind.page, kind.token_bytes // (size or 1))
    if tuple(kv_cache.shape[1:]) != wanted or not kv_cache.is_contiguous():
        seen = f"{kv_cache.dtype} {list(kv_cache.shape)}, strides {list(kv_cache.stride())}"
        constraint = f"must be contiguous [pages, {', '.join(map(str, wanted))}] for {kind.layout.identity}"
        raise ArgumentError("kv_cache", seen, constraint, "leave out --kv-cache-dtype-skip-layers and offloading")
    return kv_cache.view(len(kv_cache), kind.kv_heads, -1).view(torch.int32)


@dataclass(frozen=True)
class Split:
    """How a step's sequences are served: the first `decodes` as decodes, the others as prefills of at most `most_new`.

    Attributes:
        tokens: rows of q of the decodes. rows: of each of them; of ragged ones, the most that kernels are for.
        ragged: whether decodes have different numbers of rows.
    """

    decodes: int
    rows: int
    most_new: int
    tokens: int
    ragged: bool = False


def split(starts: Sequence[int], most_rows: int, room: int) -> Split:
    """Which of the sequences whose new tokens begin at `starts` (their end is the last one) are decoded.

    The first ones, as far as each has 1 to `most_rows` new tokens. Sequences without any behind them are what pads a
    captured batch: where all have as many, they are decoded along, as far as q has `room` rows. vLLM puts decodes
    first; any other order is served as well, by prefill.
    """
    counts = [b - a for a, b in pairwise(starts)]
    decodes = next((at for at, count in enumerate(counts) if not 1 <= count <= most_rows), len(counts))
    found, most_new = counts[:decodes], max(counts[decodes:], default=0)
    if len(set(found)) > 1:
        return Split(decodes, most_rows, most_new, sum(found), ragged=True)
    rows = max(found, default=0)
    if decodes and not most_new:
        decodes = min(len(counts), room // rows)
    return Split(decodes, rows, most_new, decodes * rows)


@dataclass(eq=False)
class Step:
    """One batch, for all layers whose pages one table names.

    Attributes:
        split: see there. kind: of these layers.
        lengths: int32 [B] on the device, new tokens included. table: int32 [B, most pages].
        starts: int32 [prefills + 1], where each prefill's tokens begin behind those of the decodes, or None.
        decoded: int32 [decodes + 1], where each decode's tokens begin, if they are ragged.
        longest: at least the longest sequence's tokens, on the host.
    """

    split: Split
    kind: Kind
    lengths: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor | None
    longest: int
    decoded: torch.Tensor | None = None
    _views: dict[int, tuple[PackedCache | None, PackedCache | None]] = field(default_factory=dict)

    def views(self, pages: torch.Tensor) -> tuple[PackedCache | None, PackedCache | None]:
        """A layer's pages as caches of the decoded sequences and of the others."""
        found = self._views.get(pages.data_ptr())
        if found is None:
            n, total = self.split.decodes, len(self.lengths)
            longest = (self.kind.most_length, self.longest)  # a captured batch is replayed with longer sequences
            found = tuple(
                PackedCache(
                    self.kind.layout, pages, self.lengths[a:b], most, block_table=self.table[a:b],
                    page_size=self.kind.page,
                )
                if used
                else None
                for used, a, b, most in zip((n, self.split.most_new), (0, n), (n, total), longest)
            )  # fmt: skip
            self._views[pages.data_ptr()] = found
        return found


def step_of(
    kind: Kind,
    starts: torch.Tensor,
    starts_host: Sequence[int],
    lengths: torch.Tensor,
    table: torch.Tensor,
    longest: int,
    room: int,
) -> Step:
    """One batch.

    Args:
        starts: int32 [B + 1] on the device, where each sequence's new tokens begin in q; starts_host: the same numbers.
        lengths: int32 [B], new tokens included, 0 for what pads the batch. table: int32 [B, most pages].
        longest: a bound of `lengths` on the host. room: rows of q, padding included.
    """
    found = split(starts_host, kind.most_rows, room)
    rest = None
    if found.most_new:
        rest = starts[found.decodes :]
        rest = rest - found.tokens if found.tokens else rest
    decoded = starts[: found.decodes + 1] if found.ragged else None
    return Step(found, kind, lengths, table, rest, int(longest), decoded)


class Layer:
    """Attention of one layer over the pages that an engine gives it.

    Args:
        kind: of the layer. scale: of the softmax. sinks: f32 [Hq], or None.
    """

    def __init__(self, kind: Kind, scale: float, sinks: torch.Tensor | None = None) -> None:
        self.kind, self.scale, self.sinks = kind, scale, sinks
        self._seen: tuple[int | torch.Size | tuple[int, ...], ...] = ()
        self._cache: PackedCache | None = None

    def cache(self, kv_cache: torch.Tensor) -> PackedCache:
        """The engine's pages as slots are written to: without sequences.

        Raises:
            ArgumentError: see `pages_of`.
        """
        seen = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride())
        if self._cache is None or seen != self._seen:
            import torch

            pages = pages_of(kv_cache, self.kind)
            none = lasting(pages.device, lambda: torch.zeros(1, 1, dtype=torch.int32, device=pages.device))
            self._cache = PackedCache(
                self.kind.layout, pages, none[0], 0, block_table=none, page_size=self.kind.page
            )  # fmt: skip
            self._seen = seen
        return self._cache

    def forget(self) -> None:
        """Hold no pages any more."""
        self._cache, self._seen = None, ()

    def write(self, kv_cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantize new tokens k, v [N, Hkv, D] into slots int64 [n], those of the first n <= N; negative ones are
        padding, for which nothing is written."""
        if len(k) != len(slots):
            k, v = k[: len(slots)], v[: len(slots)]
        cache = self.cache(kv_cache)
        (entry.store_slots if k.is_cuda else reference_writing.store_slots)(cache, k, v, slots)

    def attend(self, step: Step, q: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        """Attention of q [N, Hq, D] over pages that hold the new tokens already, into out [N, Hq, D].

        Rows behind the batch's tokens may keep what they had. Decodes take the kernel that follows the lengths on the
        device: one captured in a graph is right for all lengths.
        """
        kind, decodes, n = self.kind, step.split.decodes, step.split.tokens
        options = dict(scale=self.scale, softcap=kind.softcap, window=kind.window, sinks=self.sinks)
        decoded, filled = step.views(self.cache(kv_cache).pages)
        if decoded is not None and step.split.ragged:
            rows, to, new = q[:n], out[:n], dict(cu_seqlens=step.decoded, most_new=step.split.rows)
            if q.is_cuda:
                entry.decode(rows, decoded, out=to, balanced=True, **new, **options)
            else:
                facts = reference.Options(**options)
                to.copy_(prefill_reference.prefill(rows, decoded, step.decoded, facts, bounded=False)[0])
        elif decoded is not None:
            rows, to = (x[:n].view(decodes, step.split.rows, kind.heads, -1) for x in (q, out))
            if q.is_cuda:
                entry.decode(rows, decoded, out=to, balanced=True, **options)
            else:
                to.copy_(reference.decode(rows, decoded, reference.Options(**options), bounded=False)[0])
        if filled is not None:
            rows, to = (x[n:] if n else x for x in (q, out))
            if q.is_cuda:
                entry.prefill(rows, filled, step.starts, step.split.most_new, out=to, **options)
                return
            last, facts = int(step.starts[-1]), reference.Options(**options)
            to[:last] = prefill_reference.prefill(rows[:last], filled, step.starts, facts, bounded=False)[0]


def warm(kind: Kind, sequences: int, device: torch.device) -> None:
    """Launch what CUDA graphs will hold, for `sequences` empty ones: kernels are loaded, counters allocated."""
    import torch

    i32 = dict(dtype=torch.int32, device=device)
    dtype = getattr(torch, kind.dtype)
    layer = Layer(kind, 1.0, torch.zeros(kind.heads, device=device) if kind.sinks else None)
    size = (1, kind.kv_heads, kind.page, kind.token_bytes)
    pages = torch.zeros(size, dtype=torch.uint8, device=device)
    lengths, table = torch.zeros(sequences, **i32), torch.zeros(sequences, 1, **i32)
    k = torch.zeros(1, kind.kv_heads, kind.layout.head_dim, dtype=dtype, device=device)
    layer.write(pages, k, k, torch.full((1,), -1, dtype=torch.int64, device=device))
    for rows in range(1, kind.most_rows + 1):
        starts = range(0, rows * sequences + 1, rows)
        q = torch.zeros(rows * sequences, kind.heads, kind.layout.head_dim, dtype=dtype, device=device)
        step = step_of(kind, torch.tensor(starts, **i32), list(starts), lengths, table, 0, len(q))
        layer.attend(step, q, pages, torch.empty_like(q))
    if sequences > 1 and kind.most_rows > 1:
        starts = [0, 1, *range(3, 2 * sequences, 2)]
        q = torch.zeros(starts[-1], kind.heads, kind.layout.head_dim, dtype=dtype, device=device)
        step = step_of(kind, torch.tensor(starts, **i32), starts, lengths, table, 0, len(q))
        layer.attend(step, q, pages, torch.empty_like(q))
