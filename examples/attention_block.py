"""An attention block with 4-bit weights, activations of 4 and 8 bits, and 4-bit keys and values (COMET): W4Ax + KV4.

    python examples/attention_block.py              decodes a few tokens, beside the same block in float
    python examples/attention_block.py --compile    where there is no GPU: also compiles the kernels, for sm_90a

RMSNorm and quantization in one kernel, QKV product, RoPE in torch, keys and values into a paged cache, attention over
it, quantization, output product. Without a GPU every kernel is replaced by its definition in torch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import terrazzo
import torch

attention, w4ax = terrazzo.ops.attention, terrazzo.ops.w4ax
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 512, 4, 2, 128
EPS, ROPE_BASE = 1e-5, 10000.0
K_FORMAT, V_FORMAT = "int4_channel128", "int4"  # keys by channel over 128 tokens, values by token
PROMPTS, STEPS = (150, 70), 3  # tokens of each sequence's prompt; decoded tokens


@dataclass
class Block:
    """Float weights of an attention block, their W4Ax forms, and the gain of the norm in front."""

    gain: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    qkv4: w4ax.QuantizedWeight
    out4: w4ax.QuantizedWeight


def split(qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k [..., heads, 128] turned by their positions, and v."""
    q, k, v = qkv.unflatten(-1, (-1, HEAD_DIM)).split((HEADS, KV_HEADS, KV_HEADS), dim=-2)
    half = HEAD_DIM // 2
    rates = ROPE_BASE ** (-torch.arange(half, device=qkv.device) / half)
    angle = positions[..., None, None] * rates

    def turn(x: torch.Tensor) -> torch.Tensor:
        a, b = x.float().split(half, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1).to(x.dtype)

    return turn(q), turn(k), v.contiguous()


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS) * gain


def in_float(block: Block, xs: list[torch.Tensor]) -> torch.Tensor:
    """The block without any quantization: y [sequences, STEPS, HIDDEN] of the last tokens of each sequence."""
    made = []
    for x in xs:
        q, k, v = split(normed(x, block.gain) @ block.qkv.T, torch.arange(len(x), device=x.device))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for t in (k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)
        made.append(o.flatten(1)[-STEPS:])
    return torch.stack(made) @ block.out.T


def product(x: torch.Tensor, w: w4ax.QuantizedWeight, gain: torch.Tensor | None = None) -> torch.Tensor:
    """The definition of `quantize_activations` and `gemm`."""
    from terrazzo.ops.w4ax import reference

    facts = dict(blocks8=w.blocks8, permutation=w.permutation, rms_weight=gain, eps=EPS, granularity="two_level")
    return (
        reference.gemm(*reference.quantize_activations(x.flatten(0, -2), **facts), w)
        .to(x.dtype)
        .unflatten(0, x.shape[:-1])
    )


def defined(block: Block, xs: list[torch.Tensor]) -> torch.Tensor:
    """What the kernels compute, in torch: y [sequences, STEPS, HIDDEN]."""
    from terrazzo.ops.attention.decoding import reference

    made = []
    for x in xs:
        q, k, v = split(product(x, block.qkv4, block.gain), torch.arange(len(x), device=x.device))
        for tokens in range(len(x) - STEPS + 1, len(x) + 1):
            held = (t[None, :tokens].transpose(1, 2) for t in (k, v))
            cache = attention.pack_cache(*held, K_FORMAT, V_FORMAT)
            made.append(reference.decode(q[None, tokens - 1 : tokens], cache)[0].to(x.dtype).flatten(1))
    o = torch.cat(made).view(len(xs), STEPS, -1)
    return product(o, block.out4)


def on_gpu(block: Block, xs: list[torch.Tensor]) -> torch.Tensor:
    """The prompts are stored, then STEPS tokens of every sequence are decoded together; y as in `defined`."""
    device = block.gain.device
    qkv, out = block.qkv4.pack(), block.out4.pack()

    def project(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        quantized = w4ax.quantize_activations(x, qkv, rms_weight=block.gain, eps=EPS)
        return split(w4ax.gemm(quantized, qkv, out_dtype=x.dtype), positions)

    cache = attention.KVCache(K_FORMAT, V_FORMAT, kv_heads=KV_HEADS, head_dim=HEAD_DIM, pages=8, device=device)
    sequences = [cache.new() for _ in xs]
    prompts = [x[:-STEPS] for x in xs]
    _, k, v = project(torch.cat(prompts), torch.cat([torch.arange(len(p), device=device) for p in prompts]))
    cache.extend({s: len(p) for s, p in zip(sequences, prompts)}).store(k, v)
    made = []
    for step in range(STEPS):
        new = torch.stack([x[len(p) + step] for x, p in zip(xs, prompts)])[:, None]
        positions = torch.tensor([len(p) + step for p in prompts], device=device)[:, None]
        q, k, v = project(new, positions)
        batch = cache.extend(dict.fromkeys(sequences, 1))
        batch.append(k, v)
        made.append(w4ax.gemm(batch.decode(q).flatten(2), out))  # [sequences, 1, HIDDEN], quantized first
    return torch.cat(made, dim=1)


def random_block(device: str, calibration: torch.Tensor) -> Block:
    """Random weights; some channels of the norm's gain are large, as in trained models."""
    gain = torch.rand(HIDDEN) + 0.5
    gain[torch.randperm(HIDDEN)[:12]] *= 10
    gain = gain.to(device)
    qkv, out = (torch.randn(n, k) / k**0.5 for n, k in (((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN)))
    qkv, out = (qkv / gain.cpu().square().mean().sqrt()).to(device), out.to(device)

    x = normed(calibration.to(device), gain)
    q, k, v = split(x @ qkv.T, torch.arange(len(x), device=device))
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for t in (k, v))
    o = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)
    made = []
    for weight, seen in ((qkv, x), (out, o.flatten(1))):
        statistics = w4ax.ActivationStatistics.empty(HIDDEN, device=device).observe(seen)
        plan = w4ax.plan_blocks(statistics)
        made.append(w4ax.quantize_weight(weight, plan, importance=statistics.mean_square))
    return Block(gain, qkv, out, *made)


def kernels(block: Block) -> list:
    """Those of decoding on sm_90a."""
    target = terrazzo.Target.parse("sm_90a")
    found = attention.kernel_requests(K_FORMAT, V_FORMAT, heads=HEADS, kv_heads=KV_HEADS, target=target)
    for w, norm in ((block.qkv4, True), (block.out4, False)):
        permuted = w.permutation is not None
        facts = dict(blocks8=w.blocks8, m=len(PROMPTS), permuted=permuted, norm=norm, target=target)
        found += w4ax.kernel_requests(w.n, w.k, **facts)
    return found


def relative(y: torch.Tensor, ref: torch.Tensor) -> float:
    return float((y.float() - ref.float()).norm() / ref.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile the kernels where there is no GPU")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    block = random_block(device, torch.randn(64, HIDDEN))
    for name, w in (("qkv", block.qkv4), ("out", block.out4)):
        print(f"{name}: {w!r}")
    xs = [torch.randn(tokens + STEPS, HIDDEN, device=device, dtype=torch.float16) for tokens in PROMPTS]
    y, ref = defined(block, xs), in_float(block, xs)
    error = relative(y, ref)
    print(f"{STEPS} tokens after prompts of {PROMPTS}: {error:.1%} from the block in float")
    assert error < 0.3
    if device == "cpu":
        found = kernels(block)
        print(f"no GPU here: the kernels were not run; on sm_90a they are {', '.join(sorted({r.name for r in found}))}")
        if options.compile:
            failed = [made for made in terrazzo.lowering.compile_many(found) if isinstance(made, Exception)]
            print(f"compiled {len(found) - len(failed)} kernels")
            assert not failed, failed[0]
        return
    got = on_gpu(block, xs)
    print(f"ran on {torch.cuda.get_device_name()}: {relative(got, y):.2%} from the definition in torch")
    assert relative(got, y) < 0.03 and relative(got, ref) < 0.3


if __name__ == "__main__":
    main()
