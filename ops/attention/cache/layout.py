"""Where keys, values and their parameters lie in a packed cache: derived from the m16n8k16 A fragment (specs.md I.6).

Keys are the A operand of S^T = K Q^T (rows tokens, k head dimensions), values of O^T = V^T P^T (rows head dimensions,
k tokens); both stay in registers from the load to the tensor core. The unit is a tile of 16 tokens of one kv head:

    tile    [ K words | V words | parameters of its tokens ]        int32
    block   [ channel parameters of K | tiles of one group ]        without channel-wise keys: a tile
    page    [ blocks ]                                              the tokens of one kv head that a page holds

Any stage size and any number of warps read the same bytes, and parameters go wherever a page goes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from terrazzo.layouts.fragment import Fragment
from terrazzo.layouts.packed import PackedLayout, derive
from terrazzo.layouts.rows import RowLayout, derive_rows
from terrazzo.lowering.errors import ArgumentError
from terrazzo.ops.products.kv import HEAD_DIMS, TILE_TOKENS, KVFormat, get_format

if TYPE_CHECKING:
    import torch


def operand_layout(fmt: KVFormat, head_dim: int, transposed: bool) -> PackedLayout:
    """The packed tile of keys [16 tokens, head_dim], or of values [head_dim, 16 tokens] if `transposed`.

    A lane fetches with each load as many m16k16 atoms as fit into 16 bytes, or all of them where there are fewer.
    """
    converter, fragment = fmt.converter, Fragment.mma_a(16)
    words = min(4, head_dim // 16 * fragment.registers // converter.outputs)
    atoms = words * converter.outputs // fragment.registers
    placement = [(atom, 0) if transposed else (0, atom) for atom in range(atoms)]
    return derive(fragment, converter, fmt.bits, words, placement, "atom", "kr" if transposed else "rk")


@dataclass(frozen=True)
class Exponents:
    """Powers of two that a converter leaves in an operand: code * 2^(row[r] + k[h]) in halves r and h."""

    row: tuple[int, int]
    k: tuple[int, int]


def exponents(fmt: KVFormat, layout: PackedLayout) -> Exponents:
    """The separable form of a converter's exponents; ArgumentError if an atom of the layout needs another one."""
    scale, seen = fmt.converter.scale_exp2, {}
    for word in range(layout.load_words):
        for output in range(fmt.converter.outputs):
            seen.setdefault(layout.target(word, output)[1], set()).add(scale[output])
    if all(len(found) == 1 for found in seen.values()):
        e = [next(iter(seen[register])) for register in range(4)]  # register = row half + 2 * k half
        if e[3] - e[2] == e[1] - e[0]:
            return Exponents((e[0], e[1]), (0, e[2] - e[0]))
    raise ArgumentError("converter", fmt.converter.name, "its exponents must separate into row and k", "use another")


@dataclass(frozen=True, eq=False)
class QuantizedBlock:
    """Keys or values of some heads.

    Attributes:
        codes: [..., T, D]: uint8 codes, or int16 bit patterns of f16 and bf16.
        scale, zero: f16; token-wise [..., T], channel-wise [..., T / group, D]; None for other formats.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None


@dataclass(frozen=True)
class CacheLayout:
    """The packed form of one kv head for a pair of formats. Words are int32.

    Args:
        k_format, v_format: names of `FORMATS`.
        head_dim: 64, 128 or 256.
        sink_tokens: first tokens of a sequence that stay f16 beside the residual ring once they are packed, 0 or 16.
    """

    k_format: str
    v_format: str
    head_dim: int
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        get_format(self.k_format, "keys"), get_format(self.v_format, "values")
        if type(self.head_dim) is not int or self.head_dim not in HEAD_DIMS:  # 128.0 would be found as 128's kernel
            raise ArgumentError("head_dim", self.head_dim, f"must be one of {HEAD_DIMS}", "pad the heads")
        if type(self.sink_tokens) is not int or self.sink_tokens not in (0, TILE_TOKENS):
            raise ArgumentError("sink_tokens", self.sink_tokens, f"must be 0 or {TILE_TOKENS}", "use 0 for none")
        if self.sink_tokens and self.k.group:
            constraint = f"{self.k_format} keys keep whole groups of tokens in f16, not the first ones"
            raise ArgumentError("sink_tokens", self.sink_tokens, constraint, "use token-wise keys, or 0")

    # -- parts ---------------------------------------------------------------------------------------------------------
    @property
    def k(self) -> KVFormat:
        """Format of the keys."""
        return get_format(self.k_format, "keys")

    @property
    def v(self) -> KVFormat:
        """Format of the values."""
        return get_format(self.v_format, "values")

    @cached_property
    def k_layout(self) -> PackedLayout:
        """Order of the key codes of a tile."""
        return operand_layout(self.k, self.head_dim, False)

    @cached_property
    def v_layout(self) -> PackedLayout:
        """Order of the value codes of a tile."""
        return operand_layout(self.v, self.head_dim, True)

    @cached_property
    def rows(self) -> RowLayout:
        """Order of per-token parameters: tokens g and g + 8 of a lane side by side."""
        return derive_rows(Fragment.mma_a(16), TILE_TOKENS)

    @cached_property
    def channel_index(self) -> np.ndarray:
        """Head dimension of each channel-wise parameter, int64 [head_dim], in order [load, t, slice, half, pair].

        One LDS.128 of lane quad position t holds what it multiplies its B fragments of two k16 slices with.
        """
        load, t, inner, half, pair = np.indices((self.head_dim // 32, 4, 2, 2, 2)).reshape(5, -1)
        return 16 * (2 * load + inner) + 8 * half + 2 * t + pair

    # -- sizes ---------------------------------------------------------------------------------------------------------
    @property
    def k_words(self) -> int:
        """32-bit words of the key codes of a tile."""
        return TILE_TOKENS * self.head_dim * self.k.bits // 32

    @property
    def v_words(self) -> int:
        """32-bit words of the value codes of a tile."""
        return TILE_TOKENS * self.head_dim * self.v.bits // 32

    @property
    def token_params(self) -> int:
        """Words of parameters for each token: one for token-wise keys, one for token-wise values."""
        return (self.k.token_wise) + (self.v.token_wise)

    @property
    def param_offset(self) -> int:
        """Word of a tile at which its tokens' parameters begin."""
        return self.k_words + self.v_words

    @property
    def tile_words(self) -> int:
        """32-bit words of a tile of 16 tokens: codes and parameters of tokens."""
        return self.param_offset + TILE_TOKENS * self.token_params

    @property
    def block_tokens(self) -> int:
        """Tokens of a block: the channel group of the keys, or a tile."""
        return self.k.group or TILE_TOKENS

    @property
    def channel_words(self) -> int:
        """Words of channel parameters at the head of a block: scales, then zeros, f16."""
        return self.head_dim if self.k.group else 0

    @property
    def block_words(self) -> int:
        """32-bit words of a block: channel parameters and tiles."""
        return self.channel_words + self.block_tokens // TILE_TOKENS * self.tile_words

    def params(self) -> dict[str, str | int]:
        """The arguments of a kernel's builder that name this layout."""
        found: dict[str, str | int] = dict(k_format=self.k_format, v_format=self.v_format, head_dim=self.head_dim)
        return found | ({"sink_tokens": self.sink_tokens} if self.sink_tokens else {})

    def kept(self, residual: int) -> tuple[int, int]:
        """(newest tokens that are never packed, tokens that are packed at once) with an f16 ring of `residual` tokens:
        whole channel groups, which leave the ring empty, or the oldest tile of a full ring of token-wise keys."""
        return (0, residual) if self.k.group else (max(residual - TILE_TOKENS, 0), TILE_TOKENS)

    def packed(self, length: int, residual: int) -> int:
        """How many of the first tokens of a sequence are packed; later ones lie in the ring. length: an int, or a
        tensor of them."""
        if not residual:
            return length
        least, unit = self.kept(residual)
        rest = length - least
        rest = max(rest, 0) if isinstance(rest, int) else rest.clamp(min=0)
        return rest // unit * unit

    def words(self, tokens: int) -> int:
        """Words of a page of `tokens` tokens, a multiple of `block_tokens`."""
        if tokens % self.block_tokens or tokens < 1:
            constraint = f"must be a positive multiple of {self.block_tokens} for {self.k_format} keys"
            raise ArgumentError("tokens", tokens, constraint, "round up")
        return tokens // self.block_tokens * self.block_words

    @cached_property
    def identity(self) -> str:
        """Stable name of the byte order."""
        parts = (self.k_layout.identity, self.v_layout.identity, self.block_tokens, self.token_params)
        digest = hashlib.sha256(repr((*parts, self.rows.index.tolist())).encode()).hexdigest()[:12]
        sink = f".sink{self.sink_tokens}" if self.sink_tokens else ""
        return f"kv.{self.k_format}.{self.v_format}.d{self.head_dim}{sink}.{digest}"

    # -- packing -------------------------------------------------------------------------------------------------------
    def pack(self, k, v):
        """int32 [..., T / block_tokens, block_words] of two `QuantizedBlock`s with codes [..., T, head_dim]."""
        import torch

        lead, tokens = k.codes.shape[:-2], k.codes.shape[-2]
        self.words(tokens)
        tiles, blocks = tokens // TILE_TOKENS, tokens // self.block_tokens
        flat = [q.codes.reshape(-1, self.head_dim) for q in (k, v)]
        parts = [
            self.k_layout.pack(flat[0]).reshape(*lead, tiles, self.k_words),
            self.v_layout.pack(flat[1].T).reshape(*lead, tiles, self.v_words),
        ]
        pairs = [torch.stack([q.scale, q.zero], -1) for q, f in ((k, self.k), (v, self.v)) if f.token_wise]
        if pairs:
            index = torch.from_numpy(self.rows.index).to(flat[0].device)
            params = torch.stack([p.reshape(*lead, tiles, TILE_TOKENS, 2)[..., index, :] for p in pairs], -2)
            # [..., 8 g, 2 of the pair, keys | values, (scale, zero)] -> a lane's words adjacent, keys first
            params = params.unflatten(-3, (8, 2)).transpose(-3, -2).contiguous().view(torch.int32)
            parts.append(params.reshape(*lead, tiles, -1))
        whole = torch.cat(parts, -1).reshape(*lead, blocks, -1)
        if self.channel_words:
            index = torch.from_numpy(self.channel_index).to(flat[0].device)
            channel = torch.cat([k.scale[..., index], k.zero[..., index]], -1).contiguous().view(torch.int32)
            whole = torch.cat([channel, whole], -1)
        return whole.contiguous()

    def unpack(self, words):
        """The two `QuantizedBlock`s of packed words int32 [..., blocks, block_words]; the inverse of `pack`."""
        import torch

        lead, blocks = words.shape[:-2], words.shape[-2]
        if not blocks:
            whole = self.unpack(words.new_zeros(*lead, 1, self.block_words))
            parts = ([t if t is None else t.narrow(len(lead), 0, 0) for t in (q.codes, q.scale, q.zero)] for q in whole)
            return tuple(QuantizedBlock(*part) for part in parts)
        tiles = blocks * self.block_tokens // TILE_TOKENS
        tokens, rows = tiles * TILE_TOKENS, lead.numel() * tiles * TILE_TOKENS
        body = words[..., self.channel_words :].reshape(*lead, tiles, self.tile_words)
        k = body[..., : self.k_words].reshape(rows // TILE_TOKENS, -1, self.k_layout.words_per_block)
        v = body[..., self.k_words : self.param_offset].reshape(rows // TILE_TOKENS, -1, self.v_layout.words_per_block)
        codes = [
            self.k_layout.unpack(k.contiguous(), rows, self.head_dim).reshape(*lead, tokens, -1),
            self.v_layout.unpack(v.contiguous(), self.head_dim, rows).T.reshape(*lead, tokens, -1),
        ]
        found = []
        if self.token_params:
            params = body[..., self.param_offset :].contiguous().view(torch.float16)
            params = params.reshape(*lead, tiles, 8, self.token_params, 2, 2).transpose(-3, -2).flatten(-4, -3)
            back = torch.from_numpy(np.argsort(self.rows.index)).to(words.device)
            params = params[..., back, :, :].reshape(*lead, tokens, self.token_params, 2)
            found = [params[..., i, :] for i in range(self.token_params)]
        made = []
        for fmt, code in zip((self.k, self.v), codes):
            scale = zero = None
            if fmt.token_wise:
                scale, zero = found.pop(0).unbind(-1)
            elif fmt.scaling == "channel":
                back = torch.from_numpy(np.argsort(self.channel_index)).to(words.device)
                channel = words[..., : self.channel_words].contiguous().view(torch.float16)
                scale, zero = (part[..., back] for part in channel.unflatten(-1, (2, -1)).unbind(-2))
            made.append(QuantizedBlock(code, scale, zero))
        return tuple(made)


def residual_layout(layout: CacheLayout) -> CacheLayout:
    """The residual block of any pair of formats: f16 tiles."""
    return CacheLayout("float16", "float16", layout.head_dim)
