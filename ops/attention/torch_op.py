"""`torch.ops.terrazzo.attention_*`: the operators as torch.compile, torch.export and fake tensors see them."""

from __future__ import annotations

import torch
from terrazzo.ops.attention.cache.cache import PackedCache
from terrazzo.ops.attention.cache.layout import CacheLayout


def _fields(cache: PackedCache) -> tuple:
    """A cache as the arguments of an operator."""
    return (
        cache.pages, cache.lengths, cache.block_table, cache.residual, cache.slots, cache.k_static, cache.v_static,
        cache.layout.k_format, cache.layout.v_format, cache.layout.head_dim, cache.layout.sink_tokens, cache.page_size,
        cache.max_length, cache.mean_length,
    )  # fmt: skip


def _cache(
    pages, lengths, table, residual, slots, k_static, v_static, k_format, v_format, head_dim, sink, page, most, mean
):  # fmt: skip
    layout = CacheLayout(k_format, v_format, head_dim, sink)
    return PackedCache(layout, pages, lengths, most, table, page, residual, slots, k_static, v_static, mean)


def call_decode(q, cache, scale, softcap, window, sinks, quant=None, smooth=None, column_scales=False):
    """`decode` as one opaque node of a graph: (out, lse), and with `quant` q, scales and row sums of the codes."""
    facts = (*_fields(cache), scale, softcap, window, sinks)
    if quant is None and smooth is None and not column_scales:
        return torch.ops.terrazzo.attention_decode(q, *facts)
    return torch.ops.terrazzo.attention_decode_quantized(q, *facts, quant, smooth, column_scales)


def call_prefill(q, cache, cu_seqlens, most_new, k, v, scale, softcap, window, sinks):
    """`prefill` as one opaque node of a graph: (out, lse)."""
    facts = (cu_seqlens, most_new, k, v, scale, softcap, window, sinks)
    return torch.ops.terrazzo.attention_prefill(q, *_fields(cache), *facts)


def call_append(cache, k, v) -> None:
    """`append` as one opaque node of a graph."""
    torch.ops.terrazzo.attention_append(k, v, *_fields(cache))


def call_store(cache, k, v, cu_seqlens, most_new) -> None:
    """`store` as one opaque node of a graph."""
    torch.ops.terrazzo.attention_store(k, v, cu_seqlens, most_new, *_fields(cache))


def call_store_slots(cache, k, v, slot_mapping) -> None:
    """`store_slots` as one opaque node of a graph."""
    torch.ops.terrazzo.attention_store_slots(k, v, slot_mapping, *_fields(cache))


@torch.library.custom_op("terrazzo::attention_decode", mutates_args=())
def attention_decode(
    q: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
    residual: torch.Tensor | None,
    slots: torch.Tensor | None,
    k_static: torch.Tensor | None,
    v_static: torch.Tensor | None,
    k_format: str,
    v_format: str,
    head_dim: int,
    sink_tokens: int,
    page_size: int,
    max_length: int,
    mean_length: int,
    scale: float | None,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of q [B, q_len, Hq, D] and the fields of a PackedCache."""
    from terrazzo.ops.attention.decoding import op, reference

    cache = _cache(pages, lengths, block_table, residual, slots, k_static, v_static, k_format, v_format, head_dim,
                   sink_tokens, page_size, max_length, mean_length)  # fmt: skip
    if not q.is_cuda:
        out, lse, _ = reference.decode(q, cache, reference.Options(scale, softcap, window, sinks), bounded=False)
        return out.to(q.dtype), lse.float()
    return op.run(q, cache, scale=scale, softcap=softcap, window=window, sinks=sinks)


@attention_decode.register_fake
def _(q, *cache_and_options):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)


Coded = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""out, lse, codes, scales and row sums; sums that are not there have no elements."""


@torch.library.custom_op("terrazzo::attention_decode_quantized", mutates_args=())
def attention_decode_quantized(
    q: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
    residual: torch.Tensor | None,
    slots: torch.Tensor | None,
    k_static: torch.Tensor | None,
    v_static: torch.Tensor | None,
    k_format: str,
    v_format: str,
    head_dim: int,
    sink_tokens: int,
    page_size: int,
    max_length: int,
    mean_length: int,
    scale: float | None,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
    quant: str | None,
    smooth: torch.Tensor | None,
    column_scales: bool,
) -> Coded:
    """`attention_decode`, and codes of out's rows of Hq D values."""
    from terrazzo.ops.attention.decoding import codes, op, reference

    cache = _cache(pages, lengths, block_table, residual, slots, k_static, v_static, k_format, v_format, head_dim,
                   sink_tokens, page_size, max_length, mean_length)  # fmt: skip
    codes.check(q, quant, smooth, column_scales)
    if q.is_cuda:
        made = codes.codes_for(q, quant, smooth, column_scales)
        out, lse = op.run(q, cache, scale=scale, softcap=softcap, window=window, sinks=sinks, codes=made)
        return _five(out, lse, made.made)
    out, lse, _ = reference.decode(q, cache, reference.Options(scale, softcap, window, sinks), bounded=False)
    out = out.to(q.dtype)
    return _five(out, lse.float(), codes.encoded(out, quant, smooth, column_scales))


def _five(out: torch.Tensor, lse: torch.Tensor, made) -> Coded:
    from terrazzo.ops import quantized

    parts = quantized.tensors(made)
    return (out, lse, *parts, *(out.new_empty(0) for _ in range(3 - len(parts))))


@attention_decode_quantized.register_fake
def _(q, *cache_and_options):
    from terrazzo.ops import quantized
    from terrazzo.ops.attention.decoding import codes

    *_, quant, smooth, column_scales = cache_and_options
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    known = quant if quant in quantized.QUANTS else "int8"  # another form is refused by the node itself
    made = codes.Coding(known, smooth is not None, column_scales).room(q)
    return _five(out, q.new_empty(q.shape[:3], dtype=torch.float32), made)


@torch.library.custom_op("terrazzo::attention_prefill", mutates_args=())
def attention_prefill(
    q: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
    residual: torch.Tensor | None,
    slots: torch.Tensor | None,
    k_static: torch.Tensor | None,
    v_static: torch.Tensor | None,
    k_format: str,
    v_format: str,
    head_dim: int,
    sink_tokens: int,
    page_size: int,
    max_length: int,
    mean_length: int,
    cu_seqlens: torch.Tensor,
    most_new: int,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    scale: float | None,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of q [N, Hq, D], the fields of a PackedCache, and the new tokens or None."""
    from terrazzo.ops.attention.decoding import reference
    from terrazzo.ops.attention.prefilling import prefill_op, prefill_reference

    cache = _cache(pages, lengths, block_table, residual, slots, k_static, v_static, k_format, v_format, head_dim,
                   sink_tokens, page_size, max_length, mean_length)  # fmt: skip
    if not q.is_cuda:
        options = reference.Options(scale, softcap, window, sinks)
        out, lse, _ = prefill_reference.prefill(q, cache, cu_seqlens, options, k, v, bounded=False)
        return out.to(q.dtype), lse.float()
    options = dict(scale=scale, softcap=softcap, window=window, sinks=sinks)
    return prefill_op.run(q, cache, cu_seqlens, most_new, k=k, v=v, **options)


@attention_prefill.register_fake
def _(q, *cache_and_options):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("terrazzo::attention_append", mutates_args=("pages", "residual"))
def attention_append(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
    residual: torch.Tensor | None,
    slots: torch.Tensor | None,
    k_static: torch.Tensor | None,
    v_static: torch.Tensor | None,
    k_format: str,
    v_format: str,
    head_dim: int,
    sink_tokens: int,
    page_size: int,
    max_length: int,
    mean_length: int,
) -> None:
    """Stores k, v [B, q_len, Hkv, D] in place."""
    from terrazzo.ops.attention.writing import reference_writing, writing

    cache = _cache(pages, lengths, block_table, residual, slots, k_static, v_static, k_format, v_format, head_dim,
                   sink_tokens, page_size, max_length, mean_length)  # fmt: skip
    if not k.is_cuda:
        return reference_writing.append(cache, k, v)
    writing.run_append(cache, k, v, None)


@attention_append.register_fake
def _(k, v, *cache):
    return None


@torch.library.custom_op("terrazzo::attention_store", mutates_args=("pages", "residual"))
def attention_store(
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    most_new: int,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
    residual: torch.Tensor | None,
    slots: torch.Tensor | None,
    k_static: torch.Tensor | None,
    v_static: torch.Tensor | None,
    k_format: str,
    v_format: str,
    head_dim: int,
    sink_tokens: int,
    page_size: int,
    max_length: int,
    mean_length: int,
) -> None:
    """Stores k, v [tokens, Hkv, D] in place."""
    from terrazzo.ops.attention.writing import reference_writing, writing

    cache = _cache(pages, lengths, block_table, residual, slots, k_static, v_static, k_format, v_format, head_dim,
                   sink_tokens, page_size, max_length, mean_length)  # fmt: skip
    if not k.is_cuda:
        return reference_writing.store(cache, k, v, cu_seqlens)
    writing.run_store(cache, k, v, cu_seqlens, most_new, None)


@attention_store.register_fake
def _(k, v, cu_seqlens, most_new, *cache):
    return None


@torch.library.custom_op("terrazzo::attention_store_slots", mutates_args=("pages",))
def attention_store_slots(
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
    pages: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor | None,
    residual: torch.Tensor | None,
    slots: torch.Tensor | None,
    k_static: torch.Tensor | None,
    v_static: torch.Tensor | None,
    k_format: str,
    v_format: str,
    head_dim: int,
    sink_tokens: int,
    page_size: int,
    max_length: int,
    mean_length: int,
) -> None:
    """Stores k, v [tokens, Hkv, D] in place, where slot_mapping [tokens] says."""
    from terrazzo.ops.attention.writing import reference_writing, slot_writing

    cache = _cache(pages, lengths, block_table, residual, slots, k_static, v_static, k_format, v_format, head_dim,
                   sink_tokens, page_size, max_length, mean_length)  # fmt: skip
    if not k.is_cuda:
        slot_writing.check(cache, slot_mapping, len(k))
        return reference_writing.store_slots(cache, k, v, slot_mapping)
    slot_writing.run(cache, k, v, slot_mapping, None)


@attention_store_slots.register_fake
def _(k, v, slot_mapping, *cache):
    return None
