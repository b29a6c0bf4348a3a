"""A stage of the ring of programs on wgmma with 16-bit x: how large it is, who fills it, how its words become operands.

A slot holds 64 k: X [block_tokens, 64], swizzled by 128 bytes, and the packed blocks of each row block of the tile. A
stage is one slot or two. Parameters lie in slots of their own.
"""

from dataclasses import dataclass

from terrazzo.ops.linear.operand import Operand
from terrazzo.ops.linear.params import param_macros
from terrazzo.ops.linear.sizes import Sizes
from terrazzo.ops.products.codes import BLOCK_WORDS
from terrazzo.ops.tiles.calls import bulk, bulk_at, lds16, lds32, lds64, lds128, pack2, place, tma_tile
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.scheduler import Ring
from terrazzo.ops.tiles.types import Expr, Macro


@dataclass(frozen=True)
class Shape:
    """A CTA's tile and ring: the operand, the matrices' sizes, experts, tokens, warpgroups, row blocks of 64 of each,
    and stages of `stage_k` k, in slots of 64; others as of `schedules.stream_k.StreamK`."""

    op: Operand
    size: Sizes
    experts: int
    block_tokens: int
    warpgroups: int
    row_blocks: int
    stages: int
    stage_k: int = 64
    raster: int = 8
    per_sm: int = 1
    cluster: int = 1

    @property
    def halves(self) -> int:
        """Slots of a stage."""
        return self.stage_k // 64

    @property
    def blocks(self) -> int:
        """Packed blocks of a slot and a row block."""
        return self.op.format.blocks(64)

    @property
    def cta_blocks(self) -> int:
        """Row blocks of the tile."""
        return self.warpgroups * self.row_blocks

    @property
    def row_tiles(self) -> Expr:
        """Of a matrix."""
        of_tile = self.cta_blocks
        if self.size.known:
            return -(-self.size.blocks // of_tile)
        return T.truncdiv(self.size.blocks + (of_tile - 1), of_tile)

    @property
    def slot_groups(self) -> int:
        """Groups of a slot."""
        return self.op.groups_per(64)

    @property
    def slot_records(self) -> int:
        """Records of parameters of a slot."""
        return self.op.records_per(64)

    @property
    def shared_params(self) -> bool:
        """Whether two slots have the same parameters: then only even ones carry them."""
        return self.op.group in (0, 128)

    @property
    def param_shape(self) -> tuple[int, int]:
        """Of the ring of parameters, bytes."""
        if not self.op.has_groups:
            return 1, 16
        slots = self.stages if self.shared_params else self.stages * self.halves
        return slots, self.cta_blocks * self.slot_records * self.op.record_bytes

    @property
    def sums(self) -> int:
        """Of a thread and a row block."""
        return self.block_tokens // 2

    @property
    def batch(self) -> int:
        """k16 steps of a set of operands: fewer leave registers for more sums."""
        return 2 if self.block_tokens > (96 if self.warpgroups == 4 else 192) else 4

    @property
    def slot_units(self) -> int:
        """Of a descriptor of X, 16 bytes each."""
        return self.block_tokens * 64 * 2 // 16

    def param_slot(self, stage: Expr, h: int) -> Expr:
        return stage if self.shared_params else stage * self.halves + h % self.halves

    def first_tile(self, stage: Expr) -> Expr:
        """From the first stage's tiles of X to this one's, in the 16 bytes of a descriptor."""
        return T.cast(T.cast(stage, "uint32") * T.uint32(self.halves * self.slot_units), "uint64")


def fill_macros(shape: Shape, rings: Ring) -> tuple[Macro, Macro]:
    """Macros `fill_weights` and `fill_tokens` of the two producer warps."""
    op, size, halves, blocks, cta_blocks = shape.op, shape.size, shape.halves, shape.blocks, shape.cta_blocks
    group, rec, ir, shared_params = op.group, op.record_bytes, shape.slot_records, shape.shared_params
    units, all_blocks, records, param_slot = size.units, size.blocks, size.records, shape.param_slot
    block_bytes = BLOCK_WORDS * 4

    @T.macro
    def load_weights(io, c, kb, h):
        """One thread: the packed words of 64 k, and the parameters where the slot carries them."""
        count = T.max(T.min(cta_blocks, all_blocks - c.rows[0] * cta_blocks), 0)
        params = op.has_groups and (h == 0 or not shared_params)
        T.mbarrier_expect_tx(io.full[io.ring.stage[0]], count * (blocks * block_bytes + (ir * rec if params else 0)))
        if count > 0:
            for b in T.unroll(blocks):
                bulk(
                    io.Ws[(io.ring.stage[0] * halves + h % halves) * blocks + b, 0, 0],
                    io.W[((c.expert[0] * units + kb) * 2 + h) * blocks + b, c.rows[0] * cta_blocks, 0],
                    count * block_bytes,
                    io.full[io.ring.stage[0]],
                )
            if params:
                for q in T.unroll(ir):
                    record = 0 if group == 0 else (kb if shared_params else (kb * 2 + h) * ir + q)
                    bulk(
                        io.Ps[param_slot(io.ring.stage[0], h), q * cta_blocks * rec],
                        io.P[c.expert[0] * records + record, c.rows[0] * cta_blocks, 0],
                        count * rec,
                        io.full[io.ring.stage[0]],
                    )

    @T.macro
    def load_stage(io, c, kb, h):
        """The same of the slots of a stage, from h on, where sizes come with the launch: the thread has no time to find
        each place anew."""
        first = c.rows[0] * cta_blocks
        count = T.min(cta_blocks, all_blocks - first)
        records_here = (1 if shared_params else halves) * ir if op.has_groups and (h == 0 or not shared_params) else 0
        slot = (c.expert[0] * units + kb) * 2 + h
        record = c.expert[0] * records + (0 if group == 0 else kb if shared_params else (kb * 2 + h) * ir)
        T.mbarrier_expect_tx(io.full[io.ring.stage[0]], count * (halves * blocks * block_bytes + records_here * rec))
        for b in T.unroll(halves * blocks):
            bulk_at(
                io.Ws[io.ring.stage[0] * (halves * blocks) + b, 0, 0], io.W,
                ((slot * blocks + b) * all_blocks + first) * (block_bytes // 16), count * block_bytes,
                io.full[io.ring.stage[0]],
            )  # fmt: skip
        for q in T.unroll(records_here):
            bulk_at(
                io.Ps[param_slot(io.ring.stage[0], q // ir), q % ir * cta_blocks * rec], io.P,
                ((record + q) * all_blocks + first) * (rec // 16), count * rec, io.full[io.ring.stage[0]],
            )  # fmt: skip

    @T.macro
    def fill_weights(io, c, kb):
        """The warp of the weights: 128 k, in two slots."""
        for h in T.unroll(2):
            if h % halves == 0:
                rings.acquire(io.empty, io.ring)
            if io.leader:
                if size.known:
                    load_weights(io, c, kb, h)
                else:
                    if h % halves == 0:
                        load_stage(io, c, kb, h)
                if (h + 1) % halves == 0:
                    T.barrier_arrive(io.full[io.ring.stage[0]])
            if (h + 1) % halves == 0:
                rings.advance(io.ring)

    @T.macro
    def fill_tokens(io, c, kb):
        """The warp of X: 128 k, in two slots."""
        for h in T.unroll(2):
            if h % halves == 0:
                rings.acquire(io.empty, io.ring)
            tma_tile(
                io.Xs, io.ring.stage[0] * halves + h % halves, io.X, c.first[0], kb * 128 + h * 64,
                io.full[io.ring.stage[0]], c.end[0],
            )  # fmt: skip
            if (h + 1) % halves == 0:
                T.barrier_arrive(io.full[io.ring.stage[0]])
                rings.advance(io.ring)

    return fill_weights, fill_tokens


def operand_macros(shape: Shape) -> tuple[Macro, Macro, Macro, Macro]:
    """Macros `find`, `load_words`, `load_params` and `convert`: from a stage to operand registers."""
    op, halves, blocks, rb, cta_blocks = shape.op, shape.halves, shape.blocks, shape.row_blocks, shape.cta_blocks
    fmt, cvt, params = op.format, op.scaling_converter, param_macros(op)
    rec, sb, ig, per_step = op.record_bytes, op.scale_bytes * fmt.record_groups, shape.slot_groups, fmt.step_words
    ir, paired = shape.slot_records, fmt.record_groups > 1
    block_bytes, bf16 = BLOCK_WORDS * 4, op.dtype == "bfloat16"
    slot_bytes = blocks * cta_blocks * block_bytes
    two_scales = lds16 if sb == 1 else lds32

    def bytes_of(stage, each, more):
        return T.cast(stage, "uint32") * T.uint32(each) + T.uint32(more)

    @T.macro
    def find(at, Ws, Ps, wg, wt):
        """Where a thread's words and parameters begin: of its warpgroup's first row block, in the first stage."""
        at.words[0] = place(Ws[0, wg * rb, wt * 4])
        if op.has_groups:
            at.scales[0] = place(Ps[0, wg * rb * rec + wt // 4 * 2 * sb])
        if not op.symmetric:
            at.zeros[0] = place(Ps[0, wg * rb * rec + 64 * sb + wt // 4 * 2])

    @T.macro
    def load_words(at, w, stage):
        """A thread's words of a whole stage, with one latency."""
        for q in T.unroll(halves * rb * blocks):
            row_block = (q // (rb * blocks) * blocks + q % blocks) * cta_blocks + q // blocks % rb
            lds128(w[q * 4], at.words[0] + bytes_of(stage, slot_bytes * halves, row_block * block_bytes))

    @T.macro
    def load_params(at, stage, r, s, u, v):
        """Registers of row block r: f32 scales of rows g and g + 8, and the converter's (bias, scale) words."""
        if paired:
            for q in T.unroll(ir):
                lds64(u[0], at.scales[0] + bytes_of(stage, cta_blocks * ir * rec, (q * cta_blocks + r) * rec))
                for i in T.unroll(fmt.record_groups):
                    params.pair_word(v, (r * ig + q * fmt.record_groups + i) * 4, u[i // 2], i % 2 == 1)
        else:
            for q in T.unroll(ig):
                here = bytes_of(stage, cta_blocks * ig * rec, (q * cta_blocks + r) * rec)
                slot = r * ig + q
                u[0] = two_scales(at.scales[0] + here)
                if op.scale_dtype == "float32":
                    u[1] = lds32(at.scales[0] + here + T.uint32(4))
                if op.symmetric:
                    u[2] = T.uint32(fmt.zero * 0x0101)
                else:
                    u[2] = lds16(at.zeros[0] + here)
                if op.scales_sums or op.numerics == "fused":
                    params.scales(s, slot * 2, u)
                if op.numerics == "fused":
                    for e in T.unroll(2):
                        zs = -T.cast(u[2] >> T.uint32(8 * e) & T.uint32(255), "float32") * s[slot * 2 + e]
                        v[slot * 4 + 2 * e] = pack2(zs, zs, bf16=bf16)
                else:
                    params.bias_words(v, slot * 4, u)
                params.scale_words(v, slot * 4, u)

    @T.macro
    def convert(w, words, a, half, v, r, first, count):
        """k16 steps first .. first + count - 1 of 64 k of row block r."""
        for j in T.unroll(count):
            at = (r * ig + (first + j) * ig // 4) * 4
            for i in T.unroll(per_step):
                T.call_extern(
                    "handle", cvt.device_name, w[words + (first + j) * per_step + i],
                    T.access_ptr(a[half + j * 4 + i * (4 // per_step)], "w", 4 // per_step),
                    *params.of_converter(cvt, v, at),
                )  # fmt: skip
        T.warpgroup_fence_operand(a, half, count * 4)

    return find, load_words, load_params, convert
