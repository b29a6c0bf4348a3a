"""W4A16 stream_k whose packed words come by T.tma_copy, in place of the bulk copies of a named primitive.

A box of the tensor map is all row blocks of a tile: n must be a multiple of its rows. Sizes are known (n and k are not
0), and there are no experts. `tile_operators.py` compares it with the library's program.
"""

from terrazzo.ops.linear import stages, stream_k
from terrazzo.ops.linear.stages import Shape
from terrazzo.ops.tiles.calls import bulk
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.scheduler import Ring
from terrazzo.ops.tiles.types import Buffer, Macro, PrimFunc, Scalar

PASS_CONFIGS = stream_k.PASS_CONFIGS


def fill_macros(shape: Shape, rings: Ring) -> tuple[Macro, Macro]:
    """`stages.fill_macros` with `T.tma_copy` of words; parameters stay bulk copies, whose rows are no box."""
    op, halves, blocks, cta = shape.op, shape.halves, shape.blocks, shape.cta_blocks
    rec, records, shared_params, param_slot = op.record_bytes, shape.slot_records, shape.shared_params, shape.param_slot

    def boxes(words: Buffer) -> Buffer:
        """The same words in rows of 256, the most that a box has."""
        return T.reshape(words, (words.shape[0], 2 * words.shape[1], 256))

    @T.macro
    def load_params(io, c, kb, h):
        """One thread: the parameters, where the slot carries them."""
        T.mbarrier_expect_tx(io.full[io.ring.stage[0]], cta * records * rec)
        for q in T.unroll(records):
            record = 0 if op.group == 0 else (kb if shared_params else (kb * 2 + h) * records + q)
            bulk(
                io.Ps[param_slot(io.ring.stage[0], h), q * cta * rec], io.P[record, c.rows[0] * cta, 0], cta * rec,
                io.full[io.ring.stage[0]],
            )  # fmt: skip

    @T.macro
    def fill_weights(io, c, kb):
        """The warp of the weights: 128 k, in two slots."""
        for h in T.unroll(2):
            if h % halves == 0:
                rings.acquire(io.empty, io.ring)
            for b in T.unroll(blocks):
                unit, slot = (kb * 2 + h) * blocks + b, (io.ring.stage[0] * halves + h % halves) * blocks + b
                first = c.rows[0] * (2 * cta)
                T.tma_copy(
                    boxes(io.W)[unit, first : first + 2 * cta, :], boxes(io.Ws)[slot, 0 : 2 * cta, :],
                    barrier=io.full[io.ring.stage[0]], leader_scope_threads=32,
                )  # fmt: skip
            if io.leader:
                if op.has_groups and (h == 0 or not shared_params):
                    load_params(io, c, kb, h)
                if (h + 1) % halves == 0:
                    T.barrier_arrive(io.full[io.ring.stage[0]])
            if (h + 1) % halves == 0:
                rings.advance(io.ring)

    return fill_weights, stages.fill_macros(shape, rings)[1]


def build(target, **params: Scalar) -> PrimFunc:
    """The prim_func of `stream_k.build` with these copies."""
    original, stream_k.fill_macros = stream_k.fill_macros, fill_macros
    try:
        return stream_k.build(target, **params)
    finally:
        stream_k.fill_macros = original
