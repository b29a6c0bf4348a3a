"""Rotary positions of a joined q, k, v, after RMSNorm over heads where a model has it, in one kernel.

    q, k = terrazzo.ops.rope.apply_rope(qkv, cos, sin, heads=32, kv_heads=8, positions=positions)

Names are resolved on first use, so that importing this package imports neither torch nor tilelang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = ["apply_rope", "kernel_requests"]

if TYPE_CHECKING:
    from terrazzo.ops.rope.entry import apply_rope
    from terrazzo.ops.rope.op import kernel_requests
else:
    __getattr__, __dir__ = lazy.attach(__name__, {"entry": "apply_rope", "op": "kernel_requests"})
