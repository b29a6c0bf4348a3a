"""The f16 tokens of a cache in decode attention: the ring behind the packed tokens, or a group that is not full yet.

Warps take a tile of 16 tokens each in turn, over all splits of a sequence.
"""

from typing import NamedTuple

from terrazzo.ops.attention.decoding.decode_arguments import Decode
from terrazzo.ops.attention.device.calls import at_page
from terrazzo.ops.attention.device.decode_copies import peek
from terrazzo.ops.attention.device.tile_macros import Tile, larger, less, smaller
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Macro


class Ring(NamedTuple):
    """Macros of the f16 tokens.

    RES and SLOT are the program's tensors. `w` as in decode_copies, with `tile`, `parts` and `slot` where the ring
    takes over inside a stage.
    """

    prefetch_ring: Macro
    read_group: Macro
    read_ring: Macro


def make_ring_macros(p: Decode, tile: Tile, spare: Tile | None) -> Ring:
    """Those of a kernel; tile, spare: macros of packed tiles and of f16 tiles, None where no tokens are f16."""
    warps, residual, sink_tokens = p.warps, p.residual, p.sink_tokens
    spare_tiles = residual // 16 + 1  # one more than a block: new tokens never overwrite those of a block to be packed

    @T.macro
    def find_ring(w, at):
        """w.source, w.tile: first token of the tile number `at` that lies in f16, its place; w.parts: how many there
        are, the first tokens' one counted if it is not the ring's."""
        first = T.call_extern("int32", "tz_select", less(0, w.packed[0]), 1, 0) if sink_tokens else 0
        w.parts[0] = (w.length[0] - w.packed[0] + 15) // 16 + first
        w.source[0] = w.packed[0] + (at - first) * 16
        w.tile[0] = w.source[0] // 16 % spare_tiles
        if sink_tokens:
            if less(at, first):
                w.source[0] = 0
                w.tile[0] = spare_tiles

    def ring_tile(RES, w, slot):
        """Address of the tile w.tile of a residual ring."""
        at = w.h[0] * RES.shape[2] + w.tile[0] * spare.of.layout.tile_words
        return at_page(RES, slot, at)

    @T.macro
    def prefetch_ring(RES, SLOT, w):
        """The warp's first tile of those in f16 on its way to L2; where that is may be wrong."""
        find_ring(w, w.warp[0] * w.splits + w.split)
        wanted = T.And(less(w.warp[0] * w.splits + w.split, w.parts[0]), less(w.lane[0], 1))
        if T.And(wanted, less(-1, w.tile[0])):
            slot = smaller(larger(peek(SLOT, w.b), 0), RES.shape[0] - 1)
            T.call_extern("handle", "tz_prefetch", ring_tile(RES, w, slot), 4 * spare.of.layout.tile_words)

    @T.macro
    def read_group(RES, SLOT, st, w):
        """The f16 tokens of a channel group that is not full yet, a tile for each warp in turn."""
        for i in T.serial(T.ceildiv(w.length[0] - w.packed[0], 16 * warps * w.splits)):
            j = (i * warps + w.warp[0]) * w.splits + w.split
            if less(w.packed[0] + j * 16, w.length[0]):
                spare.step(
                    at_page(
                        RES, peek(SLOT, w.b),
                        w.h[0] * RES.shape[2] + (w.packed[0] // 16 + j) % spare_tiles * spare.of.layout.tile_words,
                    ),
                    st, st.qk, w.packed[0] + j * 16, w.length[0], True, w.lane[0],
                )  # fmt: skip
        tile.adopt(st)

    @T.macro
    def read_ring(RES, SLOT, st, w):
        """The f16 tokens behind the packed ones, and those ahead of them, a tile for each warp in turn."""
        find_ring(w, 0)
        for i in T.serial((w.parts[0] + warps * w.splits - 1) // (warps * w.splits)):
            at = (i * warps + w.warp[0]) * w.splits + w.split
            if less(at, w.parts[0]):
                find_ring(w, at)
                spare.step(ring_tile(RES, w, w.slot[0]), st, st.qk, w.source[0], w.length[0], True, w.lane[0])
        tile.adopt(st)

    return Ring(prefetch_ring, read_group, read_ring)
