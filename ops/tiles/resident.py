"""What programs share that keep their slice of X in shared memory while each warp streams weights (small batches)."""

from dataclasses import dataclass

from terrazzo.lowering.errors import ArgumentError
from terrazzo.lowering.targets import Target
from terrazzo.ops.tiles.calls import (
    addcg4,
    bulk,
    cp_async,
    cp_commit,
    cp_wait,
    last_arrival,
    ldcg4,
    ldmatrix4,
    lds128,
    past,
    send16,
    zero16,
)
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Buffer, Call, Expr, Macro
from terrazzo.schedules.clusters import PAIR
from terrazzo.schedules.problem import TOKENS_PER_TILE

ITEM_K = 128
"""k extent of an item, the unit of work along k."""
LEAST_PIECE = 2048
"""Bytes of a row of X that are worth a copy of their own."""
ROW_WORDS = 8
"""Parameter words of 16 rows in a record of a unit."""


@dataclass(frozen=True)
class Split:
    """How work is divided: `items` of ITEM_K k by `tiles` row tiles of 16 among kc x nc CTAs, the items of a CTA among
    its warps; a warp takes `chunk` row tiles at a time. `tiles` and `nc` may come with a launch, as expressions. Others
    as of `schedules.small_batch.SmallBatch`.

    Raises:
        ArgumentError: more warps than items of a CTA, or other tokens than the token tiles serve.
    """

    items: int
    tiles: Expr
    token_tiles: int
    kc: int
    nc: Expr
    warps: int
    chunk: int
    stages: int
    cluster: int = 1
    joined: bool = False
    tokens: int = 0

    def __post_init__(self) -> None:
        resident_rows(self.token_tiles, self.tokens)
        if self.warps > self.items // self.kc:  # TileLang drops the guard of a loop that runs zero times or once
            most = self.items // self.kc
            raise ArgumentError(
                "warps", self.warps, f"must be at most the {most} items of a CTA along k", "take fewer warps"
            )

    @property
    def known(self) -> bool:
        """Whether the kernel knows how many row tiles there are."""
        return isinstance(self.tiles, int)

    @property
    def rows(self) -> int:
        """Rows of X that a CTA holds, the most tokens of a launch."""
        return resident_rows(self.token_tiles, self.tokens)

    @property
    def threads(self) -> int:
        return self.warps * 32

    @property
    def cta_items(self) -> int:
        """Most items of a CTA along k."""
        return -(-self.items // self.kc)

    @property
    def chunks(self) -> int:
        """Most chunks of row tiles of a CTA."""
        return -(-(self.tiles // self.nc + (self.tiles % self.nc > 0)) // self.chunk)

    @property
    def most_rows(self) -> int:
        """Of a CTA, in whole chunks."""
        return self.chunks * self.chunk * 16


def resident_rows(token_tiles: int, tokens: int) -> int:
    """Rows of X that a CTA holds: `tokens`, or as many as the token tiles have where that is 0.

    Raises:
        ArgumentError: more tokens than the tiles have, or a tile without any.
    """
    most = token_tiles * TOKENS_PER_TILE
    if tokens and not most - TOKENS_PER_TILE < tokens <= most:
        constraint = f"{token_tiles} token tiles serve {most - TOKENS_PER_TILE + 1} to {most} tokens"
        raise ArgumentError("tokens", tokens, constraint, "change either, or take tokens=0 for all of them")
    return tokens or most


def x_bytes(target: Target, rows: int, pitch: int, ring: int) -> int:
    """Shared memory of X, `rows` of `pitch` bytes: as it is needed, or with the `ring` bytes, in use at the same time,
    what gives a CTA an SM for itself. Where launches overlap and two fit, CTAs share SMs while a kernel ahead of them
    still holds others, and a launch of one CTA for each SM takes up to twice its time (docs/designs.md)."""
    needed = rows * pitch + 128  # the tail keeps what follows 128-byte aligned
    return max(needed, (target.smem_per_sm // 2 - ring) // 128 * 128 + 128) if target.supports("pdl") else needed


def x_row(token_tiles: int, rows: int, t, lane):
    """Resident row of token `lane` % 8 of token tile t. The last tile may have fewer than 8: what is computed for
    tokens that do not exist is not read, so they take the rows of others."""
    last = rows - (token_tiles - 1) * TOKENS_PER_TILE
    if last == TOKENS_PER_TILE:
        return t * TOKENS_PER_TILE + lane % TOKENS_PER_TILE
    of_tile = last if token_tiles == 1 else T.if_then_else(t == token_tiles - 1, last, TOKENS_PER_TILE)
    return t * TOKENS_PER_TILE + lane % TOKENS_PER_TILE % of_tile


def cluster_shape(target: Target, kc: int, cluster: int, joined: bool) -> dict[str, tuple[int, int, int]]:
    """Arguments of T.Kernel(kc, nc): clusters of CTAs with the same slice of X, or pairs along k.

    Raises:
        ArgumentError: both, or an odd number of CTAs along k.
    """
    if joined and (cluster > 1 or kc % PAIR or not target.supports("cluster")):
        constraint = f"{kc} CTAs along k and {cluster} that share X: must be even and 1, on sm_90a"
        raise ArgumentError("joined", joined, constraint, "take joined=False")
    shape = (PAIR, 1, 1) if joined else (1, cluster, 1)
    return dict(cluster_dims=shape) if max(shape) > 1 else {}


@dataclass(frozen=True)
class Share:
    """Row tiles [t0, t1), in `chunks`, and items k0 .. k0 + kn - 1 of a CTA; of these a warp has gn from kg = k0 + g0
    on."""

    t0: Expr
    t1: Expr
    chunks: Expr
    k0: Expr
    kn: Expr
    g0: Expr
    gn: Expr
    kg: Expr


@dataclass(frozen=True)
class Resident:
    """Macros `place`, which finds a `Share`; `clear`, `fetch` and `wait` for X; `fetch_scales`."""

    place: Macro
    clear: Macro
    fetch: Macro
    fetch_scales: Macro
    wait: Macro


def resident_macros(split: Split, *, k: int, pitch: int, size: int, bulk_copies: bool) -> Resident:
    """Of X [m, k] in elements of `size` bytes; the CTAs of a cluster share the load by multicast.

    Args:
        k: columns of X, a multiple of 16 bytes; the items of `split` cover them.
        pitch: elements of a row of the slice, Xs [rows * pitch] in shared memory; rows from m on become zero.
        bulk_copies: of whole rows, so that they do not queue behind the first weights.
    """
    vec, threads, kp = 16 // size, split.threads, split.items * ITEM_K
    rows, cluster = split.rows, split.cluster
    chunks = split.cta_items * ITEM_K // vec  # 16-byte pieces of a row
    copies = rows * chunks
    # of a row, so that about every warp asks for one piece: one thread for all rows took 2 to 3 % more (4096 x 4096)
    parts = max(1, min(split.warps * cluster // rows, split.cta_items * ITEM_K * size // LEAST_PIECE))
    part = -(-split.cta_items // parts) * ITEM_K * size  # bytes

    @T.macro
    def tiles_of(bn):
        """Row tiles [t0, t1) of CTA bn along n, and how many chunks its walk takes."""
        t0 = bn * split.tiles // split.nc
        t1 = (bn + 1) * split.tiles // split.nc
        return t0, t1, split.chunks

    @T.macro
    def kept_tiles_of(bn):
        """The same of a launch's numbers, divided once."""
        kept = T.alloc_local((2,), "int32")
        for i in T.unroll(2):
            kept[i] = T.truncdiv((bn + i) * split.tiles, split.nc)
        return kept[0], kept[1], T.truncdiv(kept[1] - kept[0] + split.chunk - 1, split.chunk)

    @T.macro
    def place(bk, bn, warp):
        """What warp `warp` of CTA (bk, bn) does."""
        even = split.items % split.kc == 0 and (split.items // split.kc) % split.warps == 0
        t0, t1, chunks = tiles_of(bn) if split.known else kept_tiles_of(bn)
        k0 = bk * split.items // split.kc
        kn = split.items // split.kc if even else (bk + 1) * split.items // split.kc - k0
        g0 = warp * kn // split.warps
        gn = kn // split.warps if even else (warp + 1) * kn // split.warps - g0
        kg = k0 + g0
        return Share(t0, t1, chunks, k0, kn, g0, gn, kg)

    @T.macro
    def clear(Xs, m, at, tx):
        """What X does not fill of the items of CTA `at` becomes zero: rows from m on, columns from k on. It depends on
        no other kernel."""
        for e in T.serial(T.ceildiv((rows - m) * (pitch // vec), threads)):
            if e * threads + tx < (rows - m) * (pitch // vec):
                zero16(Xs[m * pitch + (e * threads + tx) * vec])
        if kp > k:  # the last CTA along k: columns past the end
            tail = (kp - k) // vec
            for e in T.serial(T.ceildiv(m * tail, threads)):
                piece = e * threads + tx
                if T.And(piece < m * tail, at.k0 + at.kn == split.items):
                    zero16(Xs[piece // tail * pitch + (k - at.k0 * ITEM_K) + piece % tail * vec])

    @T.macro
    def fetch_bulk(X, Xs, bar, m, at, bn, tx):
        """The items of CTA `at`, number bn along n; the CTAs of a cluster share the copies of a row."""
        row_bytes = T.min(at.kn * ITEM_K, k - at.k0 * ITEM_K) * size
        if tx == 0:
            T.mbarrier_expect_tx(bar, m * row_bytes)
            T.barrier_arrive(bar)
        if tx % 32 == 0:
            # not all CTAs at the same place first: it lies in a few L2 slices
            turn = (tx // 32 + bn // cluster) % split.warps
            for e in T.unroll(-(-rows // cluster * parts // split.warps)):
                at_row = (e * split.warps + turn) // parts * cluster + bn % cluster
                first = (e * split.warps + turn) % parts * part
                if T.And(at_row < m, first < row_bytes):
                    bulk(
                        Xs[at_row * pitch + first // size], X[at_row, at.k0 * ITEM_K + first // size],
                        T.min(row_bytes - first, part), bar, cluster,
                    )  # fmt: skip

    @T.macro
    def fetch_async(X, Xs, bar, m, at, bn, tx):
        """The same by cp.async of every thread, each CTA for itself, and what `clear` does."""
        for e in T.serial(-(-copies // threads)):
            piece = e * threads + tx
            row = piece // chunks
            col = at.k0 * ITEM_K + piece % chunks * vec
            if piece < copies:
                cp_async(
                    Xs[row * pitch + piece % chunks * vec],
                    X[T.min(row, m - 1), T.min(col, k - vec)],
                    T.if_then_else(T.And(row < m, col < k), 16, 0),
                )
        cp_commit()

    @T.macro
    def fetch_scales(S, Cs, at, tx):
        """Scales of the rows of CTA `at`, float32, to Cs [split.most_rows], by cp.async of the group that is open."""
        for e in T.serial(-(-split.most_rows // 4 // threads)):
            piece = e * threads + tx
            if piece < (at.t1 - at.t0) * 4:
                cp_async(Cs[piece * 4], S[at.t0 * 16 + piece * 4])

    @T.macro
    def wait(bar, newer):
        """X is there; of the cp.async groups, the `newer` newest may be missing."""
        if bulk_copies:
            T.barrier_wait(bar, 0)
        else:
            cp_wait(newer)
        T.sync_threads()

    fetch = fetch_bulk if bulk_copies else fetch_async
    return Resident(place, clear, fetch, fetch_scales, wait)


@dataclass(frozen=True)
class Units:
    """Macros `issue` and `load_x`; words of a ring `step`, of which the first `params` are codes."""

    issue: Macro
    load_x: Macro
    params: int
    step: int


def unit_macros(split: Split, *, groups: int, pitch: int) -> Units:
    """Of 8-bit fragments.

    A unit of 64 rows by 128 k, W [items, row blocks, words], is two blocks of 512 words and `groups` records of 32; a
    step of a warp's ring in R holds those of a chunk of row tiles. Resident rows of X are `pitch` bytes apart.
    """
    token_tiles, rows, chunk, stages = split.token_tiles, split.rows, split.chunk, split.stages
    params = chunk * 256
    record = groups * ROW_WORDS  # words of a row tile's parameters
    step = params + -(-chunk * record // 32) * 32  # 128-byte aligned

    @T.macro
    def issue(W, R, base, q, at, lane):
        """Ring step q of a warp of CTA `at` (`place`), whose ring begins at R[base]: `chunk` row tiles x one item,
        with their parameters."""
        first = at.t0 + T.truncdiv(q, at.gn) * chunk
        item = at.kg + T.truncmod(q, at.gn)
        slot = base + q % stages * step
        for m in T.unroll(chunk):
            if first + m < at.t1:
                tile = first + m
                for h in T.unroll(2):
                    cp_async(
                        R[slot + m * 256 + h * 128 + lane * 4], W[item, tile // 4, h * 512 + tile % 4 * 128 + lane * 4]
                    )
                if lane < groups * 2:
                    cp_async(
                        R[slot + params + m * record + lane * 4],
                        W[item, tile // 4, 1024 + lane // 2 * 4 * ROW_WORDS + tile % 4 * ROW_WORDS + lane % 2 * 4],
                    )
        cp_commit()

    @T.macro
    def load_x(Xs, x, col, lane):
        """B fragments of one item from the resident X: two k32 steps for each 64 k."""
        for j in T.unroll(2):
            for t in T.unroll(token_tiles):
                ldmatrix4(
                    x[(j * token_tiles + t) * 4],
                    Xs[x_row(token_tiles, rows, t, lane) * pitch + col + j * 64 + lane // 8 * 16],
                )

    return Units(issue, load_x, params, step)


def write_macro(n: int) -> Macro:
    """Macro `write(Y, o4, tok, row)`: rows row .. row + 3 of a token, as far as y [M, n] has them."""

    @T.macro
    def write(Y, o4, tok, row):
        if n % 4 == 0:
            for i in T.vectorized(4):
                Y[tok, row + i] = o4[i]
        else:
            for i in T.unroll(4):
                if row + i < n:
                    Y[tok, row + i] = o4[i]

    return write


@dataclass(frozen=True)
class Mail:
    """Shared memory for the sums of others, and the mbarrier that counts them."""

    inbox: Buffer
    sent: Buffer


def pair_macros(split: Split, dtype: str, store: Macro) -> tuple[Call, Macro, Macro, Macro]:
    """Of `sum_macros`, where programs are `joined`: function `mail`, macros `open`, `send` and `add`.

    A pair of CTAs along k is a cluster; each adds the sums of its half of the rows, as they come to its inbox.
    """
    threads, tokens, joined = split.threads, split.rows, split.joined
    quads = -(-split.most_rows // 4 // PAIR)  # of rows, that a CTA of a pair adds
    shares = split.kc // PAIR  # of the sums of a row, in WS

    def mail() -> Mail | None:
        """Where programs are `joined`."""
        return Mail(T.alloc_shared((PAIR * tokens * quads * 4,), dtype), T.alloc_barrier([1])) if joined else None

    def own_quads(bk, at):
        """How many quads of rows CTA bk of a pair adds: the first half or what is left."""
        return T.max(T.min((at.t1 - at.t0) * 4 - bk % PAIR * quads, quads), 0)

    @T.macro
    def open(mail, m, bk, at, tx):
        """What will come to this CTA's `inbox`, counted by its mbarrier `sent`."""
        past(mail.inbox[0], 0)  # in use from here on: no other buffer gets its place
        if tx == 0:
            T.mbarrier_expect_tx(mail.sent[0], own_quads(bk, at) * T.min(m, tokens) * (PAIR * 16))
            T.barrier_arrive(mail.sent[0])
        T.cluster_arrive()

    def letter(sender, tok, quad):
        """Where in the inbox the sums of four rows arrive from CTA `sender` of the pair."""
        return ((sender * tokens + tok) * quads + quad) * 4

    @T.macro
    def send(mail, r4, bk, tok, quad):
        """Four sums of a token to the CTA that adds those of their rows."""
        send16(mail.inbox[letter(bk % PAIR, tok, quad % quads)], quad // quads, r4[0], mail.sent[0])

    @T.macro
    def add_letters(WS, mail, to, r4, m, bk, at, tx):
        """This CTA's half of the rows: what both of the pair have sent, in order of k; stored, or with several pairs to
        WS."""
        part = T.alloc_local((4,), dtype)
        T.barrier_wait(mail.sent[0], 0)
        for e in T.serial(T.ceildiv(quads * T.min(m, tokens), threads)):
            tok = (e * threads + tx) // quads
            quad = (e * threads + tx) % quads
            row = (at.t0 * 4 + bk % PAIR * quads + quad) * 4
            if T.And(tok < T.min(m, tokens), quad < own_quads(bk, at)):
                lds128(r4, mail.inbox[letter(0, tok, quad)])
                lds128(part, mail.inbox[letter(1, tok, quad)])
                for i in T.unroll(4):
                    r4[i] = r4[i] + part[i]
                if shares == 1:
                    store(to, at, r4, tok, row)
                else:
                    for i in T.vectorized(4):
                        WS[bk // PAIR, tok, row + i] = r4[i]

    @T.macro
    def add_pairs(WS, SEM, to, r4, m, bk, bn, at, tx):
        """The last CTA of a half of a row range adds the sums of all pairs."""
        if last_arrival(SEM[bn * PAIR + bk % PAIR], shares):
            for e in T.serial(T.ceildiv(quads * T.min(m, tokens), threads)):
                tok = (e * threads + tx) // quads
                quad = (e * threads + tx) % quads
                row = (at.t0 * 4 + bk % PAIR * quads + quad) * 4
                if T.And(tok < T.min(m, tokens), quad < own_quads(bk, at)):
                    ldcg4(r4, WS[0, tok, row])
                    for kk in T.unroll(1, shares):
                        addcg4(r4, WS[kk, tok, row], dtype=dtype)
                    store(to, at, r4, tok, row)

    @T.macro
    def add(WS, SEM, mail, to, r4, m, bk, bn, at, tx):
        """This CTA's half of a row range is complete and stored, or, of several pairs, the last one's stores it."""
        add_letters(WS, mail, to, r4, m, bk, at, tx)
        if shares > 1:
            add_pairs(WS, SEM, to, r4, m, bk, bn, at, tx)

    return mail, open, send, add


@dataclass(frozen=True)
class Sums:
    """Macros `stage` and `add_warps`, for each chunk of row tiles, and `add_ctas`, after the last, through Q, shared
    memory of `words` sums; `mail()` makes what `joined` takes, whose macro `open` comes first."""

    mail: Call
    open: Macro
    stage: Macro
    add_warps: Macro
    add_ctas: Macro
    words: int


def sum_macros(split: Split, dtype: str, store: Macro, *, floor: bool = False) -> Sums:
    """How warps and CTAs add up.

    A thread's sums `acc` are four 32-bit values of each row tile and 8 tokens. Warps and then CTAs are added in order,
    these through WS [kc, tokens, rows] and a counter in SEM for each row range. If joined, [kc / 2, tokens, rows] and
    two counters: pairs of CTAs along k are clusters, and each adds the sums of its half of the rows, as they come to
    its inbox. A single pair needs no workspace, no fence, and nobody who adds all.

    Args:
        dtype: of the sums, "int32" or "float32".
        store: macro `store(to, at, r4, tok, row)` of four sums r4, rows row .. row + 3 of a token; `to` is of
            the program.
        floor: divide as Python does. The numbers are not negative, but the compiler does not know it.
    """
    nt, threads, warps, chunk, kc = split.token_tiles, split.threads, split.warps, split.chunk, split.kc
    tokens, joined = split.rows, split.joined
    divide, modulo = (T.floordiv, T.floormod) if floor else (T.truncdiv, T.truncmod)
    pitch = chunk * 16 + 4  # partial tiles [token][row]: stores and vector loads without bank conflicts
    part = tokens * pitch
    mail, open, send, add = pair_macros(split, dtype, store)

    def place(warp, lane, tile, t, i):
        """Where in Q sum i of a lane's four of row tile `tile` and token tile t lies."""
        return warp * part + (t * 8 + lane % 4 * 2 + i % 2) * pitch + tile * 16 + i // 2 * 8 + lane // 4

    @T.macro
    def stage(Q, acc, ci, tx):
        """The sums of chunk ci to Q."""
        warp = tx // 32
        lane = tx % 32
        if T.Or(not split.known or split.chunks == 1, ci > 0):
            T.sync_threads()  # the chunk before was read; an only chunk may lie where the main loop has read
        for r in T.unroll(chunk):
            for t in T.unroll(nt):
                for i in T.unroll(4):
                    if t * 8 + lane % 4 * 2 + i % 2 < tokens:
                        Q[place(warp, lane, r, t, i)] = acc[(r * nt + t) * 4 + i]

    @T.macro
    def add_warps(Q, WS, mail, to, r4, m, bk, at, ci, tx):
        """What chunk `ci` of CTA `at` has in Q, tokens below m, to `store` or, with several CTAs along k, to WS. A few
        warps do it; the others go on with the next chunk."""
        T.sync_threads()
        for e in T.serial(-(-(tokens * chunk * 4) // threads)):
            tok = (e * threads + tx) // (chunk * 4)
            row = (e * threads + tx) % (chunk * 4) * 4
            if T.And(tok < T.min(m, tokens), at.t0 * 16 + ci * chunk * 16 + row < at.t1 * 16):
                for i in T.vectorized(4):
                    r4[i] = Q[tok * pitch + row + i]
                for wi in T.unroll(1, warps):
                    for i in T.vectorized(4):
                        r4[i] = r4[i] + Q[wi * part + tok * pitch + row + i]
                if joined:
                    send(mail, r4, bk, tok, ci * chunk * 4 + row // 4)
                elif kc > 1:
                    for i in T.vectorized(4):
                        WS[bk, tok, (at.t0 + ci * chunk) * 16 + row + i] = r4[i]
                else:
                    store(to, at, r4, tok, (at.t0 + ci * chunk) * 16 + row)

    @T.macro
    def add_ctas(WS, SEM, mail, to, r4, m, bk, bn, at, tx):
        """The last CTA of a row range adds the partial sums of all of them; or of pairs, each for its half."""
        if joined:
            add(WS, SEM, mail, to, r4, m, bk, bn, at, tx)
        elif kc > 1:
            if last_arrival(SEM[bn], kc):
                for e in T.serial(T.ceildiv((at.t1 - at.t0) * 4 * T.min(m, tokens), threads)):
                    tok = divide(e * threads + tx, (at.t1 - at.t0) * 4)
                    row = at.t0 * 16 + modulo(e * threads + tx, (at.t1 - at.t0) * 4) * 4
                    if tok < T.min(m, tokens):
                        ldcg4(r4, WS[0, tok, row])
                        for kk in T.unroll(1, kc):
                            addcg4(r4, WS[kk, tok, row], dtype=dtype)
                        store(to, at, r4, tok, row)

    return Sums(mail, open, stage, add_warps, add_ctas, warps * part)
