"""Modules of quantized models: linear layers, experts, attention over a low-bit KV cache.

    layer = terrazzo.nn.Linear.from_float(linear, "w4a16-g128").to("cuda")
    y = layer(x)

Forward reads what the state holds: buffers that `.to`, `load_state_dict`, `torch.export` and graphs know. On a CPU
torch multiplies dequantized weights, a reference (`nn/cpu.py`). Names are resolved on first use: importing this package
imports neither torch nor tilelang, its modules import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.lowering import lazy

__all__ = [
    "MLP",
    "Attention",
    "Decoder",
    "DecoderLayer",
    "Dense",
    "Experts",
    "Format",
    "GateUpLinear",
    "GroupedLinear",
    "JoinedLinear",
    "Linear",
    "QKVLinear",
    "RMSNorm",
    "Rotary",
    "SparseMLP",
    "TensorParallel",
    "fuse",
    "join",
    "positions_of",
]

if TYPE_CHECKING:
    from terrazzo.nn.attention import Attention
    from terrazzo.nn.decoder import Decoder, DecoderLayer, Rotary, positions_of
    from terrazzo.nn.dense import Dense
    from terrazzo.nn.experts import Experts, GroupedLinear
    from terrazzo.nn.formats import Format
    from terrazzo.nn.glue import fuse
    from terrazzo.nn.joined import GateUpLinear, JoinedLinear, QKVLinear, join
    from terrazzo.nn.linear import Linear
    from terrazzo.nn.mlp import MLP, SparseMLP
    from terrazzo.nn.norm import RMSNorm
    from terrazzo.nn.parallel import TensorParallel
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "attention": "Attention",
            "decoder": "Decoder DecoderLayer Rotary positions_of",
            "dense": "Dense",
            "experts": "Experts GroupedLinear",
            "formats": "Format",
            "glue": "fuse",
            "joined": "GateUpLinear JoinedLinear QKVLinear join",
            "linear": "Linear",
            "mlp": "MLP SparseMLP",
            "norm": "RMSNorm",
            "parallel": "TensorParallel",
        },
    )
