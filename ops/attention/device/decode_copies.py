"""Which tokens a warp of decode attention works on, and their way from the cache to its ring of stages.

A kernel that may start before the one ahead of it has ended (programmatic dependent launch) must not rely on anything
that this one may still write. With `ahead`, a warp reads its sequence's length and pages all the same, fetches its
first stages into L2 (which stays coherent), and once it may, copies the stages from there at once, while it reads both
again. Almost always they are what they were; if not, it waits for these copies and starts anew. What it reads early is
clamped to the allocation.

Page numbers are read 32 at a time, one by each lane, a whole round before the first of them is used: while memory is
saturated a trip to L2 takes longer than the work on a stage (one number at a time, a stage ahead, cost 17 % of int4).
"""

from dataclasses import dataclass
from typing import NamedTuple

from terrazzo.ops.attention.cache.layout import CacheLayout
from terrazzo.ops.attention.device.tile_macros import each, larger, less, smaller
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffer, Call, Expr, Macro


def peek(buffer: Buffer, *at: Expr) -> Expr:
    """An int32 of global memory as it is now (device.py)."""
    return T.call_extern("int32", "tz_peek", T.access_ptr(buffer[at], "r", 1))


def differ(a: Expr, b: Expr) -> Expr:
    """a != b as a condition that TileLang does not try to prove."""
    return T.call_extern("bool", "tz_differ", a, b)


@dataclass(frozen=True)
class Stages:
    """Sizes of a warp's stages.

    Attributes:
        tiles, stages, warps, parts, page, residual: as of decode_arguments.Decode; warps: that have a ring each.
        bulk: copies are bulk copies and arrive on barriers, else cp.async groups. ahead: stages of a warp that
            `prefetch` fetches, at most 32. known: the caller reads the length, to w.length before `prefetch` and, where
            that is not `ahead`, before `start`; to w.now in between.
    """

    layout: CacheLayout
    tiles: int
    stages: int
    warps: int
    parts: int
    page: int
    residual: int
    bulk: bool
    ahead: int
    known: bool = False

    @property
    def group(self) -> int:
        return self.layout.k.group

    @property
    def mini(self) -> int:
        """Tokens of a stage."""
        return 16 * self.tiles

    @property
    def per_chunk(self) -> int:
        """Stages that a warp takes from one group."""
        return max(self.group // self.parts // self.mini, 1)

    @property
    def chunk(self) -> int:
        return self.per_chunk * self.mini

    @property
    def stage(self) -> int:
        """Words of a stage."""
        return self.layout.channel_words + self.tiles * self.layout.tile_words

    @property
    def least(self) -> int:
        """Tokens that are worth a split of their own."""
        return self.warps * max(self.chunk, 64)


class Copies(NamedTuple):
    """Macros prefetch, start, confirm, fetch, refill and release; again, if nothing was copied; token_of, the first
    token of a stage.

    `w` holds the sizes b, split, splits, most_new, window, kv_heads, pages, page_words, most (pages of a table's
    row), and one-element local buffers: length; h, lane, warp, whose ring it is, member, the number of a thread
    among those of a ring, of which the first 32 fetch; packed, start, r0, r1, first, count; page and later, the
    pages of stages `lane` and 32 + `lane` of the round of 32 that is being copied; source, a stage's page.
    """

    of: Stages
    prefetch: Macro
    again: Macro
    start: Macro
    confirm: Macro
    fetch: Macro
    refill: Macro
    release: Macro
    token_of: Call


def _make_plan_macros(f: Stages) -> tuple[Call, Call, Macro, Macro, Macro]:
    """`token_of`, `room`, and macros `plan`, `find_page` and `find_later`: a warp's stages, and their pages."""
    layout, group, mini, chunk, per_chunk = f.layout, f.group, f.mini, f.chunk, f.per_chunk
    warps, page, residual, ahead = f.warps, f.page, f.residual, f.ahead
    kept, unit = layout.kept(residual)

    def token_of(w, i):
        """First token of the warp's stage i."""
        return w.first[0] + i // per_chunk * (warps * chunk) + i % per_chunk * mini

    def room(w):
        """Tokens that a sequence's pages hold."""
        if page:
            return w.most * page
        return T.truncdiv(w.page_words, layout.block_words) * layout.block_tokens

    @T.macro
    def plan(w):
        """The warp's stages: `count` of them, from token `first` on."""
        if kept or (residual and not group):  # whole tiles behind which the ring is nearly full
            w.packed[0] = larger(w.length[0] - kept, 0) // unit * unit
        else:
            w.packed[0] = w.length[0] - w.length[0] % residual if residual else w.length[0]
        if ahead:
            w.packed[0] = smaller(w.packed[0], room(w))
        w.start[0] = 0
        if w.window > 0:
            w.start[0] = larger(w.length[0] - w.most_new + 1 - w.window, 0) // chunk * chunk
        w.r1[0] = larger(w.packed[0] - w.start[0] + warps * chunk - 1, 0) // (warps * chunk)  # rounds of the CTAs
        w.r0[0] = T.truncdiv(w.split * w.r1[0], w.splits)
        w.r1[0] = T.truncdiv((w.split + 1) * w.r1[0], w.splits)
        w.first[0] = w.start[0] + (w.r0[0] * warps + w.warp[0]) * chunk
        w.count[0] = w.packed[0] - (w.start[0] + ((w.r1[0] - 1) * warps + w.warp[0]) * chunk)  # of the last round
        w.count[0] = smaller(larger(w.count[0] + mini - 1, 0) // mini, per_chunk)
        w.count[0] = T.call_extern(
            "int32", "tz_select", less(w.r0[0], w.r1[0]), (w.r1[0] - w.r0[0] - 1) * per_chunk + w.count[0], 0
        )

    @T.macro
    def find_page(TABLE, into, w, i):
        """The page of stage i, or of the last one; nothing is read where there is none."""
        into[0] = w.b
        if page:
            if less(0, w.count[0]):
                into[0] = peek(TABLE, w.b, token_of(w, smaller(i, w.count[0] - 1)) // page)

    @T.macro
    def find_later(TABLE, w, i):
        """The pages of stages i to i + 31, a lane each, of which there may be none."""
        if page:
            if less(i, w.count[0]):
                find_page(TABLE, w.later, w, i + w.lane[0])

    return token_of, room, plan, find_page, find_later


def _make_stage_macros(f: Stages, token_of: Call, find_later: Macro) -> tuple[Macro, Macro, Call, Call, Call]:
    """Macros `copy` and `fetch` of a stage, and where it lies in the cache and how many words it has."""
    layout, group, tiles, parts, page = f.layout, f.group, f.tiles, f.parts, f.page
    stages, stage, per_chunk, bulk = f.stages, f.stage, f.per_chunk, f.bulk
    head_words, tile_words = layout.channel_words, layout.tile_words

    def inside(w, i):
        """Token of stage i in its page."""
        return token_of(w, i) % page if page else token_of(w, i)

    def skipped(w, i):
        """Words at the head of a block that stage i does not copy: those of its first stage only."""
        return T.if_then_else(i % per_chunk == 0, 0, head_words) if group else 0

    def source(KV, w, number, i, word):
        """Address in page `number` of what is word `word` of the slot of stage i: a group's parameters lie ahead of its
        first tile."""
        at = w.h[0] * w.page_words + inside(w, i) // layout.block_tokens * layout.block_words + word
        if group:
            tile = inside(w, i) % group // 16 if parts > 1 else i % per_chunk * tiles
            at = at + (T.if_then_else(word < head_words, 0, tile * tile_words) if parts > 1 else tile * tile_words)
        return T.call_extern(
            "handle", "tz_page", T.access_ptr(KV[0, 0, 0], "r", 1), number, w.kv_heads * w.page_words, at
        )

    def words_of(w, i):
        """Words of stage i that there are: a sequence's storage may end inside a stage."""
        if not page and not group and tiles > 1:
            return smaller(stage, w.page_words - inside(w, i) // layout.block_tokens * layout.block_words)
        return stage - skipped(w, i)

    @T.macro
    def send(KV, ring, full, w, number, i, place, word, words):
        """One thread copies `words` words to the slot of stage i, from word `word` of it on. To TileLang it is
        said to read: a store of threads would be fenced off from wgmma, which a copy need not be."""
        bar = w.warp[0] * stages + place
        T.call_extern(
            "handle", "tz_bulk", T.access_ptr(ring[bar * stage + word], "r", stage), source(KV, w, number, i, word),
            words * 4, T.access_ptr(full[bar], "r", 1),
        )  # fmt: skip

    @T.macro
    def copy(KV, ring, full, w, number, i, place):
        """One thread copies the warp's stage i, of page `number`, to slot `place` of its ring."""
        words = words_of(w, i)
        bar = w.warp[0] * stages + place
        T.mbarrier_expect_tx(full[bar], words * 4)
        if parts > 1:
            if less(skipped(w, i), 1):
                send(KV, ring, full, w, number, i, place, 0, head_words)
            send(KV, ring, full, w, number, i, place, head_words, stage - head_words)
        else:
            send(KV, ring, full, w, number, i, place, skipped(w, i), words)
        T.barrier_arrive(full[bar])

    @T.macro
    def fetch(KV, TABLE, ring, full, w, i, place):
        """Copies of the warp's stage i, which follows the one fetched before, into slot `place` of its ring."""
        w.source[0] = w.b
        if page:
            w.source[0] = T.call_extern("int32", "tz_of_lane", w.page[0], i)
        if bulk:
            if less(w.member[0], 1):
                copy(KV, ring, full, w, w.source[0], i, place)
        else:
            slot = (w.warp[0] * stages + place) * stage
            for j in each(-(-stage // 128)):
                if less(j * 128 + w.lane[0] * 4, words_of(w, i)):
                    word = skipped(w, i) + j * 128 + w.lane[0] * 4
                    T.call_extern(
                        "handle", "tz_cp_async", T.access_ptr(ring[slot + word], "w", 4),
                        source(KV, w, w.source[0], i, word), 16,
                    )  # fmt: skip
        if page:
            if less(30, T.bitwise_and(i, 31)):  # the last one of the round
                w.page[0] = w.later[0]
                find_later(TABLE, w, i + 33)

    return copy, fetch, source, skipped, words_of


def make_copy_macros(f: Stages) -> Copies:
    """Those of a warp's ring."""
    token_of, room, plan, find_page, find_later = _make_plan_macros(f)
    copy, fetch, source, skipped, words_of = _make_stage_macros(f, token_of, find_later)
    stages, stage, parts, page, residual, known = f.stages, f.stage, f.parts, f.page, f.residual, f.known
    bulk, ahead, head_words = f.bulk, f.ahead, f.layout.channel_words
    first_copies = stages - 1  # of the ring, before anything is worked on

    @T.macro
    def start_lanes(KV, ring, full, w):
        """Copies of the first stages, one by each lane, whose w.page is that stage's."""
        if less(w.member[0], smaller(first_copies, w.count[0])):
            copy(KV, ring, full, w, w.page[0], w.lane[0], w.lane[0])

    @T.macro
    def prefetch(KV, TABLE, LEN, w):
        """The first stages on their way to L2, whatever the kernel ahead does; w.page is the page of stage `lane`."""
        if not known:
            w.length[0] = peek(LEN, w.b)
        w.length[0] = smaller(larger(w.length[0], 0), room(w) + residual)
        plan(w)
        find_page(TABLE, w.page, w, w.lane[0])
        if page:
            w.page[0] = smaller(larger(w.page[0], 0), w.pages - 1)
        if less(w.member[0], smaller(ahead, w.count[0])):
            if parts > 1:
                T.call_extern("handle", "tz_prefetch", source(KV, w, w.page[0], w.lane[0], 0), head_words * 4)
                T.call_extern(
                    "handle", "tz_prefetch", source(KV, w, w.page[0], w.lane[0], head_words), (stage - head_words) * 4
                )
            else:
                T.call_extern(
                    "handle", "tz_prefetch", source(KV, w, w.page[0], w.lane[0], skipped(w, w.lane[0])),
                    words_of(w, w.lane[0]) * 4,
                )  # fmt: skip

    @T.macro
    def again(TABLE, w):
        """Another length or another part of the tokens, w.now, than `prefetch` saw: before anything is copied."""
        w.length[0] = w.now[0]
        plan(w)
        find_page(TABLE, w.page, w, w.lane[0])

    @T.macro
    def restart(KV, TABLE, ring, full, w):
        """The first stages again, for another length or other pages than `prefetch` saw."""
        if less(w.member[0], smaller(first_copies, w.count[0])):
            T.barrier_wait(full[w.warp[0] * stages + w.lane[0]], 0)
            T.call_extern("handle", "tz_rearm", T.access_ptr(full[w.warp[0] * stages + w.lane[0]], "rw", 1))
        T.call_extern("handle", "tz_syncwarp")
        again(TABLE, w)
        find_later(TABLE, w, 32)
        start_lanes(KV, ring, full, w)

    @T.macro
    def start(KV, TABLE, LEN, ring, full, w):
        """The plan, and the first stages on their way. `confirm` follows, whatever is between."""
        if ahead:  # what is read again goes first: behind the copies it would wait for all their bytes
            if not known:
                w.now[0] = peek(LEN, w.b)
            find_page(TABLE, w.again, w, w.lane[0])
            find_later(TABLE, w, 32)
            start_lanes(KV, ring, full, w)
        else:
            if not known:
                w.length[0] = peek(LEN, w.b)
            plan(w)
            find_page(TABLE, w.page, w, w.lane[0])
            find_later(TABLE, w, 32)
            if bulk:
                if stages > 1:
                    start_lanes(KV, ring, full, w)
            else:
                for i in each(first_copies):
                    if less(i, w.count[0]):
                        fetch(KV, TABLE, ring, full, w, i, i)
                    T.call_extern("handle", "tz_cp_commit")

    @T.macro
    def confirm(KV, TABLE, ring, full, w):
        """The length and the stages are the right ones, and the pages of the first 64."""
        if ahead:
            moved = T.Or(differ(w.now[0], w.length[0]), differ(w.again[0], w.page[0]))
            if T.call_extern("bool", "tz_any", moved):
                restart(KV, TABLE, ring, full, w)

    @T.macro
    def refill(KV, TABLE, ring, full, w, i):
        """The slot that was read before that of stage i takes another stage."""
        if less(i + stages - 1, w.count[0]):
            fetch(
                KV, TABLE, ring, full, w, i + stages - 1,
                T.call_extern("int32", "tz_select", less(0, w.read[0]), w.read[0] - 1, stages - 1),
            )  # fmt: skip

    @T.macro
    def release(w):
        """To the slot of the next stage; this one's is refilled behind the products that read it."""
        w.read[0] = w.read[0] + 1
        if w.read[0] == stages:
            w.read[0] = 0
            w.parity[0] = w.parity[0] ^ 1

    return Copies(f, prefetch, again, start, confirm, fetch, refill, release, token_of)
