"""Attention over a low-bit KV cache: decode with 16-, 8-, 4- and 2-bit keys and values on tensor cores.

    cache = terrazzo.ops.attention.KVCache("int4", "int4", kv_heads=8, head_dim=128, pages=4096)
    y = cache.extend({sequence: 1}).decode(q)  # or pack_cache, append, store and decode on tensors of your own

Names are resolved on first use, so that importing this package imports neither torch nor tilelang.
"""

from __future__ import annotations

from terrazzo.ops import lazy

_HOME = {
    "KVFormat": "format",
    "FORMATS": "format",
    "get_format": "format",
    "CacheLayout": "layout",
    "QuantizedBlock": "quantizer",
    "quantize": "quantizer",
    "dequantize": "quantizer",
    "PackedCache": "cache",
    "pack_cache": "cache",
    "KVCache": "kv_cache",
    "CacheFullError": "paging",
    "append": "writing",
    "store": "writing",
    "decode": "op",
    "prefill": "prefill_op",
    "prefill_requests": "prefill_op",
    "decode_requests": "op",
    "kernel_requests": "op",
}

__all__, __getattr__, __dir__ = lazy.names(__name__, _HOME)
