"""Attention over a low-bit KV cache: decode with 16-, 8-, 4- and 2-bit keys and values on tensor cores.

Names are resolved on first use, so that importing this package imports neither torch nor tilelang.
"""

from __future__ import annotations

import importlib

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
    "decode_requests": "op",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
