"""Modules of quantized models: linear layers, experts, attention over a low-bit KV cache.

    layer = terrazzo.nn.Linear.from_float(linear, "w4a16-g128").to("cuda")
    y = layer(x)

Forward reads what the state holds: buffers that `.to`, `load_state_dict`, `torch.export` and graphs know. On a CPU it
runs the operators' reference, slow and exact. Names are resolved on first use: importing this package imports neither
torch nor tilelang, its modules import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = [
    "Format",
    "Linear",
]

if TYPE_CHECKING:
    from terrazzo.nn.formats import Format
    from terrazzo.nn.linear import Linear
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "formats": "Format",
            "linear": "Linear",
        },
    )
