"""The walk of the programs for small batches: who does what, in which order; what a step is, the program says.

A CTA's slice of X stays in shared memory while each warp streams its own weights through a ring (resident.py). There is
no barrier in the main loop: warps meet where their sums are added, once for each `chunk` of row tiles.
"""

from dataclasses import dataclass

from terrazzo.ops.tiles.calls import cp_wait, syncwarp
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.resident import Resident, Split, Sums
from terrazzo.ops.tiles.types import Macro


def nothing(*_: object) -> None:
    """A step that a program does not have."""


@dataclass(frozen=True)
class Steps:
    """What is the program's own, macros over `io`.

    Attributes:
        issue(io, at, base, q, lane): step q of the warp's ring, which begins at word `base`, is on its way.
        item(io, at, gi, slot, lane): the gi-th item of the warp by the row tiles of a chunk, whose words begin at
            `slot`: load, convert, multiply. They join `io.acc`.
        before(io, at, tx), behind(io, at, tx): what is fetched in front of the first weights and behind them, and
            depends on no other kernel.
        tokens(io, m, tx, at): behind X. open(io, at, lane): once X is there.
    """

    issue: Macro
    item: Macro
    before: Macro = nothing
    behind: Macro = nothing
    tokens: Macro = nothing
    open: Macro = nothing


def walk_macro(steps: Steps, split: Split, resident: Resident, sums: Sums, *, step_words: int, pdl: bool) -> Macro:
    """Macro `walk(io, m, bk, bn)`: CTA (bk, bn), from its buffers on.

    step_words: of a step of a warp's ring.

    `io` holds X, Xs, xbar, Q, WS, SEM, mail, r4 and `to` as those want them, and `acc` [chunk * token_tiles * 4].
    """
    chunk, token_tiles, stages, joined = split.chunk, split.token_tiles, split.stages, split.joined

    @T.macro
    def walk(io, m, bk, bn):
        tx = T.get_thread_binding()
        warp = tx // 32
        lane = tx % 32
        at = resident.place(bk, bn, warp)
        base = warp * stages * step_words
        if joined:
            sums.open(io.mail, m, bk, at, tx)
        # weights first where the launch may overlap the kernel before; X may be its result
        if pdl:
            T.pdl_trigger()
        else:
            resident.fetch(io.X, io.Xs, io.xbar, m, at, 0, tx)
        steps.before(io, at, tx)
        for p in T.unroll(stages):
            steps.issue(io, at, base, p, lane)
        steps.behind(io, at, tx)
        if pdl:
            resident.clear(io.Xs, m, at, tx)
            T.pdl_sync()
            resident.fetch(io.X, io.Xs, io.xbar, m, at, bn, tx)
        steps.tokens(io, m, tx, at)
        resident.wait(io.xbar, stages)
        if joined:
            T.cluster_wait()  # the others' barriers are made
        steps.open(io, at, lane)
        for ci in T.serial(at.chunks):
            for i in T.unroll(chunk * token_tiles * 4):
                io.acc[i] = 0
            for gi in T.serial(at.gn):
                cp_wait(stages - 1)
                slot = base + (ci * at.gn + gi) % stages * step_words
                steps.item(io, at, gi, slot, lane)
                syncwarp()  # every lane has read the step before it is overwritten
                steps.issue(io, at, base, ci * at.gn + gi + stages, lane)
            sums.stage(io.Q, io.acc, ci, tx)
            sums.add_warps(io.Q, io.WS, io.mail, io.to, io.r4, m, bk, at, ci, tx)
        sums.add_ctas(io.WS, io.SEM, io.mail, io.to, io.r4, m, bk, bn, at, tx)

    return walk
