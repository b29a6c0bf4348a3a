"""A packed KV cache as kernels read it: contiguous or paged storage, lengths on the device, f16 residual blocks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops import dlpack, weights
from terrazzo.ops.attention.cache.format import kept_in_f16
from terrazzo.ops.attention.cache.layout import CacheLayout, QuantizedBlock, residual_layout
from terrazzo.ops.attention.cache.quantizer import F16_MAX, decoded, encode, rotate, rotated_exactly

MAX_RESIDUAL = 256
"""Tokens: a warp of the kernel that packs a block holds 16 of them."""
LARGEST = 1 << 31
"""Kernels address the words of a page, and of a residual block, with 32-bit offsets; pages with 64."""

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import SupportsDLPack


@dataclass(frozen=True, eq=False)
class PackedCache:
    """Keys and values of B sequences.

    The newest tokens of a sequence lie in its residual ring, in f16 and of rotated formats rotated; the others are
    packed (`CacheLayout.packed`). A ring of N tokens packs its oldest 16 once it holds N; for channel-wise keys it
    holds a group of tokens, and packs all of them once it is full. It has one tile more than it has tokens for: token p
    lies in tile p // 16 % tiles, so that new tokens never overwrite those that are about to be packed. Behind the ring
    lies the tile of the `layout.sink_tokens` first tokens, which are read from there once they are packed.
    Unwritten storage must hold finite numbers: allocate it with zeros. Operators check shapes and dtypes, once for each
    object; the values of lengths, block_table and slots lie on the device and are not read: `check_values` does that.

    Attributes:
        layout: formats and byte order.
        pages: int32 [P, Hkv, words of a page]; contiguous: page b is sequence b, as long as the longest may grow.
        lengths: int32 [B], tokens of each sequence.
        max_length: host-side bound of `lengths`, for the number of splits.
        mean_length: host-side guess of their average, 0 for none. Well below max_length it makes `decode` split each
            sequence by its own length, whatever that is on the device; else all are split like the longest.
        block_table: int32 [B, most pages] of page numbers, or None when contiguous.
        page_size: tokens of a page, 0 when contiguous.
        residual: int32 [slots, Hkv, (residual_tokens / 16 + 1 + sink_tokens / 16) * words of an f16 tile], or None.
        slots: int32 [B], the residual ring of each sequence, or None for its own number.
        k_static, v_static: f32 [Hkv, D] scales of static formats, 2^-100..2^100.
    """

    layout: CacheLayout
    pages: torch.Tensor
    lengths: torch.Tensor
    max_length: int
    block_table: torch.Tensor | None = None
    page_size: int = 0
    residual: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    k_static: torch.Tensor | None = None
    v_static: torch.Tensor | None = None
    mean_length: int = 0

    @property
    def kv_heads(self) -> int:
        """Number of kv heads."""
        return self.pages.shape[1]

    @property
    def residual_tokens(self) -> int:
        """Tokens of a residual ring, 0 without one."""
        return self._ring

    @cached_property
    def _ring(self) -> int:
        """`residual_tokens`, found once."""
        if self.residual is None:
            return 0
        tiles = self.residual.shape[2] // residual_layout(self.layout).tile_words
        return (tiles - 1) * 16 - self.layout.sink_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of pages and residual blocks."""
        return 4 * self.pages.numel() + (0 if self.residual is None else 4 * self.residual.numel())

    def to(self, device: str | int | torch.device) -> PackedCache:
        """The cache with every tensor on a device; ArgumentError for what is none."""
        to, tensors = device_of(device), {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: t.to(to) for n, t in tensors.items() if hasattr(t, "to")})

    def check(self) -> None:
        """Raise ArgumentError unless the tensors are such as the attributes' description says; nothing is read."""
        if self.__dict__.get("_checked"):
            return
        layout, page, table = self.layout, self.page_size, self.block_table
        if not isinstance(layout, CacheLayout):
            raise ArgumentError("layout", type(layout).__name__, "must be a CacheLayout", "CacheLayout('int4', ...)")
        self._tensor("pages", "int32", (None, None, None), "see PackedCache", 16)
        self._tensor("lengths", "int32", (None,), "a number of tokens for each sequence")
        batch = len(self.lengths)
        pages, heads, words = self.pages.shape
        if type(page) is not int:  # False would be found as the kernel of 0
            raise ArgumentError("page_size", page, "must be a number of tokens", "0 for contiguous storage")
        if (table is None) == bool(page):
            constraint = "goes with a page_size, which is 0 without one"
            raise ArgumentError("block_table", _shape(table), constraint, "pass both")
        if table is not None:
            self._tensor("block_table", "int32", (None, None), "numbers of pages")
            if len(table) < batch:
                constraint = f"must have {batch} rows"
                raise ArgumentError("block_table", list(table.shape), constraint, "pass one for each sequence")
            if words != page_words(layout, page):
                constraint = f"must have {page_words(layout, page)} words for {page} tokens of {layout.identity}"
                raise ArgumentError("pages", list(self.pages.shape), constraint, "allocate layout.words(page_size)")
        elif words % layout.block_words or not words or pages < batch:
            constraint = f"must be [{batch} or more, heads, a multiple of {layout.block_words} words]"
            raise ArgumentError("pages", list(self.pages.shape), constraint, "allocate layout.words(tokens)")
        if heads < 1 or heads * words >= LARGEST:
            constraint = f"a page must have heads, and less than {LARGEST} words"
            raise ArgumentError("pages", list(self.pages.shape), constraint, "store it in pages, or in smaller ones")
        self._check_residual(batch, heads)
        for name, fmt in (("k_static", layout.k), ("v_static", layout.v)):
            given = getattr(self, name)
            if (given is not None) != (fmt.static):
                constraint = f"format {fmt} {'takes none' if given is not None else 'needs its scales'}"
                raise ArgumentError(name, _shape(given), constraint, "see KVFormat")
            if given is not None:
                self._tensor(name, "float32", (heads, layout.head_dim), "one scale for each dimension")
        if type(self.max_length) is not int or self.max_length < 0:
            raise ArgumentError("max_length", self.max_length, "must be a number of tokens", "bound the lengths")
        if type(self.mean_length) is not int or self.mean_length < 0:
            raise ArgumentError(
                "mean_length", self.mean_length, "must be a number of tokens", "0 where it is not known"
            )
        self.__dict__["_checked"] = True

    def _check_residual(self, batch: int, heads: int) -> None:
        """Raise ArgumentError unless there is a residual block where the keys need one, and it is of a ring's size."""
        if self.residual is None:
            residual_of(self.layout, 0)
            return
        tile = residual_layout(self.layout).tile_words
        self._tensor("residual", "int32", (None, heads, None), "see PackedCache", 16)
        slots, _, words = self.residual.shape
        if (
            words % tile
            or words < (2 + self.layout.sink_tokens // 16) * tile
            or heads * words >= LARGEST
            or (self.slots is None and slots < batch)
        ):
            constraint = f"must be [a block for each of {batch} sequences, {heads}, two or more tiles of {tile} words]"
            raise ArgumentError("residual", list(self.residual.shape), constraint, "see residual_words")
        residual_of(self.layout, self.residual_tokens)
        if self.slots is not None:
            self._tensor("slots", "int32", (batch,), "the residual block of each sequence")

    def _tensor(self, name: str, dtype: str, shape: tuple[int | None, ...], remedy: str, align: int = 1) -> None:
        """Raise ArgumentError unless a tensor is contiguous, beside the pages, and of this form; None: any size."""
        import torch

        t, device = getattr(self, name), getattr(self.pages, "device", None)
        dense = isinstance(t, torch.Tensor) and t.layout is torch.strided
        fits = dense and weights.dtype_name(t) == dtype and t.dim() == len(shape) and t.is_contiguous()
        if not fits or t.device != device or any(w not in (None, h) for w, h in zip(shape, t.shape)):
            seen = type(t).__name__
            if isinstance(t, torch.Tensor):
                seen = f"{weights.dtype_name(t)} {list(t.shape)} on {t.device}" + ("" if dense else f", {t.layout}")
            wanted = ", ".join("*" if size is None else str(size) for size in shape)
            raise ArgumentError(name, seen, f"must be contiguous {dtype} [{wanted}] on {device}", remedy)
        if t.data_ptr() % align:
            constraint = f"must begin at a multiple of {align} bytes, which kernels copy at a time"
            raise ArgumentError(name, f"a tensor at {t.data_ptr():#x}", constraint, "allocate it alone, or clone it")

    def check_values(self) -> None:
        """Raise ArgumentError for lengths, pages or slots outside of the storage, and static scales out of range.

        For debugging: it waits for the GPU.
        The lengths must count tokens that are stored: before `prefill` with k and v they count more.
        """
        self.check()
        for name, fmt in (("k_static", self.layout.k), ("v_static", self.layout.v)):
            size = (self.pages.shape[1], self.layout.head_dim)
            check_static(name, getattr(self, name), fmt.static, size)
        lengths = self.lengths.tolist()
        packed = [self.layout.packed(n, self.residual_tokens) for n in lengths]
        if self.block_table is None:
            room = [self.pages.shape[2] // self.layout.block_words * self.layout.block_tokens] * len(lengths)
        else:
            room = [self.block_table.shape[1] * self.page_size] * len(lengths)
        for b, (length, held, most) in enumerate(zip(lengths, packed, room)):
            if not 0 <= length <= self.max_length or held > most:
                constraint = f"must be in 0..{self.max_length}, max_length, and {most} tokens find room"
                raise ArgumentError("lengths", length, f"{constraint} (sequence {b})", "allocate more pages")
            used = [] if self.block_table is None else self.block_table[b, : -(-held // (self.page_size or 1))].tolist()
            for page in used:
                if not 0 <= page < len(self.pages):
                    constraint = f"must be in 0..{len(self.pages) - 1}, the pages (sequence {b})"
                    raise ArgumentError("block_table", page, constraint, "see KVCache, which counts them")
        if self.slots is not None and self.residual is not None:
            found = self.slots.tolist()
            if len(set(found)) < len(found) or not all(0 <= slot < len(self.residual) for slot in found):
                constraint = f"must be different numbers in 0..{len(self.residual) - 1}"
                raise ArgumentError("slots", found, constraint, "one residual block for each sequence")

    def packed_words(self, sequence: int, head: int, tokens: int) -> torch.Tensor:
        """Blocks [n, block_words] that hold the first `tokens` tokens of one head."""
        if self.block_table is None:
            words = self.pages[sequence, head]
        else:
            wanted = self.block_table[sequence, : -(-tokens // self.page_size)].long()
            words = self.pages[wanted, head].reshape(-1)
        blocks = -(-tokens // self.layout.block_tokens)
        return words[: blocks * self.layout.block_words].reshape(blocks, self.layout.block_words)

    def dequantize(self, sequence: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [length, D], float64, of one head of one sequence, from the stored bytes, rotated
        back where the format rotates."""
        parts = zip(self.stored(sequence, head), (self.layout.k, self.layout.v))
        k, v = (rotated_exactly(x) if fmt.rotation else x for x, fmt in parts)
        return k, v

    def stored(self, sequence: int, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same as they are stored: rotated where the format rotates."""
        import torch

        length = int(self.lengths[sequence])
        packed = self.layout.packed(length, self.residual_tokens)
        made = self.blocks(sequence, head, packed)
        static = [None if s is None else s[head] for s in (self.k_static, self.v_static)]
        parts = [decoded(q, f, s)[:packed] for q, f, s in zip(made, (self.layout.k, self.layout.v), static)]
        if self.residual is not None:
            slot = sequence if self.slots is None else int(self.slots[sequence])
            layout = residual_layout(self.layout)
            spare = layout.k
            tiles = self.residual[slot, head].reshape(-1, layout.block_words)
            ring, sink = tiles.split([self.residual_tokens // 16 + 1, self.layout.sink_tokens // 16])
            rest = layout.unpack(ring.roll(-(packed // 16), 0))
            parts = [torch.cat([p, decoded(q, spare)[: length - packed]]) for p, q in zip(parts, rest)]
            if packed and len(sink):
                parts = [torch.cat([decoded(q, spare), p[16:]]) for p, q in zip(parts, layout.unpack(sink))]
        return parts[0], parts[1]

    def blocks(self, sequence: int, head: int, tokens: int) -> tuple[QuantizedBlock, QuantizedBlock]:
        """Codes and parameters of whole blocks that hold the first `tokens` tokens."""
        return self.layout.unpack(self.packed_words(sequence, head, tokens))


def page_words(layout: CacheLayout, page_size: int) -> int:
    """Words of a page of one head.

    Raises:
        ArgumentError: no positive multiple of the layout's block, or as many words as `LARGEST`.
    """
    if type(page_size) is not int or page_size < 1 or page_size % layout.block_tokens:
        constraint = f"must be a positive multiple of {layout.block_tokens} tokens for {layout.k_format} keys"
        raise ArgumentError("page_size", page_size, constraint, "use 128")
    words = layout.words(page_size)
    if words >= LARGEST:
        constraint = f"a page must have less than {LARGEST} words, it has {words} for each head"
        raise ArgumentError("page_size", page_size, constraint, "use 128")
    return words


def residual_of(layout: CacheLayout, residual: int | None) -> int:
    """Tokens of the residual ring that a cache of this layout gets; None asks for what it needs.

    Raises:
        ArgumentError: no multiple of 16 up to 256, another size than the channel group of the keys, or none where first
            tokens stay f16.
    """
    group = layout.k.group
    residual = kept_in_f16(layout.k, residual)[0]
    if type(residual) is not int or residual % 16 or not 0 <= residual <= MAX_RESIDUAL or (group and residual != group):
        constraint = f"must be {group or f'a multiple of 16 up to {MAX_RESIDUAL}'} for {layout.k} keys"
        raise ArgumentError("residual", residual, constraint, "leave it out")
    if layout.sink_tokens and not residual:
        constraint = f"must be at least 16 where the {layout.sink_tokens} first tokens stay f16, beside the ring"
        raise ArgumentError("residual", residual, constraint, "use 128, or sink_tokens=0")
    if residual and layout.v.static:
        constraint = "static values cannot join the f16 tokens of a residual block"
        raise ArgumentError("v_format", layout.v_format, constraint, "use token-wise values")
    return residual


def residual_words(layout: CacheLayout, residual: int) -> int:
    """int32 words of the tiles of a residual ring of `residual` tokens, and of the first tokens."""
    return residual_layout(layout).words(residual + 16 + layout.sink_tokens)


@dlpack.accepting
def pack_cache(
    k: SupportsDLPack,
    v: SupportsDLPack,
    k_format: str,
    v_format: str,
    *,
    lengths: SupportsDLPack | None = None,
    page_size: int = 0,
    residual: int | None = None,
    sink_tokens: int | None = None,
    k_static: SupportsDLPack | None = None,
    v_static: SupportsDLPack | None = None,
    permutation: SupportsDLPack | None = None,
) -> PackedCache:
    """Quantize and pack whole sequences in torch, on the device of k; the definition of what kernels write.

    Args:
        k_format, v_format: names of `FORMATS`.
        k, v: float [B, Hkv, T, D]; tokens at and past a sequence's length are stored as zeros.
        lengths: integers [B], 0..T, default T for all.
        page_size: tokens of a page, 0 for contiguous storage.
        residual: tokens of the f16 residual ring; default the channel group of the keys, 128 for rotated ones, or none.
            0: none. sink_tokens: first tokens that stay f16, 0 or 16; they need a ring. Default: 16 for rotated keys of
            two bits.
        k_static, v_static: f32 [Hkv, D] for static formats; 2^-100..2^100. A checkpoint's k_scale and v_scale, [] or
            [1], and scales of each head, [Hkv, 1], are repeated.
        permutation: order in which pages are handed out, int64 [pages], each once; default in turn.

    Raises:
        ArgumentError: formats, head_dim or sizes that do not fit.
    """
    import torch

    k, v = weights.as_tensor("k", k), weights.as_tensor("v", v)
    if k.dim() != 4 or 0 in k.shape or not k.is_floating_point():
        seen = f"{k.dtype} {list(k.shape)}"
        raise ArgumentError("k", seen, "must be float [B, Hkv, T, D], nothing empty", "pass keys by head")
    if v.shape != k.shape or not v.is_floating_point() or v.device != k.device:
        seen = f"{v.dtype} {list(v.shape)} on {v.device}"
        raise ArgumentError("v", seen, f"must be float {list(k.shape)} on {k.device}, as k", "pass values by head")
    batch, heads, tokens, head_dim = k.shape
    layout = CacheLayout(k_format, v_format, head_dim, kept_in_f16(k_format, residual, sink_tokens)[1])
    residual = residual_of(layout, residual)
    k_static, v_static = (
        spread_static(name, given, fmt.static, (heads, head_dim), k.device)
        for name, given, fmt in (("k_static", k_static, layout.k), ("v_static", v_static, layout.v))
    )
    k, v = (
        rotate(x) if fmt.rotation else x.float().clamp(-F16_MAX, F16_MAX).half() if residual else x
        for x, fmt in ((k, layout.k), (v, layout.v))
    )  # tokens pass through the f16 block, so what is packed does not depend on how they came
    device = k.device
    lengths = torch.full((batch,), tokens, device=device) if lengths is None else weights.as_tensor("lengths", lengths)
    if tuple(lengths.shape) != (batch,) or not weights.is_integer(lengths):
        seen = f"{lengths.dtype} {list(lengths.shape)}"
        raise ArgumentError("lengths", seen, f"must be integers [{batch}]", "pass the tokens of each sequence")
    if (value := weights.out_of_range(lengths, 0, tokens)) is not None:
        raise ArgumentError("lengths", value, f"must be in 0..{tokens}, the tokens of k", "pass longer k and v")
    lengths = lengths.to(device=device, dtype=torch.int32)
    unit = layout.block_tokens if page_size == 0 else page_size
    page_words(layout, unit)
    room = -(-tokens // unit) * unit
    unit = max(unit, layout.block_tokens)
    packed = layout.packed(lengths, residual)
    keep = torch.arange(room, device=device)[None, :] < packed[:, None]
    static = [None if s is None else s.unsqueeze(-2) for s in (k_static, v_static)]
    words = torch.empty(batch, heads, room // layout.block_tokens, layout.block_words, dtype=torch.int32, device=device)
    for b in range(batch):  # one at a time: bounds the temporary memory
        parts = []
        for x, fmt, s in zip((k, v), (layout.k, layout.v), static):
            padded = torch.nn.functional.pad(x[b], (0, 0, 0, room - tokens))
            parts.append(encode(torch.where(keep[b][None, :, None], padded, 0), fmt, s))
        words[b] = layout.pack(*parts)
    rest = _unpacked(k, v, layout, lengths, packed, residual) if residual else None
    facts = {"lengths": lengths, "max_length": tokens, "residual": rest, "k_static": k_static, "v_static": v_static}
    if not page_size:
        return PackedCache(layout, words.reshape(batch, heads, -1), **facts)
    pages = (
        words.reshape(batch, heads, room // page_size, -1)
        .transpose(1, 2)
        .reshape(batch * (room // page_size), heads, -1)
    )
    every = torch.arange(len(pages), device="cpu")
    order = every if permutation is None else weights.as_tensor("permutation", permutation)
    if not weights.is_integer(order) or not torch.equal(order.cpu().long().sort().values, every):
        seen = f"{order.dtype} {list(order.shape)}"
        raise ArgumentError("permutation", seen, f"must hold 0..{len(pages) - 1} once", "pass torch.randperm")
    stored = torch.zeros_like(pages, memory_format=torch.contiguous_format)  # a batch of 1 is a permuted view
    stored[order.to(device)] = pages
    table = order.to(device=device, dtype=torch.int32).reshape(batch, -1).contiguous()
    return PackedCache(layout, stored, block_table=table, page_size=page_size, **facts)


def _unpacked(
    k: torch.Tensor, v: torch.Tensor, layout: CacheLayout, lengths: torch.Tensor, packed: torch.Tensor, residual: int
) -> torch.Tensor:
    """The residual rings, then the first tokens, of sequences k, v [B, Hkv, T, D] in f16."""
    import torch

    (batch, heads, tokens, head_dim), spare = k.shape, residual_layout(layout)

    def picked(index: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        """f16 tiles [B, Hkv, tiles, words] of tokens index [B, n], zeros where they are not `inside`."""
        at = index.clamp(max=tokens - 1)[:, None, :, None].expand(-1, heads, -1, head_dim)
        parts = (torch.where(inside[:, None, :, None], x.gather(2, at), 0) for x in (k, v))
        return spare.pack(*(encode(x, spare.k) for x in parts))

    starts = packed.long()
    index = starts[:, None] + torch.arange(residual, device=k.device)
    tiles = torch.nn.functional.pad(picked(index, index < lengths[:, None]), (0, 0, 0, 1))
    turns = (starts // 16).tolist()
    tiles = torch.stack([t.roll(turn, 1) for t, turn in zip(tiles, turns)])
    if layout.sink_tokens:
        first = torch.arange(layout.sink_tokens, device=k.device).expand(batch, -1)
        tiles = torch.cat([tiles, picked(first, (packed > 0)[:, None].expand_as(first))], 2)
    return tiles.reshape(batch, heads, -1)


def device_of(device: str | int | torch.device) -> torch.device:
    """As `weights.device_of`, which speaks of weights."""
    try:
        return weights.device_of(device)
    except ArgumentError as error:
        if error.__cause__ is None:  # a device, but torch does not see it
            raise
        raise ArgumentError("device", device, "must be a device", error.remedy) from error.__cause__


def _shape(tensor: object) -> list[int] | str | None:
    """What to say of an argument that should not be there, or should."""
    return None if tensor is None else list(tensor.shape) if hasattr(tensor, "shape") else type(tensor).__name__


def check_static(name: str, scales: torch.Tensor | None, needed: bool, *shapes: tuple[int, ...]) -> None:
    """Raise ArgumentError unless scales are there where a format needs them, positive, and have one of these shapes."""
    _check_needed(name, scales, needed)
    if scales is None:
        return
    wanted, remedy = " or ".join(str(list(shape)) for shape in shapes), "pass one scale for each dimension"
    weights.check_floats(name, scales, wanted, remedy)
    if tuple(scales.shape) not in shapes:
        raise ArgumentError(name, list(scales.shape), f"must be float {wanted}", remedy)
    _check_range(name, scales)


def spread_static(
    name: str, scales: torch.Tensor | None, needed: bool, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor | None:
    """f32 scales of this shape on a device: those of a tensor (a checkpoint's k_scale: [] or [1]), of each layer or
    head ([layers, 1, 1], [Hkv, 1]) are repeated. Checks as `check_static`."""
    import torch

    _check_needed(name, scales, needed)
    if scales is None:
        return None
    inner = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape  # one layer goes without its dimension
    wanted, remedy = f"{list(inner)}, 1 for a dimension that shares a scale, or []", "pass one scale for each dimension"
    weights.check_floats(name, scales, wanted, remedy)
    found = tuple(scales.shape)
    fits = scales.numel() == 1 or any(
        len(found) == len(form) and all(have in (1, want) for have, want in zip(found, form)) for form in (shape, inner)
    )
    if not fits:
        raise ArgumentError(name, list(found), f"must be float {wanted}", remedy)
    _check_range(name, scales)
    scales = scales.reshape(()) if scales.numel() == 1 else scales
    with torch.inference_mode(False):  # so that it can be written to outside of it
        made = torch.empty(shape, dtype=torch.float32, device=device)
        return made.copy_(scales.detach().to(device=device, dtype=torch.float32).expand(shape))


def _check_needed(name: str, scales: torch.Tensor | None, needed: bool) -> None:
    if (scales is not None) != needed:
        constraint = "static formats need their scales, others take none"
        raise ArgumentError(name, _shape(scales), constraint, "see KVFormat")


def _check_range(name: str, scales: torch.Tensor) -> None:
    if not bool(((scales >= 2.0**-100) & (scales <= 2.0**100)).all()):
        low, high = scales.float().min().item(), scales.float().max().item()
        raise ArgumentError(name, f"{low:.3g}..{high:.3g}", "must be within 2^-100..2^100", "calibrate, or use 1")
