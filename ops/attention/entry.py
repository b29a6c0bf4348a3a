"""The public calls on a cache: their arguments, and whether they are launched or become a node of a traced graph."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops import dlpack, launching, quantized
from terrazzo.ops.attention import checks
from terrazzo.ops.attention.cache.cache import PackedCache
from terrazzo.ops.attention.cache.launch import Choice
from terrazzo.ops.attention.checks import Options
from terrazzo.ops.attention.decoding import op
from terrazzo.ops.attention.decoding.codes import codes_for, coding_of
from terrazzo.ops.attention.prefilling import prefill_op
from terrazzo.ops.attention.writing import rope_writing, slot_writing, writing
from terrazzo.schedules import attention as schedules
from terrazzo.schedules import attention_prefill as prefill_schedules

if TYPE_CHECKING:
    import torch
    from terrazzo.ops.dlpack import Array, SupportsDLPack
    from terrazzo.ops.quantized import BlockQuantizedActivations, QuantizedActivations


def decode(
    q: Array,
    cache: PackedCache,
    *,
    cu_seqlens: SupportsDLPack | None = None,
    most_new: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    lse: SupportsDLPack | None = None,
    splits: int | None = None,
    balanced: bool | None = None,
    quant: str | None = None,
    smooth: SupportsDLPack | None = None,
    column_scales: bool = False,
    schedule: schedules.Decode | None = None,
    target: Target | str | None = None,
) -> Array | QuantizedActivations | BlockQuantizedActivations:
    """Attention of the q_len newest tokens of each sequence over its cache, which already holds them.

    Args:
        q: float16 or bfloat16 [B, q_len, Hq, D] or, for one token, [B, Hq, D]; q_len 1..8; Hq a multiple of Hkv. Row i
            sees the tokens up to and including number length - q_len + i. With `cu_seqlens` [N, Hq, D], the new tokens
            of all sequences one after another, each sequence with a q_len of its own.
        cache: the sequences' keys and values.
        cu_seqlens: int32 [B + 1], where each sequence's new tokens begin, and their number (`qo_indptr` of FlashInfer,
            `query_start_loc` of vLLM); a sequence may have none. Rows of q after the last sequence's are not looked
            at, and what out and lse have there stays. None: all have as many. Not in traced calls.
        most_new: with `cu_seqlens`, at least the new tokens of every sequence, 1..8; host-side.
        scale: softmax scale, default 1 / sqrt(D). softcap: logits are capped at +-softcap by tanh; 0 for none.
        window: newest tokens that a row sees, itself included; 0 for all.
        sinks: f32 [Hq], logits that take part in the softmax without a value.
        out: as q in shape and dtype, [B, q_len, Hq, D], contiguous, no memory of it.
        lse: f32 [B, q_len, Hq] or [N, Hq], receives log2 of the softmax's denominator (sinks included); no memory of
            another argument.
        splits: CTAs along each sequence; schedule: the kernel's; None for tuned records and the heuristics. balanced:
            each sequence has CTAs by its own length on the device, so that a batch does not wait for its longest one;
            None where `cache.mean_length` says that this pays. target: run the program of an older target ("sm_80", as
            PTX); None for this GPU's. Not in traced calls.
        quant: codes of the Hq D values of each token, as the product after attention takes them, from the same kernel:
            "int8" or "e4m3" (sm_89 and newer) with a scale for each token, "int8_block128" or "e4m3_block128" with one
            for each 128 values. The values are those that `out` receives: rounded to q's dtype.
        smooth: float [Hq D]; values are divided by it, in float32, before they are quantized. column_scales: scales of
            blocks as float32 [Hq D / 128, M4], M4 = the M tokens rounded up to 4.

    Returns:
        out, or with `quant` QuantizedActivations or BlockQuantizedActivations of [B, q_len, Hq D] (or [B, Hq D], with
        cu_seqlens [N, Hq D], where rows of no sequence hold anything). A row that sees no token is 0, with lse -inf, or
        the sink's logit in units of log2.

    All tensors may be arrays of another library (ops/dlpack.py); the result is then one of q's library, or out; codes
    are torch's.

    Two graphs captured on one stream (torch.cuda.graph has one of its own for all) must not be replayed at the same
    time, nor one during calls on that stream.

    Raises:
        ArgumentError: an argument that does not fit; q that requires a gradient, as there is none. CaptureError: a
            kernel never launched before, in graph capture.
    """
    import torch

    plain = type(q) is torch.Tensor and q.layout is torch.strided
    if not plain:
        if dlpack.is_foreign(q):
            return dlpack.call(decode, locals())
        launching.check_tensor(q, "q", "[B, q_len, Hq, D]")
    if type(cache) is not PackedCache:
        checks.check_kind(cache)
    shape = q.shape
    ragged = cu_seqlens is not None
    if most_new and not ragged:
        raise ArgumentError("most_new", most_new, "belongs to cu_seqlens", "pass both, or neither")
    if ragged and q.dim() != 3:
        raise ArgumentError("q", list(shape), "must be [new tokens, Hq, D] with cu_seqlens", "reshape it")
    if q.dim() == 3:
        q = q.unsqueeze(0 if ragged else 1)
    if q.requires_grad:
        launching.check_no_grad(q, "attention", "q")
    plain = plain and type(cache.pages) is torch.Tensor and not torch.compiler.is_compiling()
    options = Options(scale, softcap, window, sinks)
    if not plain and launching.is_traced(q, cache.pages):
        launching.check_untraced(
            cu_seqlens=cu_seqlens, splits=splits, balanced=balanced, schedule=schedule, target=target
        )
        checks.check_tensors(sinks=sinks, smooth=smooth)
        if not torch.compiler.is_compiling():
            options.check()
            coding_of(quant, smooth is not None, column_scales)
        facts, name = (scale, softcap, window, sinks), "decode"
        if quant is not None or smooth is not None or column_scales:
            facts, name = (*facts, quant, smooth, column_scales), "decode_quantized"
        made, sums, *parts = _traced(name, (q,), cache, *facts)
        made = _handed(made.view(shape), sums, out, lse)
        flat = (*shape[:-2], shape[-2] * shape[-1])
        return made if quant is None else quantized.of_tensors(parts, flat, quant, column_scales)
    if out is not None:
        launching.check_out(out, shape, q.dtype, q.device)
        out = out.view(q.shape)
    more, codes = {}, None
    if quant is not None or smooth is not None or column_scales:
        more["codes"] = codes = codes_for(q, quant, smooth, column_scales)
    if ragged:
        more |= dict(cu_seqlens=cu_seqlens, most_new=most_new)
        if lse is not None:
            launching.check_out(lse, shape[:2], torch.float32, q.device, "lse")
            lse = lse.unsqueeze(0)
    made, _ = op.run(q, cache, options, Choice(splits, schedule, target, balanced), out=out, lse=lse, **more)
    return made.view(shape) if codes is None else replace(codes.made, shape=(*shape[:-2], shape[-2] * shape[-1]))


def _traced(name: str, front: tuple, cache: PackedCache, *back: object) -> tuple[torch.Tensor, ...] | None:
    """A node of the graph that is traced."""
    from terrazzo.ops.attention import torch_op

    return torch_op.call(name, front, cache, *back)


def _handed(made: torch.Tensor, sums: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None) -> torch.Tensor:
    """The results of a traced call, in `out` and `lse` where these are given."""
    if lse is not None:
        launching.check_out(lse, sums.shape, sums.dtype, sums.device, "lse")
        lse.copy_(sums)
    return launching.copy_out(out, made)


def rope_append(
    cache: PackedCache,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    rotary_dim: int | None = None,
    layout: str = "neox",
    norm: str = "none",
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    numerics: str = "fused",
    slot_mapping: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    target: Target | str | None = None,
) -> torch.Tensor:
    """`ops.rope.apply_rope` of new tokens and `append` of their keys and values, in one kernel, with the same bits.

    Args:
        cache: as for `append`; `lengths` count the new tokens already, q_len for each sequence.
        qkv: float16 or bfloat16 [B * q_len, (heads + 2 kv_heads) * D], contiguous, on the cache's GPU.
        cos, sin: float32 [B * q_len, R/2 or more], the angles of each new token.
        q_weight, k_weight: [D], as in `apply_rope`. rotary_dim, layout, norm, eps, numerics, target: as there.
        slot_mapping: int32 or int64 [T], where `store_slots` would put the T tokens of qkv [T, ...], of any sequences,
            in place of what the cache's lengths and block table say.
        positions: int32 or int64 [T], the rows of cos and sin [P, R/2 or more] of those tokens; those outside are taken
            for the nearest. Only with slot_mapping.

    Returns:
        q [B, q_len, heads, D], or [T, heads, D] with slot_mapping: of all rows, also where nothing is stored.

    Raises:
        ArgumentError: an operand that does not fit. CaptureError: a kernel never launched before, in graph capture.
    """
    rotary = cache.layout.head_dim if rotary_dim is None else rotary_dim
    turned = (heads, rotary, layout, norm, q_weight, k_weight, eps, numerics, positions)
    rows = rope_writing.Heads(qkv, cos, sin, *turned)
    if slot_mapping is not None:
        return slot_writing.run_turned(cache, rows, slot_mapping, target)
    if positions is not None:
        constraint = "go with a slot_mapping"
        raise ArgumentError("positions", "given", constraint, "pass rows of the tables: cos[positions]")
    return rope_writing.run(cache, rows, target)


def prefill(
    q: Array,
    cache: PackedCache,
    cu_seqlens: SupportsDLPack,
    most_new: int,
    *,
    k: SupportsDLPack | None = None,
    v: SupportsDLPack | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
    sinks: SupportsDLPack | None = None,
    out: SupportsDLPack | None = None,
    lse: SupportsDLPack | None = None,
    splits: int | None = None,
    schedule: prefill_schedules.Prefill | None = None,
    target: Target | str | None = None,
) -> Array:
    """Causal attention of each sequence's new tokens over its cache; `cache.lengths` counts them already.

    Without k and v the cache holds the new tokens (`store` came first), and all are read as it holds them. With k and v
    the new tokens attend to themselves unquantized, and to the past as the cache holds it. They are rounded only to the
    dtype of the cache's operands (float16 unless the cache is bfloat16); call `store` afterwards.

    Args:
        q: float16 or bfloat16 [N, Hq, D], the new tokens of all sequences one after another; Hq a multiple of Hkv. The
            last row of a sequence sees its whole length, each row before one token less.
        cache: the sequences' keys and values.
        cu_seqlens: int32 [B + 1], where each sequence's new tokens begin, and their number; a sequence may have none.
        most_new: at least the new tokens of every sequence; host-side, for the number of CTAs. Rows of q after the
            last sequence's are not looked at, and what out and lse have there stays.
        k, v: dtype of q, [N, Hkv, D], or None.
        scale: softmax scale, default 1 / sqrt(D). softcap: logits are capped at +-softcap by tanh; 0 for none.
        window: newest tokens that a row sees, itself included; 0 for all.
        sinks: f32 [Hq], logits that take part in the softmax without a value.
        out: [N, Hq, D], contiguous, dtype of q, no memory of it. lse: f32 [N, Hq], receives log2 of the softmax's
            denominator (sinks included); no memory of another argument.
        splits: CTAs that share the tokens of a tile of rows, whose results are added up in order; None for as many as
            fill the GPU where chunks are short and the past is long. From 2 on, a call takes a workspace of 4 splits N
            Hq (D + 1) bytes. schedule: the kernel's; None for a tuned record's
            or the heuristic's. target: run the program of an older target ("sm_80", as PTX); None for this GPU's. Not
            in traced calls.

    Returns:
        out. A row that sees no token is 0, with lse -inf, or the sink's logit in units of log2.

    All tensors may be arrays of another library (ops/dlpack.py); the result is then one of q's library, or out.

    Raises:
        ArgumentError: an argument that does not fit; on sm_86 and sm_89, head_dim 256 with unquantized tokens (k and v,
            a residual block, or 16-bit keys and values of at least 8 bits): two stages exceed shared memory; q that
            requires a gradient, as there is none. CaptureError: a kernel never launched before, in graph capture.
    """
    import torch

    if type(q) is not torch.Tensor and dlpack.is_foreign(q):
        return dlpack.call(prefill, locals())
    launching.check_tensor(q, "q", "[new tokens, Hq, D]")
    checks.check_kind(cache)
    options = Options(scale, softcap, window, sinks)
    launching.check_no_grad(q, "attention", "q")
    if launching.is_traced(q, cache.pages):
        launching.check_untraced(splits=splits, schedule=schedule, target=target)
        checks.check_tensors(cu_seqlens=cu_seqlens, k=k, v=v, sinks=sinks)
        if not torch.compiler.is_compiling():
            checks.check_most_new(most_new)
            options.check()
        new = (cu_seqlens, most_new, k, v)
        return _handed(*_traced("prefill", (q,), cache, *new, scale, softcap, window, sinks), out, lse)
    choice = Choice(splits, schedule, target)
    return prefill_op.run(q, cache, cu_seqlens, most_new, options, choice, new=(k, v), out=out, lse=lse)[0]


def append(cache: PackedCache, k: SupportsDLPack, v: SupportsDLPack, *, target: Target | str | None = None) -> None:
    """Store the newest tokens of each sequence, in place; `cache.lengths` counts them already.

    Whether a residual block fills is decided on the device. Captured in a CUDA graph, a replay stores at the lengths of
    that time. The same call with the same lengths writes the same bits, up to 16 new tokens of a sequence.

    Args:
        cache: sequences with room for the tokens. k, v: float16 or bfloat16 [B, q_len, Hkv, D] (or [B, Hkv, D]),
            finite; tokens may be any multiple of 8 values apart, as slices of a fused projection are.
        target: run the program of an older target ("sm_80", as PTX); None for this GPU's.

    Raises:
        ArgumentError: an argument that does not fit; k or v that requires a gradient, as there is none. CaptureError: a
            kernel never launched before, in graph capture.
    """
    import torch

    if type(k) is not torch.Tensor and dlpack.is_foreign(k):
        return dlpack.call(append, locals())
    writing.check_kinds("append", cache, k, v, "[B, q_len, Hkv, D]")
    if k.dim() == 3 and v.dim() == 3:
        k, v = k.unsqueeze(1), v.unsqueeze(1)
    if launching.is_traced(k, cache.pages):
        launching.check_untraced(target=target)
        return _traced("append", (k, v), cache)
    writing.run_append(cache, k, v, target)


def store(
    cache: PackedCache,
    k: SupportsDLPack,
    v: SupportsDLPack,
    cu_seqlens: SupportsDLPack,
    most_new: int,
    *,
    target: Target | str | None = None,
) -> None:
    """Quantize and pack the tokens of a prefill, in place; `cache.lengths` counts them already.

    Args:
        k, v: float16 or bfloat16 [tokens, Hkv, D], the new tokens of all sequences one after another.
        cu_seqlens: int32 [B + 1], where each sequence's tokens begin, and their number.
        most_new: at least the new tokens of every sequence; host-side, for the number of CTAs. target: see `prefill`.

    Raises:
        ArgumentError: an argument that does not fit; k or v that requires a gradient, as there is none. CaptureError: a
            kernel never launched before, in graph capture.
    """
    import torch

    if type(k) is not torch.Tensor and dlpack.is_foreign(k):
        return dlpack.call(store, locals())
    writing.check_kinds("store", cache, k, v, "[tokens, Hkv, D]")
    launching.check_tensor(cu_seqlens, "cu_seqlens", "int32 [B + 1]")
    if launching.is_traced(k, cache.pages):
        launching.check_untraced(target=target)
        if not torch.compiler.is_compiling():
            checks.check_most_new(most_new)
        return _traced("store", (k, v, cu_seqlens, most_new), cache)
    writing.run_store(cache, k, v, cu_seqlens, most_new, target)


def store_slots(
    cache: PackedCache,
    k: SupportsDLPack,
    v: SupportsDLPack,
    slot_mapping: SupportsDLPack,
    *,
    target: Target | str | None = None,
) -> None:
    """Quantize and store tokens where a slot mapping says, in place: for engines that own the page table.

    The bits are as of `append` and `store`. Other tokens of a tile stay, and any number of tokens of it may come in
    one call, in any order. Nothing is allocated; captured in a CUDA graph, a replay stores by the mapping of that time.

    Args:
        cache: paged, without f16 tokens besides the pages, and without channel-wise keys. Its lengths, block table and
            slots are not read.
        k, v: float16 or bfloat16 [tokens, Hkv, D], finite, of any sequences; tokens may be any multiple of 8 values
            apart, as slices of a fused projection are.
        slot_mapping: int32 or int64 [tokens]. Slot page * page_size + i is token i of a page. A token whose slot is
            negative, or after the last page, is not stored. No slot may be named twice.
        target: run the program of an older target ("sm_80", as PTX); None for this GPU's.

    Raises:
        ArgumentError: an argument that does not fit; k or v that requires a gradient, as there is none. CaptureError: a
            kernel never launched before, in graph capture.
    """
    import torch

    if type(k) is not torch.Tensor and dlpack.is_foreign(k):
        return dlpack.call(store_slots, locals())
    writing.check_kinds("store_slots", cache, k, v, "[tokens, Hkv, D]")
    launching.check_tensor(slot_mapping, "slot_mapping", "int32 or int64 [tokens]")
    if launching.is_traced(k, cache.pages):
        launching.check_untraced(target=target)
        return _traced("store_slots", (k, v, slot_mapping), cache)
    slot_writing.run(cache, k, v, slot_mapping, target)
