"""A small decoder with random 4-bit weights and what `generate` asks of a model; CPU or GPU."""

from __future__ import annotations

import torch
from terrazzo import nn
from terrazzo.ops.attention import KVCache

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 128, 256, 2, 1, 64, 2, 96


class SmallModel:
    """`decoder`, `lm_head` and `new_cache`.

    Args:
        formats: of keys and values. weights: format of the linear layers.
    """

    def __init__(self, formats=("float16", "float16"), weights="w4a16-g32", device="cpu", seed=0) -> None:
        torch.manual_seed(seed)
        random = lambda n, k: torch.randn(n, k) * 1.5 / k**0.5
        options = {"target": "sm_90a"} if weights == "w4ax" else {}
        linear = lambda n, k: nn.Linear.from_float(random(n, k).to(device), weights, **options)
        joined = lambda kind, *rows: kind.join(*(linear(n, HIDDEN) for n in rows))
        if weights == "w4ax":  # layers of one input share a plan
            floats = lambda rows: [random(n, HIDDEN).to(device) for n in rows]
            joined = lambda kind, *rows: kind.from_float(floats(rows), weights, **options)
        norm = lambda: nn.RMSNorm(torch.rand(HIDDEN).half().to(device) + 0.5)
        layers = []
        for index in range(LAYERS):
            qkv = joined(nn.QKVLinear, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
            out = linear(HIDDEN, HEADS * HEAD_DIM)
            sizes = dict(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, layer=index)
            mlp = nn.MLP(joined(nn.GateUpLinear, FFN, FFN), linear(HIDDEN, FFN))
            layers.append(nn.DecoderLayer(nn.Attention(qkv, out, **sizes), mlp, norm(), norm()))
        embedding = torch.randn(VOCABULARY, HIDDEN).half().to(device)
        self.decoder = nn.Decoder(embedding, layers, norm(), [nn.Rotary.of_base(HEAD_DIM).to(device)])
        self.head = (torch.randn(VOCABULARY, HIDDEN) * 3 / HIDDEN**0.5).half().to(device)
        self.formats, self.device = formats, device

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.head)

    def new_cache(self, sequences: int, tokens: int) -> KVCache:
        pages = sequences * -(-tokens // 64)
        sizes = dict(kv_heads=KV_HEADS, head_dim=HEAD_DIM, layers=LAYERS, page_size=64)
        return KVCache(*self.formats, pages=pages, sequences=sequences, device=self.device, **sizes)

    def recomputed(self, tokens: list[int]) -> torch.Tensor:
        """Logits [vocabulary] behind all of `tokens`, without any step before: one prefill in a cache of its own."""
        cache = self.new_cache(1, len(tokens))
        batch = cache.extend({cache.new(): len(tokens)})
        ids = torch.tensor(tokens, device=self.device)
        with torch.no_grad():
            return self.lm_head(self.decoder(ids, nn.positions_of(batch), batch))[-1]
