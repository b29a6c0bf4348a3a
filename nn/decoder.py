"""`Decoder`: the stack of a Llama-like model between embedding and head, over operators and a low-bit KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from terrazzo.lowering.errors import ArgumentError
from terrazzo.nn.attention import Attention
from terrazzo.nn.mlp import MLP, SparseMLP
from terrazzo.nn.norm import RMSNorm
from terrazzo.ops import weights
from terrazzo.ops.attention.kv_cache import Batch
from torch import nn


class DecoderLayer(nn.Module):
    """x = h + attention(norm(h)); x + mlp(norm(x)), with sums and norms in as few kernels as there can be.

    Args:
        input_norm, mlp_norm: RMSNorm in front of attention and MLP.
        post_attention, post_mlp: norms of what attention and MLP give, before it is added (Gemma), or None.
        rotary: number of the layer's kind of rotary positions.
    """

    def __init__(
        self,
        attention: Attention,
        mlp: MLP | SparseMLP,
        input_norm: RMSNorm,
        mlp_norm: RMSNorm,
        post_attention: RMSNorm | None = None,
        post_mlp: RMSNorm | None = None,
        rotary: int = 0,
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_norm, self.mlp_norm = input_norm, mlp_norm
        self.post_attention, self.post_mlp, self.rotary = post_attention, post_mlp, rotary

    def forward(
        self,
        h: torch.Tensor,
        delta: torch.Tensor | None,
        post: RMSNorm | None,
        angles: Sequence[tuple[torch.Tensor, torch.Tensor]],
        batch: Batch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(residual, what is still to be added to it), float16 or bfloat16 [T, hidden].

        Args:
            h, delta: float16 or bfloat16 [T, hidden], as the layer before gives them, h to be written.
            post: its `post_mlp`. angles: cos and sin, float32 [T, D], of each kind of rotary positions.
            batch: whose caches are read and written.
        """
        x, h = self.input_norm.before(self.self_attn.qkv_proj, h, delta, post)
        y = self.self_attn(x, *angles[self.rotary], batch, h.dtype)
        if isinstance(self.mlp, SparseMLP):  # the router reads what experts read
            x, h = self.mlp_norm.plain(h, y, self.post_attention)
        else:
            x, h = self.mlp_norm.before(self.mlp.gate_up_proj, h, y, self.post_attention)
        return h, self.mlp(x, h.dtype)


class Rotary(nn.Module):
    """Angles of rotary positions.

    Args:
        rates: float32 [D / 2], radians for each position. scaling: factor of cosine and sine.
    """

    def __init__(self, rates: torch.Tensor, scaling: float = 1.0) -> None:
        super().__init__()
        if not torch.is_tensor(rates) or rates.dim() != 1:
            raise ArgumentError("rates", weights.described(rates), "must be float [D / 2]", "use Rotary.of_base")
        self.register_buffer("rates", rates.float())
        self.scaling = scaling

    @classmethod
    def of_base(cls, head_dim: int, base: float = 10000.0) -> Rotary:
        """Plain rates base^(-2 i / D), D being head_dim."""
        weights.check_count("head_dim", head_dim, "pass the size of a head")
        if isinstance(base, bool) or not isinstance(base, int | float) or not base > 0:
            raise ArgumentError("base", base, "must be a number above 0", "pass the model's rope_theta")
        return cls(base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))

    def _apply(self, fn, recurse: bool = True) -> Rotary:
        rates = self.rates
        super()._apply(fn, recurse)
        if self.rates.dtype != rates.dtype:  # float16 would turn late positions by other angles
            self.rates = rates.to(self.rates.device)
        return self

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin float32 [T, D] of positions, integers [T]; both halves alike."""
        angle = positions[:, None].float() * torch.cat([self.rates, self.rates])
        if self.scaling == 1.0:
            return angle.cos(), angle.sin()
        return angle.cos() * self.scaling, angle.sin() * self.scaling


class Embedding(nn.Embedding):
    """Rows of a table, times a factor; the table itself may be the head's, too.

    Args:
        table: float [vocabulary, hidden]. scale: the factor, sqrt(hidden) in Gemma.
    """

    def __init__(self, table: torch.Tensor, scale: float = 1.0) -> None:
        super().__init__(*table.shape, _weight=table, _freeze=True)
        self.scale = scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., hidden] of tokens [...], times `scale` in their dtype."""
        h = super().forward(tokens)
        return h if self.scale == 1.0 else h * torch.tensor(self.scale, dtype=h.dtype)


class Decoder(nn.Module):
    """Embedding, layers and last norm: tokens in, hidden states out.

    Args:
        embedding: float [vocabulary, hidden]. layers: in order. norm: after the last one.
        rotaries: of each kind that layers name. scale: of the embeddings, sqrt(hidden) in Gemma.
    """

    def __init__(
        self,
        embedding: torch.Tensor,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        rotaries: Sequence[Rotary],
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if not torch.is_tensor(embedding) or embedding.dim() != 2 or not embedding.is_floating_point():
            constraint = "must be float [vocabulary, hidden]"
            raise ArgumentError("embedding", weights.described(embedding), constraint, "pass the embedding's weight")
        self.embed_tokens = Embedding(embedding, scale)
        self.layers, self.norm, self.rotaries = nn.ModuleList(layers), norm, nn.ModuleList(rotaries)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden] of the T new tokens of a batch's sequences, one sequence after another.

        Args:
            tokens: integers [T], or embeddings float16 or bfloat16 [T, hidden]. positions: integers [T].
            batch: of `KVCache.extend`; each layer stores its keys and values in it.
        """
        if torch.is_autocast_enabled(tokens.device.type):  # the model has its dtype, and kernels know no other
            with torch.autocast(tokens.device.type, enabled=False):
                return self(tokens, positions, batch)
        h = tokens.clone() if tokens.is_floating_point() else self.embed_tokens(tokens)  # layers write to it
        angles = [rotary(positions) for rotary in self.rotaries]
        delta, post = None, None
        for layer in self.layers:
            h, delta = layer(h, delta, post, angles, batch)
            post = layer.post_mlp
        return self.norm(h) if delta is None else self.norm.plain(h, delta, post)[0]


def positions_of(batch: Batch) -> torch.Tensor:
    """int32 [T] on the device: the positions of a batch's new tokens where no sequence has padding."""
    if batch.new == [1] * len(batch.new):
        return batch.lengths - 1
    ends = batch.lengths - batch.starts[1:]
    total = sum(batch.new)  # known here, so that nothing waits for the device
    shift = ends.repeat_interleave(batch.starts.diff(), output_size=total)
    return torch.arange(total, device=ends.device, dtype=torch.int32) + shift
