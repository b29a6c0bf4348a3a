"""Attention over a low-bit KV cache: decode with 16-, 8-, 4- and 2-bit keys and values on tensor cores.

    cache = terrazzo.ops.attention.KVCache("int4", "int4", kv_heads=8, head_dim=128, pages=4096)
    y = cache.extend({sequence: 1}).decode(q)  # or pack_cache, append, store and decode on tensors of your own

Names are resolved on first use, so that importing this package imports neither torch nor tilelang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = [
    "FORMATS",
    "CacheFullError",
    "CacheLayout",
    "KVCache",
    "KVFormat",
    "PackedCache",
    "QuantizedBlock",
    "append",
    "decode",
    "decode_requests",
    "dequantize",
    "get_format",
    "kernel_requests",
    "pack_cache",
    "prefill",
    "prefill_requests",
    "quantize",
    "rope_append",
    "store",
    "store_slots",
]

if TYPE_CHECKING:
    from terrazzo.ops.attention.cache.cache import PackedCache, pack_cache
    from terrazzo.ops.attention.cache.layout import CacheLayout, QuantizedBlock
    from terrazzo.ops.attention.cache.paging import CacheFullError
    from terrazzo.ops.attention.cache.quantizer import dequantize, quantize
    from terrazzo.ops.attention.decoding.op import decode_requests
    from terrazzo.ops.attention.entry import append, decode, prefill, rope_append, store, store_slots
    from terrazzo.ops.attention.kv_cache import KVCache
    from terrazzo.ops.attention.prefilling.prefill_op import prefill_requests
    from terrazzo.ops.attention.requests import kernel_requests
    from terrazzo.ops.products.kv import FORMATS, KVFormat, get_format
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "cache.cache": "PackedCache pack_cache",
            "entry": "append decode prefill rope_append store store_slots",
            "kv_cache": "KVCache",
            "cache.layout": "CacheLayout QuantizedBlock",
            "decoding.op": "decode_requests",
            "cache.paging": "CacheFullError",
            "prefilling.prefill_op": "prefill_requests",
            "cache.quantizer": "dequantize quantize",
            "requests": "kernel_requests",
            "terrazzo.ops.products.kv": "FORMATS KVFormat get_format",
        },
    )
