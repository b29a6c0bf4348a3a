"""The public call: its arguments, and whether it is launched or becomes a node of a graph that is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from terrazzo.ops import row_calls
from terrazzo.ops.rope import op

if TYPE_CHECKING:
    from terrazzo.ops.dlpack import Array, SupportsDLPack


def apply_rope(
    qkv: Array,
    cos: SupportsDLPack,
    sin: SupportsDLPack,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    positions: SupportsDLPack | None = None,
    rotary_dim: int | None = None,
    layout: str = "neox",
    norm: str = "none",
    q_weight: SupportsDLPack | None = None,
    k_weight: SupportsDLPack | None = None,
    eps: float = 1e-6,
    numerics: str = "fused",
    target: str | None = None,
) -> tuple[Array, Array]:
    """q and k of a joined q, k, v, each head normed where a model does so, and turned to its position: one kernel.

    Args:
        qkv: float16 or bfloat16 [T, (heads + 2 kv_heads) * head_dim], v not read; on a CPU the reference computes.
        cos, sin: float32 [P, R/2 or more], tables of angles with their attention factor: linear, dynamic, llama3, YaRN
            and longrope scalings differ in these alone.
        heads, kv_heads, head_dim: of q and of k; head_dim a multiple of 16 up to 512.
        positions: int32 or int64 [T], each token's row of the tables; None: row i is token i's.
        rotary_dim: R, the first dims of a head that are turned, a multiple of 16; None: all.
        layout: "neox" turns dims i and i + R/2, "interleaved" 2i and 2i + 1.
        norm: RMSNorm over each head in front: "none", "llama" (weight; Qwen 3) or "gemma" (1 + weight; Gemma 3).
        q_weight, k_weight: its weights [head_dim] in qkv's dtype. eps: added to the mean square.
        numerics: "fused" rounds the result alone; "model" rounds tables, products and sums as transformers does.
        target: "sm_80" runs its program on newer GPUs.

    Returns:
        q [T, heads, head_dim], k [T, kv_heads, head_dim].

    Raises:
        ArgumentError: an operand that does not fit, named with the value seen and the remedy. CaptureError: a kernel
            that was never launched is met in CUDA graph capture. ToolchainError, CompileError: the kernel is not
            compiled yet and cannot be.
    """
    rotary = head_dim if rotary_dim is None else rotary_dim
    tensors, sizes = (qkv, cos, sin, positions, q_weight, k_weight), (heads, kv_heads, head_dim, rotary)
    call = op.Call(*tensors, *sizes, layout, norm, eps, numerics, target)
    made = op.run(call)
    if made is None:
        from terrazzo.ops.rope import torch_op

        if (made := row_calls.apart(apply_rope, call, op.check, torch_op)) is None:
            made = op.run(call, new=True)
    return made
