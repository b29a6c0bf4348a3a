"""`KVCache`: owns the pages and residual blocks of many sequences and layers; append, fork, free, accounting.

cache = KVCache("int4", "int4", kv_heads=8, head_dim=128, pages=4096, sequences=64, layers=32)
sequence = cache.new()
batch = cache.extend({sequence: len(prompt)})          # makes room, or raises CacheFullError and changes nothing
for layer in range(32):
    y = batch.prefill(q, layer, k=k, v=v)              # [tokens, Hq, D]
    batch.store(k, v, layer)                           # [tokens, Hkv, D]
batch = cache.extend({sequence: 1})
for layer in range(32):
    batch.append(k, v, layer)                          # [B, 1, Hkv, D]
    y = batch.decode(q, layer)                         # [B, 1, Hq, D]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from numbers import Integral
from typing import TYPE_CHECKING, Any

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, launching
from terrazzo.ops.attention import entry
from terrazzo.ops.attention.cache.cache import (
    PackedCache,
    device_of,
    page_words,
    residual_of,
    residual_words,
    spread_static,
)
from terrazzo.ops.attention.cache.format import kept_in_f16
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.cache.paging import PageTable, Unstored
from terrazzo.ops.attention.writing.writing import slides

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import Array, SupportsDLPack


@dataclass(frozen=True)
class Usage:
    """Memory of a cache, bytes where not said otherwise.

    Attributes:
        allocated: tensors of the cache. used: pages that sequences hold and their residual blocks.
        f16: what the tokens would take as f16 keys and values without any sharing.
        pages, free_pages, shared_pages: numbers of pages. sequences, tokens: numbers of them.
    """

    allocated: int
    used: int
    f16: int
    pages: int
    free_pages: int
    shared_pages: int
    sequences: int
    tokens: int


class KVCache:
    """Keys and values of up to `sequences` sequences in `pages` pages that all layers share the numbers of.

    One thread at a time: nothing here is locked.

    Args:
        k_format, v_format: names of `FORMATS`. kv_heads, head_dim: of every layer.
        pages: number of pages. page_size: tokens of a page, a multiple of the layout's block.
        sequences: most sequences at a time. max_tokens: most tokens of one sequence; default what all pages hold.
        layers: number of layers. residual: newest tokens of a sequence that stay f16, a multiple of 16 up to 256; None
            for what the keys need: their channel group, 128 for rotated ones, or none. sink_tokens: first tokens that
            do, 0 or 16; None for 16 where rotated keys have two bits.
        k_static, v_static: f32 [layers, Hkv, D] (or [Hkv, D] for one layer) for static formats. Dimensions of 1 are
            repeated: k_scale and v_scale of a checkpoint's layers are [layers, 1, 1], one for all layers is [] or [1].
        device: where everything lies, as torch names it: "cuda", "cuda:1", 1, a torch.device.

    Raises:
        ArgumentError: formats or sizes that do not fit.
    """

    def __init__(
        self,
        k_format: str,
        v_format: str,
        *,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_size: int = 128,
        sequences: int = 64,
        max_tokens: int | None = None,
        layers: int = 1,
        residual: int | None = None,
        sink_tokens: int | None = None,
        k_static: torch.Tensor | None = None,
        v_static: torch.Tensor | None = None,
        device: str | int | torch.device = "cuda",
    ) -> None:

        _, sink_tokens = kept_in_f16(k_format, residual, sink_tokens)
        self.layout, device = CacheLayout(k_format, v_format, head_dim, sink_tokens), device_of(device)
        words, numbers = page_words(self.layout, page_size), dict(kv_heads=kv_heads, pages=pages, sequences=sequences)
        numbers |= {"layers": layers} | ({} if max_tokens is None else {"max_tokens": max_tokens})
        for name, value in numbers.items():
            if type(value) is not int or not 1 <= value < launching.LARGEST:
                constraint = f"must be an integer, 1..{launching.LARGEST - 1}"
                raise ArgumentError(name, value, constraint, "ask for fewer, or for at least one")
        residual = residual_of(self.layout, residual)
        self.max_tokens = min(pages * page_size, launching.LARGEST - 1) if max_tokens is None else max_tokens
        self.table_width = min(-(-self.max_tokens // page_size), pages)
        self.pages = _zeros("pages", (layers, pages, kv_heads, words), device)
        self.residual = None
        if residual:
            size = (layers, sequences, kv_heads, residual_words(self.layout, residual))
            self.residual = _zeros("sequences", size, device)
        self.static = tuple(
            spread_static(name, s, fmt.static, (layers, kv_heads, head_dim), self.pages.device)
            for name, s, fmt in (("k_static", k_static, self.layout.k), ("v_static", v_static, self.layout.v))
        )
        self.residual_tokens, self.slides = residual, slides(self.layout, residual)
        self.table = PageTable(pages, page_size, sequences, lambda tokens: self.layout.packed(tokens, residual))

    # -- sequences -----------------------------------------------------------------------------------------------------
    def new(self) -> int:
        """An empty sequence. Raises CacheFullError where all slots are taken."""
        return self.table.new()

    def fork(self, sequence: int) -> int:
        """A sequence that begins with the same tokens. Pages are shared until one of the two writes to them; the
        residual block is copied: the tokens of `extend` must be stored in every layer before.

        Raises:
            CacheFullError: all slots are taken. ArgumentError: tokens of the newest `extend` were not stored by a
                method of its batch. That is not known after `extend(into=...)`, as replays of a graph store unseen,
                and of layers that `Batch.layer` was called for: call it where other means store the tokens.
        """
        unstored = self.table.get(sequence).unstored
        if unstored is not None and unstored.layers and not unstored.unseen:
            constraint = f"has new tokens that are not stored in layers {sorted(unstored.layers)}"
            raise ArgumentError("sequence", sequence, constraint, "append() or store() them in every layer before")
        made = self.table.fork(sequence)
        if self.residual is not None:
            source, target = (self.table.get(s).slot for s in (sequence, made))
            try:
                self.residual[:, target].copy_(self.residual[:, source])
            except BaseException:
                self.table.free(made)
                raise
        return made

    def free(self, sequence: int) -> None:
        """Forget a sequence; pages that nobody else holds are free again, and its batches refuse to be used."""
        self.table.free(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the newest tokens of a sequence, as speculative decoding does with those that were rejected; pages
        that only they lie in are free again, and batches that were made before refuse to be used.

        A residual ring goes back as far as it still holds what was newest then, unless it becomes empty. That is
        counted from the longest that the sequence was: 17 tokens at least, of channel-wise keys to the last full group.
        Without a ring any length will do.

        Raises:
            ArgumentError: an unknown sequence, more tokens than it has, or fewer than its ring remembers.
        """
        self.check_truncate(sequence, length)
        self.table.truncate(sequence, length)

    def check_truncate(self, sequence: int, length: int) -> None:
        """Raise what `truncate` would."""
        found, ring = self.table.get(sequence), self.residual_tokens
        if type(length) is not int or not 0 <= length <= found.length:
            constraint = f"must be a number of tokens that sequence {sequence} has, 0..{found.length}"
            raise ArgumentError("length", length, constraint, "extend() adds tokens")
        if ring and length:
            longest = max(found.longest, found.length)
            oldest = (
                self.layout.packed(longest, ring) if self.layout.k.group else ((longest - 1) // 16 - ring // 16) * 16
            )
            if self.layout.packed(length, ring) < oldest:
                least = next(n for n in range(length, found.length + 1) if self.layout.packed(n, ring) >= oldest)
                constraint = f"must be at least {least}: older tokens have left the residual ring of {ring}"
                raise ArgumentError("length", length, constraint, "fork() before tokens that may be dropped")

    def grow(self, *, pages: int = 0, sequences: int = 0, max_tokens: int = 0) -> None:
        """Have at least so many pages, slots of sequences, and tokens of one sequence. What is held stays; batches that
        were made before refuse to be used. Old and new pages are in memory together for a moment.

        Raises:
            ArgumentError: no such memory, or a sequence of too many tokens; nothing has changed.
        """
        layers, held, heads, words = self.pages.shape
        pages, slots = max(pages, held), max(sequences, self.table.slots)
        most = max(max_tokens, self.max_tokens)
        if most >= launching.LARGEST:
            constraint = f"must be an integer, 1..{launching.LARGEST - 1}"
            raise ArgumentError("max_tokens", most, constraint, "ask for fewer")
        larger, ring = self.pages, self.residual
        if pages > held:
            larger = _zeros("pages", (layers, pages, heads, words), self.pages.device)
            larger[:, :held] = self.pages
        if ring is not None and slots > ring.shape[1]:
            ring = _zeros("sequences", (layers, slots, *self.residual.shape[2:]), self.pages.device)
            ring[:, : self.residual.shape[1]] = self.residual
        self.pages, self.residual, self.max_tokens = larger, ring, most
        self.table_width = min(-(-most // self.table.page_size), pages)
        self.table.grow(pages, slots)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self.table.get(sequence).length

    def extend(self, new: Mapping[int, int], into: Batch | None = None, *, reserve: int = 0) -> Batch:
        """Make room for new[sequence] more tokens of each sequence; the batch that stores and reads them.

        The lengths count the new tokens from now on: store them in every layer before decoding, and before `fork`.
        Pages that are shared and will be written are copied: other batches of these sequences refuse to be used.

        Args:
            into: a batch of as many sequences that becomes this one, in the same device tensors, for captured CUDA
                graphs. What a replay stores is not checked.
            reserve: further tokens of each sequence that get pages now; `Batch.advance` counts them one after another,
                so that a decoding loop asks the host for nothing.

        Raises:
            CacheFullError: too few free pages. ArgumentError: an unknown sequence, too many tokens. Nothing has changed
                then, nor, but for `into`, after any other error (of the GPU's memory, say).
        """
        if not isinstance(new, Mapping):
            raise ArgumentError("new", type(new).__name__, "must map sequences to numbers of tokens", "pass {s: 1}")
        if type(reserve) is not int or reserve < 0:
            raise ArgumentError("reserve", reserve, "must be a number of tokens", "leave it out for none")
        new = {s: int(count) if isinstance(count, Integral) else count for s, count in new.items()}
        for sequence, count in new.items():
            if isinstance(count, Integral) and self.length(sequence) + count + reserve > self.max_tokens:
                seen = f"{self.length(sequence)} + {count + reserve}"
                raise ArgumentError("new", seen, f"a sequence has at most {self.max_tokens} tokens", "free it")
        if into is not None and (getattr(into, "cache", None) is not self or len(into.sequences) != len(new)):
            seen = len(into.sequences) if isinstance(into, Batch) else type(into).__name__
            constraint = f"must be a batch of {len(new)} sequences of this cache"
            raise ArgumentError("into", seen, constraint, "make a batch of its own")
        made: list[Batch] = []

        def use(copies: list[tuple[int, int]]) -> None:
            if copies:
                source, target = (list(part) for part in zip(*copies))
                self.pages[:, target] = self.pages[:, source]
            made.append(Batch(self, new, reserve) if into is None else into._describe(new, None, reserve))

        self.table.extend(new, use, reserve)
        return made[0]

    def batch(self, sequences: Iterable[int]) -> Batch:
        """The batch that reads these sequences, without new tokens.

        Raises:
            ArgumentError: no sequences of this cache, or one that is named twice.
        """
        try:
            sequences = list(sequences)
        except TypeError:
            raise ArgumentError("sequences", type(sequences).__name__, "must be several", "pass [sequence]") from None
        for sequence in sequences:
            self.table.get(sequence)
        if len(set(sequences)) < len(sequences):
            raise ArgumentError("sequences", sequences, "must be different", "name each once, or fork()")
        return Batch(self, dict.fromkeys(sequences, 0))

    def usage(self) -> Usage:
        """How much memory is allocated and in use."""
        layers, pages = self.pages.shape[:2]
        found = self.table.sequences.values()
        page_bytes = 4 * self.pages[0, 0].numel() * layers
        slot_bytes = 0 if self.residual is None else 4 * self.residual[0, 0].numel() * layers
        tokens = sum(s.length for s in found)
        return Usage(
            allocated=page_bytes * pages + slot_bytes * (0 if self.residual is None else self.residual.shape[1]),
            used=page_bytes * (pages - self.table.free_pages) + slot_bytes * len(found),
            f16=4 * self.layout.head_dim * self.pages.shape[2] * layers * tokens,
            pages=pages, free_pages=self.table.free_pages, shared_pages=self.table.shared_pages,
            sequences=len(found), tokens=tokens,
        )  # fmt: skip


class Batch:
    """Some sequences of a `KVCache` as kernels see them: lengths, block table and slots on the device.

    Once one of the sequences is freed, or `extend` copies a page of it, the block table names pages of others: all
    methods raise ArgumentError, and new tokens that were not stored are lost. Replays of a captured graph, and traced
    calls, are not checked. With a residual block, a batch reads right until newer tokens of its sequences are stored.
    """

    def __init__(self, cache: KVCache, new: Mapping[int, int], reserve: int = 0) -> None:
        self.cache = cache
        self._unstored = Unstored(len(cache.pages))
        self._describe(new, self._unstored, reserve)

    def _describe(self, new: Mapping[int, int], unstored: Unstored | None, reserve: int = 0) -> Batch:
        """This batch, of new[sequence] new tokens of each sequence from now on, in the tensors that it has."""
        import numpy as np
        import torch

        cache, counts = self.cache, [int(count) for count in new.values()]
        found = [cache.table.get(s) for s in new]
        table = np.zeros((len(found), cache.table_width), np.int32)
        for row, sequence in zip(table, found):
            row[: len(sequence.pages)] = sequence.pages
        facts = {
            "lengths": np.array([s.length for s in found], np.int32),
            "table": table,
            "slots": np.array([s.slot for s in found], np.int32),
            "starts": np.array([0, *accumulate(counts)], np.int32),
        }
        with torch.inference_mode(False):  # so that they can be written to outside of it
            made = {name: torch.from_numpy(values).to(cache.pages.device) for name, values in facts.items()}
        for name, tensor in made.items():
            held = getattr(self, name, None)
            setattr(self, name, tensor if held is None else held.copy_(tensor))
        self.sequences, self.new = list(new), counts
        self.reserved = reserve
        self.max_length = max((s.length for s in found), default=0) + reserve
        self.mean_length = -(-sum(s.length for s in found) // max(1, len(found))) + reserve
        self._layers: dict[int, PackedCache] = {}
        for sequence, count in zip(found, counts):
            if count:
                sequence.unstored = unstored
        if unstored is None:
            self._unstored = Unstored(len(cache.pages))  # what it stores from now on says nothing of tokens before
        self._generations = [(s, s.generation) for s in found]
        self._generation = cache.table.generation
        return self

    def layer(self, layer: int = 0) -> PackedCache:
        """The sequences' keys and values in one layer; the same object again, so that it is checked once. What is done
        with it is not seen by the cache."""
        made = self._view(layer)
        self._stored(layer)
        return made

    def _view(self, layer: int) -> PackedCache:
        import torch

        cache = self.cache
        if not torch.compiler.is_compiling() and self._generation != cache.table.generation:  # no guards on counters
            self._check_current()
        if type(layer) is not int or not 0 <= layer < len(cache.pages):
            raise ArgumentError("layer", layer, f"must be 0..{len(cache.pages) - 1}", "see KVCache(layers=...)")
        if layer in self._layers:
            return self._layers[layer]
        k_static, v_static = (None if s is None else s[layer] for s in cache.static)
        made = PackedCache(
            cache.layout, cache.pages[layer], self.lengths, max(self.max_length, 1), block_table=self.table,
            page_size=cache.table.page_size, residual=None if cache.residual is None else cache.residual[layer],
            slots=self.slots, k_static=k_static, v_static=v_static, mean_length=self.mean_length,
        )  # fmt: skip
        if not torch.compiler.is_compiling():  # a traced view of the pages is of its graph alone
            self._layers[layer] = made
        return made

    def append(self, k: SupportsDLPack, v: SupportsDLPack, layer: int = 0, **options: Any) -> None:
        """Store the new tokens k, v [B, q_len, Hkv, D] of one layer, q_len for each sequence; see `append`.

        Raises:
            ArgumentError: another number of tokens than `extend` made room for, and as `append`.
        """
        if dlpack.is_foreign(k):
            return dlpack.call(self.append, locals())
        launching.check_tensor(k, "k", "[B, q_len, Hkv, D]")
        tokens = 1 if k.dim() == 3 else k.shape[1] if k.dim() == 4 else None
        if tokens is not None and any(count != tokens for count in self.new):
            constraint = f"must have as many tokens as extend was asked for, {self.new}"
            raise ArgumentError("k", list(k.shape), constraint, "pass all of them; store takes ragged batches")
        entry.append(self._view(layer), k, v, **options)
        self._stored(layer)

    @property
    def slides(self) -> bool:
        """Whether the newest tokens lie in a ring that packs a tile at a time, which `rope_append` does not store."""
        return self.cache.slides

    def rope_append(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer: int = 0, **options: Any
    ) -> torch.Tensor:
        """Store the new tokens of one layer, q_len for each sequence, as their product left them; see
        `entry.rope_append`.

        Returns:
            q [B, q_len, heads, D], normed where the layer does so, and turned.

        Raises:
            ArgumentError: another number of tokens than `extend` made room for, and as `rope_append`.
        """
        import torch

        if type(qkv) is not torch.Tensor or qkv.layout is not torch.strided or qkv.dim() != 2 or qkv.requires_grad:
            self._check_tokens(qkv=qkv)
        q = entry.rope_append(self._view(layer), qkv, cos, sin, **options)
        self._stored(layer)
        return q

    def store(self, k: SupportsDLPack, v: SupportsDLPack, layer: int = 0, **options: Any) -> None:
        """Store the new tokens k, v [tokens of all sequences in turn, Hkv, D] of one layer; see `store`.

        Raises:
            ArgumentError: another number of tokens than `extend` made room for, and as `store`.
        """
        if dlpack.is_foreign(k):
            return dlpack.call(self.store, locals())
        self._check_tokens(k=k, v=v)
        entry.store(self._view(layer), k, v, self.starts, max(self.new, default=0), **options)
        self._stored(layer)

    def prefill(self, q: Array, layer: int = 0, **options: Any) -> Array:
        """Attention of the new tokens q [tokens of all sequences in turn, Hq, D] of one layer, stored before, or given
        as k and v and stored afterwards; see `prefill`.

        Raises:
            ArgumentError: another number of tokens than `extend` made room for, and as `prefill`.
        """
        if dlpack.is_foreign(q):
            return dlpack.call(self.prefill, locals())
        self._check_tokens(q=q)
        return entry.prefill(q, self._view(layer), self.starts, max(self.new, default=0), **options)

    def decode(self, q: Array, layer: int = 0, **options: Any) -> Array:
        """Attention of the newest tokens q [B, q_len, Hq, D] in one layer; see `decode`."""
        return entry.decode(q, self._view(layer), **options)

    def advance(self, lengths: bool = True) -> None:
        """Count as many new tokens of each sequence as before once more, in the room that `extend(reserve=)` kept.

        What the batch stores from now on are those tokens. They are stored unseen: nothing checks that all layers
        were.

        Args:
            lengths: whether to add to `lengths` on the device, too; False where a captured graph has done it.

        Raises:
            ArgumentError: the room is used up, or the sequences differ in new tokens.
        """
        counts = set(self.new)
        if len(counts) > 1:
            raise ArgumentError("new", self.new, "must be as many tokens of each sequence", "call extend() again")
        count = counts.pop() if counts else 0
        if count > self.reserved:
            seen = f"{count} of {self.reserved}"
            raise ArgumentError("reserve", seen, "has too few tokens left", "call extend() with a larger reserve")
        self._check_current()
        self.reserved -= count
        for sequence, _ in self._generations:
            sequence.length += count
            sequence.unstored = None
        if lengths:
            self.lengths.add_(count)

    def _check_current(self) -> None:
        """Raise ArgumentError for a sequence whose pages are others than when the batch was made."""
        for sequence, (found, generation) in zip(self.sequences, self._generations):
            if found.generation != generation:
                constraint = "was freed or changed after this batch was made, whose pages may hold other sequences now"
                remedy = "call extend() or batch() again"
                if any(self.new):
                    remedy += "; tokens of this one that are not stored are lost, free their sequences"
                raise ArgumentError("sequence", sequence, constraint, remedy)
        self._generation = self.cache.table.generation

    def _stored(self, layer: int) -> None:
        """Note that the new tokens of a layer are, or may be, stored."""
        import torch

        if torch.compiler.is_compiling():
            self._unstored.unseen = True
        else:
            self._unstored.layers.discard(layer)

    def _check_tokens(self, **rows: torch.Tensor) -> None:
        """Kernels take the number of rows from `starts`: rows that are not there would be read past the end."""
        for name, x in rows.items():
            launching.check_tensor(x, name, "[new tokens, heads, D]")
            launching.check_no_grad(x, "attention", name)
            if x.dim() == 3 and len(x) != sum(self.new):
                constraint = f"must have the {sum(self.new)} tokens that extend was asked for, {self.new}"
                raise ArgumentError(name, list(x.shape), constraint, "pass those of all sequences, one after another")


def _zeros(name: str, size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 zeros; ArgumentError where there is no such memory."""
    import torch

    try:
        with torch.inference_mode(False):  # so that it can be written to outside of it
            return torch.zeros(size, dtype=torch.int32, device=device)
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        constraint = f"takes {4 * prod(size)} bytes on {device}, which could not be allocated ({said})"
        raise ArgumentError(name, list(size), constraint, "ask for fewer or smaller ones") from error
