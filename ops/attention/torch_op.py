"""`torch.ops.terrazzo.attention_*`: the operators as torch.compile, torch.export and fake tensors see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from terrazzo.ops.attention.cache.cache import PackedCache
from terrazzo.ops.attention.cache.launch import Choice
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.checks import Options

if TYPE_CHECKING:
    from terrazzo.ops.attention.decoding.codes import Codes
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations

FIELDS = (
    *("Tensor pages", "Tensor lengths", "Tensor? block_table", "Tensor? residual", "Tensor? slots"),
    *("Tensor? k_static", "Tensor? v_static", "str k_format", "str v_format", "SymInt head_dim", "SymInt sink_tokens"),
    *("SymInt page_size", "SymInt max_length", "SymInt mean_length"),
)
"""A PackedCache among the arguments of an operator."""
OPTIONS = ("float? scale", "float softcap", "SymInt window", "Tensor? sinks")


def call(name: str, front: tuple, cache: PackedCache, *back: object) -> tuple[torch.Tensor, ...] | None:
    """An operator as one opaque node of a graph, with the fields of the cache between its other arguments."""
    c = cache
    fields = (
        c.pages, c.lengths, c.block_table, c.residual, c.slots, c.k_static, c.v_static, c.layout.k_format,
        c.layout.v_format, c.layout.head_dim, c.layout.sink_tokens, c.page_size, c.max_length, c.mean_length,
    )  # fmt: skip
    return getattr(torch.ops.terrazzo, f"attention_{name}")(*front, *fields, *back)


def _cache(pages, lengths, table, residual, slots, k_static, v_static, k_format, v_format, *sizes: int) -> PackedCache:
    head_dim, sink, page, most, mean = sizes
    layout = CacheLayout(k_format, v_format, head_dim, sink)
    return PackedCache(layout, pages, lengths, most, table, page, residual, slots, k_static, v_static, mean)


def _operator(
    name: str, front: tuple[str, ...], back: tuple[str, ...] = (), returns: str = "()", writes: tuple[str, ...] = ()
) -> Callable[[Callable], torch.library.CustomOpDef]:
    """Registers a function of arguments `front`, a PackedCache, and arguments `back`."""
    arguments = [*front, *FIELDS, *back]
    for i, argument in enumerate(arguments):
        kind, _, argument = argument.partition(" ")
        if argument in writes:
            arguments[i] = f"Tensor(a{i}!){kind.removeprefix('Tensor')} {argument}"
    first, last = len(front), len(front) + len(FIELDS)

    def register(function: Callable) -> torch.library.CustomOpDef:
        def node(*given: torch.Tensor | float | str | None) -> tuple[torch.Tensor, ...] | None:
            return function(*given[:first], _cache(*given[first:last]), *given[last:])

        schema = f"({', '.join(arguments)}) -> {returns}"
        return torch.library.custom_op(f"terrazzo::attention_{name}", node, mutates_args=writes, schema=schema)

    return register


def _decoded(q: torch.Tensor, cache: PackedCache, options: Options, codes: Codes | None = None) -> tuple:
    """(out, lse) on any device; on a GPU `codes` receives those of out."""
    from terrazzo.ops.attention.decoding import op, reference

    if q.is_cuda:
        return op.run(q, cache, options, Choice(), codes=codes)
    out, lse, _ = reference.decode(q, cache, options, bounded=False)
    return out.to(q.dtype), lse.float()


@_operator("decode", ("Tensor q",), OPTIONS, "(Tensor, Tensor)")
def attention_decode(q, cache, *options):
    """(out, lse) of q [B, q_len, Hq, D]."""
    return _decoded(q, cache, Options(*options))


@attention_decode.register_fake
def _(q, *cache_and_options):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)


@_operator(
    "decode_quantized", ("Tensor q",), (*OPTIONS, "str? quant", "Tensor? smooth", "bool column_scales"),
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def attention_decode_quantized(q, cache, scale, softcap, window, sinks, quant, smooth, column_scales):
    """`attention_decode`, and codes of out's rows of Hq D values, scales and row sums; sums that are not there have no
    elements."""
    from terrazzo.ops.attention.decoding import codes

    codes.check(q, quant, smooth, column_scales)
    made = codes.codes_for(q, quant, smooth, column_scales) if q.is_cuda else None
    out, lse = _decoded(q, cache, Options(scale, softcap, window, sinks), made)
    return _five(out, lse, codes.encoded(out, quant, smooth, column_scales) if made is None else made.made)


def _five(
    out: torch.Tensor, lse: torch.Tensor, made: QuantizedActivations | BlockQuantizedActivations
) -> tuple[torch.Tensor, ...]:
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


NEW = ("Tensor cu_seqlens", "SymInt most_new")


@_operator("prefill", ("Tensor q",), (*NEW, "Tensor? k", "Tensor? v", *OPTIONS), "(Tensor, Tensor)")
def attention_prefill(q, cache, cu_seqlens, most_new, k, v, *options):
    """(out, lse) of q [N, Hq, D], and the new tokens or None."""
    from terrazzo.ops.attention.prefilling import prefill_op, prefill_reference

    options = Options(*options)
    if q.is_cuda:
        return prefill_op.run(q, cache, cu_seqlens, most_new, options, Choice(), new=(k, v))
    out, lse, _ = prefill_reference.prefill(q, cache, cu_seqlens, options, k, v, bounded=False)
    return out.to(q.dtype), lse.float()


@attention_prefill.register_fake
def _(q, *cache_and_options):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=torch.float32)


@_operator("append", ("Tensor k", "Tensor v"), writes=("pages", "residual"))
def attention_append(k, v, cache):
    """Stores k, v [B, q_len, Hkv, D] in place."""
    from terrazzo.ops.attention.writing import reference_writing, writing

    if not k.is_cuda:
        return reference_writing.append(cache, k, v)
    writing.run_append(cache, k, v, None)


@_operator("store", ("Tensor k", "Tensor v", *NEW), writes=("pages", "residual"))
def attention_store(k, v, cu_seqlens, most_new, cache):
    """Stores k, v [tokens, Hkv, D] in place."""
    from terrazzo.ops.attention.writing import reference_writing, writing

    if not k.is_cuda:
        return reference_writing.store(cache, k, v, cu_seqlens)
    writing.run_store(cache, k, v, cu_seqlens, most_new, None)


@_operator("store_slots", ("Tensor k", "Tensor v", "Tensor slot_mapping"), writes=("pages",))
def attention_store_slots(k, v, slot_mapping, cache):
    """Stores k, v [tokens, Hkv, D] in place, where slot_mapping [tokens] says."""
    from terrazzo.ops.attention.writing import reference_writing, slot_writing

    if not k.is_cuda:
        slot_writing.check(cache, slot_mapping, len(k))
        return reference_writing.store_slots(cache, k, v, slot_mapping)
    slot_writing.run(cache, k, v, slot_mapping, None)


for _one in (attention_append, attention_store, attention_store_slots):
    _one.register_fake(lambda *arguments: None)
