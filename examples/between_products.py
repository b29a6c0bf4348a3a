"""What stands between a decoder layer's products, each in one kernel: norms, gates, rotary positions.

python examples/between_products.py
"""

from __future__ import annotations

import torch
from terrazzo.ops import activation, norm, rope

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, TOKENS = 512, 1024, 8, 2, 64, 4


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU the references compute the same
    make = lambda *size: torch.randn(size, device=device, dtype=torch.float16)

    # residual += delta, RMSNorm, and the int8 codes that w4a8.gemm multiplies
    delta, residual, weight = make(TOKENS, HIDDEN), make(TOKENS, HIDDEN), make(HIDDEN)
    before = residual.clone()
    codes = norm.fused_add_rms_norm(delta, residual, weight, eps=1e-5, quant="int8")
    print(codes, "scales", codes.scales.shape, "and the residual is the sum:", torch.equal(residual, before + delta))

    # RMSNorm over the heads of q and k, then their positions
    angles = torch.arange(TOKENS, device=device)[:, None] * 10000.0 ** (
        -torch.arange(HEAD_DIM // 2, device=device) / (HEAD_DIM // 2)
    )
    qkv, heads = make(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM), dict(heads=HEADS, kv_heads=KV_HEADS)
    norms = dict(norm="llama", q_weight=make(HEAD_DIM), k_weight=make(HEAD_DIM))
    q, k = rope.apply_rope(qkv, angles.cos(), angles.sin(), head_dim=HEAD_DIM, **heads, **norms)
    print("q", tuple(q.shape), "k", tuple(k.shape))

    # silu(gate) * up as transformers rounds it, bit for bit
    both = make(TOKENS, 2 * INTERMEDIATE)
    gate, up = both.chunk(2, dim=-1)
    h = activation.act_and_mul(both, numerics="model")
    same = float((h == torch.nn.functional.silu(gate) * up).float().mean())
    print(f"{same:.2%} of the gates have eager torch's bits")
    assert same > 0.999


if __name__ == "__main__":
    main()
