"""The persistent pipeline of the programs on wgmma: who does what, in which order; what a step is, the program says.

A CTA has consumer warpgroups and, behind them, one of producers, whose first warp fills the stages of a ring with
weights and whose second one fills them with tokens. Both walk over the same segments (scheduler.py); at a segment's end
its sums are shared or stored (shares.py).
"""

from dataclasses import dataclass
from typing import Protocol

from terrazzo.ops.tiles.cluster_shares import Peers
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.program import REGISTERS
from terrazzo.ops.tiles.scheduler import Ring, Tiles, Tokens, plan_state, ring_state, segment_state, table_state
from terrazzo.ops.tiles.shares import slice_state
from terrazzo.ops.tiles.types import Buffers, Macro


@dataclass(frozen=True)
class Steps:
    """What is the program's own, macros over `io`, which holds its buffers and registers.

    Attributes:
        fill_weights(io, c, kb), fill_tokens(io, c, kb): a producer's unit of k, stage by stage of the ring.
        open(io, ring): once, what a consumer finds while the kernel before still runs.
        begin(io, ring, c, wg, wt): of a segment, sums of nothing.
        unit(io, place, follows), drain(io): see `consume` of the ring's macros.
        end(io, ring, c, lane): of a segment, sums that are complete, and the last stage given back.
    """

    fill_weights: Macro
    fill_tokens: Macro
    open: Macro
    begin: Macro
    unit: Macro
    drain: Macro
    end: Macro


@dataclass(frozen=True)
class Work:
    """Who computes which segment of which tile, and what becomes of its sums: what the modules of these types make."""

    tokens: Tokens
    tiles: Tiles
    rings: Ring
    finish: Macro
    peers: Peers | None = None


class Schedule(Protocol):
    """Of a CTA, as a schedule or a program's shape has it."""

    block_tokens: int
    warpgroups: int
    cluster: int
    per_sm: int


def pipeline_macro(steps: Steps, work: Work, schedule: Schedule, experts: int = 0) -> Macro:
    """Macro `run`: a CTA, from its buffers on."""
    block_tokens, warpgroups, cluster = schedule.block_tokens, schedule.warpgroups, schedule.cluster
    consumers, registers = warpgroups * 128, REGISTERS[warpgroups, schedule.per_sm]
    tokens, tiles, rings, finish, peers = work.tokens, work.tiles, work.rings, work.finish, work.peers

    @T.macro
    def locate(io, c):
        """The tokens of the segment's tile, and its expert."""
        tokens.locate(io.Es, c, io.X.shape[0])

    @T.macro
    def run(io, parts, grid, cta):
        """The CTA, from its buffers on.

        io: beside what the steps want X, Es, the barriers `empty` and `ready`, and WS, SEM, `acc` and `to` as `finish`
        wants them. parts: the kernel's own, shared tiles or offsets of experts.
        """
        p = plan_state()
        c = segment_state()
        x = slice_state()
        ring = ring_state()
        table = table_state()
        tx = T.get_thread_binding()
        rings.reset(ring)
        T.pdl_trigger()
        if cluster > 1:
            peers.open()
        if experts:
            T.pdl_sync()
            tokens.partition(io.Es, table, parts, io.X.shape[0], grid)
        mt, sk, ctas = (
            (table.blocks[0], table.shared[0], table.grid[0])
            if experts
            else (T.ceildiv(io.X.shape[0], block_tokens), parts, grid)
        )
        tiles.plan(p, cta, ctas, sk, mt)
        if tx >= consumers:
            T.dec_max_nreg(registers[0])
            fill = Buffers(**vars(io), ring=ring, leader=tx == consumers, leader_of_tokens=tx == consumers + 32)
            if tx < consumers + 32:  # weights do not depend on the kernel before: the first ring comes while it runs
                tiles.each_unit(steps.fill_weights, fill, locate, p, c, cta, ctas, sk, mt)
            elif tx < consumers + 64:  # X: a warp of its own, whose first copy waits behind none of the weights'
                if not experts:
                    T.pdl_sync()
                tiles.each_unit(steps.fill_tokens, fill, locate, p, c, cta, ctas, sk, mt)
            if cluster > 1:
                if p.among[0] > 0:
                    peers.invite(io.empty, ring, io.ready, cta, tx - consumers)
        else:
            T.inc_max_nreg(registers[1])
            wg = tx // 128
            wt = tx % 128
            lane = tx % 32
            steps.open(io, ring)
            if not experts:
                T.pdl_sync()
            for seg in T.serial(p.all[0]):
                tiles.segment(p, c, seg, cta, ctas, sk, mt)
                tokens.locate(io.Es, c, io.X.shape[0])
                steps.begin(io, ring, c, wg, wt)
                work = Buffers(**vars(io), lane=lane, wg=wg, wt=wt)
                rings.consume(steps.unit, steps.drain, work, ring, c.k1[0] - c.k0[0])
                steps.end(io, ring, c, lane)
                finish(io.WS, io.SEM, io.acc, io.to, p, c, x, cta, ctas, sk, wg, wt)

    return run


@dataclass(frozen=True)
class RoleSteps:
    """As `Steps`, where a segment is the program's own.

    Attributes:
        open(io, ring, wg, wt): once, what a consumer finds while the kernel before still runs.
        segment(io, c, ring, wg, wt, lane, cta, grid, sk): a segment, to its end.
        enter(wg), leave(wg): in front of the first segment and behind the last; None: nothing.
    """

    fill_weights: Macro
    fill_tokens: Macro
    open: Macro
    segment: Macro
    enter: Macro | None = None
    leave: Macro | None = None


def role_macro(steps: RoleSteps, schedule: Schedule, tiles: Tiles, rings: Ring, tokens: Tokens | None = None) -> Macro:
    """Macro `run`, for programs whose registers are short: each role makes its own plan, as one made before the roles
    part would live in the registers of both; and what a segment is, phases or an order of its own, the program says.

    tokens: where they are those of experts; then `run` takes their offsets in the place of shared tiles, `io` holds Es
    and `table`, and weights wait for the kernel before, as all of the plan does.
    """
    block_tokens, consumers = schedule.block_tokens, schedule.warpgroups * 128
    registers = REGISTERS[schedule.warpgroups, 1]

    @T.macro
    def locate(io, c):
        """The first token of the segment's tile; of experts all that `locate` of theirs finds."""
        if tokens is not None:
            tokens.locate(io.Es, c, io.X.shape[0])
        else:
            c.first[0] = c.tokens[0] * block_tokens

    @T.macro
    def run_experts(io, p, c, ring, offsets, grid, cta):
        """`run`, of experts."""
        tx = T.get_thread_binding()
        e = io.table
        rings.reset(ring)
        T.pdl_trigger()
        T.pdl_sync()
        tokens.tabulate(io.Es, offsets, io.X.shape[0])
        if tx >= consumers:
            T.dec_max_nreg(registers[0])
            fill = Buffers(**vars(io), ring=ring, leader=tx == consumers, leader_of_tokens=tx == consumers + 32)
            if tx < consumers + 64:
                tokens.share(io.Es, e, grid)
                tiles.plan(p, cta, e.grid[0], e.shared[0], e.blocks[0])
                if tx < consumers + 32:
                    tiles.each_unit(
                        steps.fill_weights, fill, locate, p, c, cta, e.grid[0], e.shared[0], e.blocks[0]
                    )  # fmt: skip
                else:
                    tiles.each_unit(steps.fill_tokens, fill, locate, p, c, cta, e.grid[0], e.shared[0], e.blocks[0])
        else:
            T.inc_max_nreg(registers[1])
            tokens.share(io.Es, e, grid)
            tiles.plan(p, cta, e.grid[0], e.shared[0], e.blocks[0])
            wg = tx // 128
            wt = tx % 128
            lane = tx % 32
            steps.open(io, ring, wg, wt)
            for seg in T.serial(p.all[0]):
                tiles.segment(p, c, seg, cta, e.grid[0], e.shared[0], e.blocks[0])
                locate(io, c)
                steps.segment(io, c, ring, wg, wt, lane, cta, e.grid[0], e.shared[0])

    @T.macro
    def run(io, p, c, ring, sk, grid, cta):
        """The CTA, from its buffers on; `io` holds X beside what the steps want."""
        tx = T.get_thread_binding()
        m = io.X.shape[0]
        rings.reset(ring)
        T.pdl_trigger()
        if tx >= consumers:
            T.dec_max_nreg(registers[0])
            fill = Buffers(**vars(io), ring=ring, leader=tx == consumers, leader_of_tokens=tx == consumers + 32)
            if tx < consumers + 32:  # weights do not depend on the kernel before: the first ring comes while it runs
                tiles.plan(p, cta, grid, sk, T.ceildiv(m, block_tokens))
                tiles.each_unit(steps.fill_weights, fill, None, p, c, cta, grid, sk, T.ceildiv(m, block_tokens))
            elif tx < consumers + 64:  # X: a warp of its own, whose first copy waits behind none of the weights'
                tiles.plan(p, cta, grid, sk, T.ceildiv(m, block_tokens))
                T.pdl_sync()
                tiles.each_unit(steps.fill_tokens, fill, locate, p, c, cta, grid, sk, T.ceildiv(m, block_tokens))
        else:
            T.inc_max_nreg(registers[1])
            tiles.plan(p, cta, grid, sk, T.ceildiv(m, block_tokens))
            wg = tx // 128
            wt = tx % 128
            lane = tx % 32
            steps.open(io, ring, wg, wt)
            T.pdl_sync()
            if steps.enter is not None:
                steps.enter(wg)
            for seg in T.serial(p.all[0]):
                tiles.segment(p, c, seg, cta, grid, sk, T.ceildiv(m, block_tokens))
                c.first[0] = c.tokens[0] * block_tokens
                c.end[0] = m
                steps.segment(io, c, ring, wg, wt, lane, cta, grid, sk)
            if steps.leave is not None:
                steps.leave(wg)

    return run if tokens is None else run_experts
