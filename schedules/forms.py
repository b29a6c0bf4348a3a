"""Forms of a product: what schedules know of the programs for one pair of operands and scales. All of it is data.

A form says which fields of `StreamK` its tile program is built with, which sums a thread holds beside its operands, and
what lies in shared memory; its costs are in `costs`. Keys are the operands and the scales of a `Gemm`; one whose weight
has a form of its own names the weight before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from terrazzo.schedules import tile_costs

if TYPE_CHECKING:
    from terrazzo.schedules.problem import Gemm
    from terrazzo.schedules.small_batch import SmallBatch
    from terrazzo.schedules.stream_k import StreamK

_TILE = ("block_tokens", "warpgroups", "row_blocks", "stages", "raster", "cluster")
WIDTHS = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
NARROW_WIDTHS = WIDTHS[:8]
AT_ONCE = 128
"""Most tokens of a product whose sums wait to be scaled; a wider tile has two, which take turns."""
OUT_PITCH = {2: 24 * 2, 4: 20 * 4}
"""Bytes of an output element -> of a staged row of 16."""
_SUMS = {(2, 1): 128, (3, 1): 64, (4, 1): 32, (1, 2): 64, (2, 2): 32}
"""(warpgroups, CTAs of an SM) -> f32 sums of a thread that leave room for two sets of 16-bit operands."""
_BYTE_SUMS = {1: 128, 2: 128, 3: 64, 4: 64}
"""Warpgroups -> sums of a thread that ptxas places without serializing wgmma of bytes (and bytes to spare)."""
_DIRECT_SUMS = {1: 192, 2: 192, 3: 96, 4: 64}
"""The same where both operands lie in shared memory, sums of 128 k included."""
_BLOCK_SUMS = {1: 192, 2: 192, 3: 96, 4: 64}
"""The same, f32 and s32 together, where the sums of each block are scaled."""
_STASHED_SUMS = {3: 64}
"""s32 sums alone, where the f32 ones lie in shared memory."""


@dataclass(frozen=True, eq=False)
class Form:
    """One way to compute a product.

    Attributes:
        program: its tile program on wgmma. fields: of `StreamK`, which that takes and records hold.
        widths: tokens of its tiles.
        sums: registers of a thread for accumulators. crowded: why a tile does not fit the registers, or "".
        parts: whether CTAs that share a tile alike part its sum.
        warpgroup_bytes: of shared memory for each warpgroup, besides the ring. token_bytes: of a token in a ring stage,
            besides x.
        flags: semaphores of a warpgroup. least: stages of a ring.
        ring_k, experts_ring_k: k of a ring at most, alone and with experts: the programs unroll a round of it.
        step_k: a ring of fewer than four such steps hides less of the latency; 0: not measured.
        small_x: registers of a thread of small_batch for x, of each token tile. small_fixed: bytes of its barriers.
        small_own: what else its CTA holds. small_tokens: most tokens of it. small_pairs: whether heuristic and search
            take those where pairs of CTAs along k are clusters, and few rows of x.
        multistage_k: k of a stage of multistage. multistage_fixed: bytes of its CTA besides the ring, where k is whole
            and where it is split.
    """

    program: str
    fields: tuple[str, ...]
    sums: Callable[[StreamK], int]
    crowded: Callable[[StreamK], str]
    parts: Callable[[StreamK], bool]
    warpgroup_bytes: Callable[[StreamK, Gemm], int]
    small_own: Callable[[SmallBatch, Gemm], int]
    widths: tuple[int, ...] = WIDTHS
    token_bytes: int = 0
    flags: int = 4
    least: int = 2
    ring_k: int = 1024
    experts_ring_k: int = 1536
    step_k: int = 128
    small_x: int = 8
    small_fixed: int = 2048
    small_tokens: int = 16
    small_pairs: bool = True
    multistage_k: int = 128
    multistage_fixed: tuple[int, int] = (0, 1024)

    @property
    def x_16_bit(self) -> bool:
        """Whether operands have 16 bits; else bytes."""
        return "per_sm" in self.fields


def _tile_sums(s: StreamK) -> int:
    return s.row_blocks * s.block_tokens // 2


def _staged(s: StreamK, problem: Gemm, tokens: int = 32) -> int:
    """Bytes in which the four warps of a warpgroup stage the rows of y."""
    return 4 * min(s.block_tokens, tokens) * OUT_PITCH[problem.out_bytes]


def _crowded_16_bit(scaled: bool) -> Callable[[StreamK], str]:
    def crowded(s: StreamK) -> str:
        sums = _tile_sums(s) * (2 if scaled else 1)
        most = _SUMS.get((s.warpgroups, s.per_sm), 64 if s.warpgroups == 1 and s.cluster > 1 else 0)
        if (s.warpgroups, s.row_blocks, s.per_sm, s.stage_k) == (4, 1, 1, 64) and not scaled:
            most = 64  # sets of half as many operands
        if s.per_sm == s.warpgroups == s.row_blocks == 2:
            most //= 2  # the words of a stage take the registers
        if sums > most or s.stage_k not in (64, 128):
            return f"{s.per_sm} CTAs of {s.warpgroups} warpgroups with {sums} sums of a thread do not fit the registers"
        return ""

    return crowded


def _settled_sums(s: StreamK) -> int:
    """Those of all row blocks, and those of one group of k."""
    return (s.row_blocks * s.block_tokens + s.block_tokens // s.pieces) // 2


def _said(s: StreamK) -> str:
    return f"{s.warpgroups} warpgroups with {s.sums} sums of a thread do not fit the registers"


def _crowded_bytes(s: StreamK) -> str:
    """Accumulators leave room for two sets of operands (two row blocks need more addresses)."""
    tall = s.warpgroups == 4 and s.row_blocks > 1
    return "" if s.sums <= _BYTE_SUMS.get(s.warpgroups, 0) // (1 + tall) else _said(s)


def _crowded_e4m3(s: StreamK) -> str:
    """As of other bytes; and more than 128 tokens, whose ring is not unrolled, in two warpgroups of one row block."""
    if s.block_tokens > AT_ONCE and s.block_tokens <= 2 * AT_ONCE and s.row_blocks == 1:
        return "" if s.warpgroups == 2 else _said(s)
    return _crowded_bytes(s)


def _crowded_mx(s: StreamK) -> str:
    """As of other bytes; factors of tokens take registers, too."""
    return _crowded_bytes(s)


def _crowded_direct(s: StreamK) -> str:
    return "" if s.sums <= _DIRECT_SUMS.get(s.warpgroups, 0) else _said(s)


def held(s: StreamK) -> str:
    """How a thread holds s32 sums of a block beside the f32 ones of the tile, by the registers of so many warpgroups.

    "blocks": two sets, which alternate. "kept": one, and a copy that is scaled while wgmmas run. "whole": one.
    "halves": one, of half of the tokens at a time.
    """
    narrow = s.block_tokens <= 64
    if s.warpgroups == 4 and s.block_tokens > 32:
        return "whole"
    if s.warpgroups == 3 and not narrow:
        return "halves"
    return "blocks" if narrow and not s.turns else "kept"


def _block_sums(s: StreamK) -> int:
    """f32 of the tile, s32, their copy."""
    return {"blocks": 6, "kept": 6, "whole": 4, "halves": 3}[held(s)] * s.block_tokens // 4


def _crowded_blocks(s: StreamK) -> str:
    alone = s.turns and s.warpgroups < 2
    fits = s.turns in (0, 1) and not alone and s.sums <= _BLOCK_SUMS.get(s.warpgroups, 0)
    return "" if fits else f"{_said(s)}, or have no turns"


def stashes(s: StreamK) -> bool:
    """Whether f32 sums of the INT4 blocks wait in shared memory: no registers beside the s32 sums of INT8."""
    return s.block_tokens > _BYTE_SUMS.get(s.warpgroups, 0)


def _crowded_precisions(s: StreamK) -> str:
    most = (_STASHED_SUMS if stashes(s) else _BYTE_SUMS).get(s.warpgroups, 0)
    return "" if s.block_tokens % 16 == 0 and 16 <= s.block_tokens and s.sums <= most else _said(s)


def _precision_bytes(s: StreamK, problem: Gemm) -> int:
    """Staged rows, the scales of the tokens, and where both precisions are in a tile the sums of one."""
    own = _staged(s, problem, 16 if stashes(s) else 32) + max(s.block_tokens, 32) * 4
    return own + (s.block_tokens * 256 if stashes(s) and 0 < problem.blocks8 < problem.units else 0)


def _byte_parts(s: StreamK) -> bool:
    """Two row blocks with that many sums would spill."""
    return tile_costs.parts_sums(s.warpgroups, s.sums) and (s.row_blocks == 1 or s.sums < 64)


def _row_scales(s: SmallBatch, problem: Gemm) -> int:
    """Scales of rows, those of a whole last chunk too, and of tokens, and sums of tokens."""
    return 4 * (-(-problem.row_tiles // s.nc) + s.chunk) * 16 + 64 * s.token_tiles


def _block_scales(s: SmallBatch, problem: Gemm) -> int:
    """Scales of tokens and blocks, and with two levels of rows."""
    rows = (-(-problem.row_tiles // s.nc) + s.chunk) * 16 if problem.two_level else 0
    return 4 * rows + -(-problem.units // s.kc) * s.token_tiles * 32


def _16_bit(scaled: bool) -> Form:
    return Form(
        program="stream_k",
        fields=("block_tokens", "warpgroups", "row_blocks", "stages", "stage_k", "raster", "per_sm", "cluster"),
        sums=_tile_sums,
        crowded=_crowded_16_bit(scaled),
        parts=lambda s: s.per_sm == 1 and tile_costs.parts_sums(s.warpgroups, s.sums),
        warpgroup_bytes=_staged,
        small_own=lambda s, problem: 4 * -(-problem.units // s.kc) * problem.groups_per_128 * s.x_rows,  # sums of x
        widths=WIDTHS,
        least=3,
        experts_ring_k=1024,
        step_k=64,
        small_x=24,
        small_fixed=1280,
        multistage_k=64,
        multistage_fixed=(1024, 1024),
    )


def _bytes(sums: Callable[[StreamK], int], crowded: Callable[[StreamK], str]) -> Form:
    return Form(
        program="stream_k",
        fields=_TILE,
        sums=sums,
        crowded=crowded,
        parts=_byte_parts,
        warpgroup_bytes=lambda s, problem: _staged(s, problem) + 8 * s.block_tokens,  # scales and sums of tokens
        small_own=_row_scales,
        small_tokens=32,
    )


def _direct(settles: bool, token_bytes: int = 0, widths: tuple[int, ...] = WIDTHS) -> Form:
    """Of W8A8: sums of a tile, and where those of 128 k are kept apart, of as many tokens as are multiplied at once."""
    return Form(
        program="stream_k",
        fields=_TILE,
        sums=lambda s: _tile_sums(s) + (s.block_tokens // s.pieces // 2 if settles else 0),
        crowded=_crowded_direct,
        parts=_byte_parts,
        warpgroup_bytes=lambda s, problem: _staged(s, problem) + 8 * s.block_tokens,
        small_own=_row_scales,
        widths=widths,
        token_bytes=token_bytes,
        small_tokens=0,
    )


def _mixed(
    program: str, sums: Callable[[StreamK], int], crowded: Callable[[StreamK], str],
    warpgroup_bytes: Callable[[StreamK, Gemm], int], more: tuple[str, ...] = (), token_bytes: int = 0,
) -> Form:  # fmt: skip
    """Of W4Ax; `more`: fields of its program."""
    return Form(
        program=program,
        fields=("block_tokens", "warpgroups", "stages", "raster", *more),
        sums=sums,
        crowded=crowded,
        parts=lambda s: False,
        warpgroup_bytes=warpgroup_bytes,
        small_own=_block_scales,
        widths=NARROW_WIDTHS,
        token_bytes=token_bytes,
        flags=1,
        ring_k=1536,
        step_k=0,
        small_pairs=False,  # not measured
    )


FORMS: Mapping[str, Form] = {
    "f16 fold": _16_bit(scaled=False),
    "f16 post": _16_bit(scaled=True),
    "s8 integer": _bytes(_tile_sums, _crowded_bytes),
    "e4m3 post": _bytes(_settled_sums, _crowded_e4m3),
    "e4m3 mx": replace(_bytes(_settled_sums, _crowded_mx), token_bytes=4, small_tokens=0, widths=WIDTHS[:8]),
    "s8 direct": _direct(settles=False),
    "e4m3 fast": _direct(settles=False),
    "e4m3 promoted": _direct(settles=True),
    "e4m3 block": _direct(settles=True, token_bytes=4, widths=WIDTHS[:-2]),  # wider ones spill
    "s4_s8 block": _mixed("stream_k", _block_sums, _crowded_blocks, _staged, ("turns",), token_bytes=4),
    "s4_s8 integer": _mixed(
        "integer", lambda s: s.block_tokens // (1 + stashes(s)), _crowded_precisions, _precision_bytes
    ),
}


def name_of(weight: str, activations: str, scales: str) -> str:
    """The key of a problem's form: of its weight, where that has one of its own, else of all weights."""
    own = f"{weight} {activations} {scales}"
    return own if own in FORMS else f"{activations} {scales}"
