"""Which kernels decode, prefill, append and store launch: to compile them up front."""

from __future__ import annotations

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.request import KernelRequest
from terrazzo.lowering.targets import Target
from terrazzo.ops.attention.cache.cache import page_words, residual_of
from terrazzo.ops.attention.cache.format import kept_in_f16
from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.checks import GRID, check_facts
from terrazzo.ops.attention.decoding import op
from terrazzo.ops.attention.prefilling import prefill_op
from terrazzo.ops.attention.writing.writing import write_kernel
from terrazzo.schedules import attention as schedules
from terrazzo.schedules import attention_space, records


def kernel_requests(
    k_format: str, v_format: str, *, heads: int, kv_heads: int, target: Target | str, head_dim: int = 128,
    q_len: int = 1, dtype: str = "float16", page: int = 128, residual: int | None = None,
    sink_tokens: int | None = None, softcap: bool = False, sinks: bool = False, prefill: bool = False,
) -> list[KernelRequest]:  # fmt: skip
    """The kernels of decode, append and store for any number of sequences of any length, to compile them up front.

    Args:
        k_format, v_format: names of `FORMATS`. target: an architecture or a Target.
        softcap, sinks: whether decode and prefill get one.
        heads, kv_heads, head_dim: of a layer. q_len: new tokens of a step. dtype: of q, k and v.
        page: tokens of a page, 0 for contiguous caches. residual, sink_tokens: newest and first tokens that stay f16,
            None for what a KVCache of these keys has.
        prefill: the kernels of prefill too, with and without the new tokens' k and v.

    Raises:
        ArgumentError: formats or sizes that do not fit.
    """
    _, sink_tokens = kept_in_f16(k_format, residual, sink_tokens)
    layout, target = CacheLayout(k_format, v_format, head_dim, sink_tokens), Target.parse(target)
    residual = residual_of(layout, residual)
    if page != 0:
        page_words(layout, page)
    check_facts(dtype, page=page, softcap=softcap, sinks=sinks, prefill=prefill)
    for name, value in (("heads", heads), ("kv_heads", kv_heads)):
        if type(value) is not int or not 1 <= value <= GRID:
            raise ArgumentError(name, value, f"must be an integer, 1..{GRID}", "see the model's config")
    if heads % kv_heads:
        raise ArgumentError("heads", f"{heads}/{kv_heads}", "must be a multiple of kv_heads", "see the model's config")
    if type(q_len) is not int or not 1 <= q_len <= op.MAX_QUERY_TOKENS:
        raise ArgumentError("q_len", q_len, f"must be 1..{op.MAX_QUERY_TOKENS}", "use fewer new tokens")
    rows = q_len * heads // kv_heads
    facts = dict(dtype=dtype, page=page, residual=residual, softcap=softcap, sinks=sinks, target=target)
    chosen = schedules.every(op.problem_of(layout, 1, kv_heads, rows, 1, page, residual), target)
    made = [op.plan(layout, at.pairs, 1, rows, at.tokens, **facts, schedule=s).request for at, s in chosen]
    full = {target.sms * blocks // splits for blocks in (1, 2, 4, 8) for splits in range(1, 17)}  # pairs that fill SMs
    for tokens in () if softcap or sinks else attention_space.BUCKETS:
        recorded = op.tuning_facts(layout, rows, tokens, dtype, page, residual)
        for pairs in records.tokens("attention", recorded, target):  # and what its schedule may be taken for
            around = {pairs, *(n for n in full if pairs < 2 * n < 4 * pairs)}
            made += [
                op.plan(layout, n, 1, rows, at, **facts).request for n in around for at in (tokens, 3 * tokens // 4)
            ]
    made.append(op.plan(layout, 2, kv_heads, rows, 1, **facts, balanced=True).request)
    for fresh in (False, True) if prefill else ():
        made += prefill_op.prefill_requests(layout, fresh=fresh, **facts)
    return [*dict.fromkeys(made), write_kernel(layout, dtype, page, residual, target)]
