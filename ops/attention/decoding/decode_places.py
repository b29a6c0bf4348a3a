"""Which part of a ragged batch a CTA of a balanced decode kernel works on, found from the lengths on the device.

What is most likely its work is found before the kernel ahead has ended, and its first stages are fetched into L2. Where
the lengths turn out to be others, it is found again.
"""

from terrazzo.ops.attention.decoding.decode_ring import Ring
from terrazzo.ops.attention.device.decode_copies import Copies
from terrazzo.ops.attention.device.tile_macros import each, less
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Macro
from terrazzo.schedules.attention_balance import MOST_SPLITS

_AT_A_TIME = 128  # lengths that a warp holds: more of them are not looked at before the wait


def make_place_macros(copies: Copies, ring: Ring | None, *, early_start: bool) -> tuple[Macro, Macro]:
    """Macros `expect_work` and `find_work`.

    Args:
        copies: macros of decode_copies. ring: macros of decode_ring where the f16 ring is fetched early, or None.
        early_start: whether the kernel may start before the one ahead of it has ended, and fetch stages then.

    `w` as in decode_copies, with `places`, the number of CTAs along x. `place` is what tz_place finds.
    """

    @T.macro
    def find_place(LEN, place, held, x, w):
        """The work of CTA x of a balanced kernel, from the first lengths `held` and those that follow them."""
        T.call_extern(
            "handle", "tz_place", T.access_ptr(place, "w"), T.access_ptr(held, "r"), T.access_ptr(LEN, "r"),
            LEN.shape[0],
            T.call_extern("int32", "tz_select", less(0, w.window), w.window + w.most_new, 0x7FFFFFFF), x,
            w.places - LEN.shape[0], copies.of.least, MOST_SPLITS,
        )  # fmt: skip

    @T.macro
    def expect_work(KV, TABLE, LEN, RES, SLOT, place, early, x, w):
        """What is most likely the CTA's work, and its first stages on their way to L2, whatever the kernel ahead does;
        `early` are the lengths that say so."""
        for i in each(4):
            early[i] = -2
        if early_start:
            if less(LEN.shape[0], _AT_A_TIME + 1):
                T.call_extern(
                    "handle", "tz_lengths<true>", T.access_ptr(early, "w"), T.access_ptr(LEN, "r"), LEN.shape[0], 0
                )
                find_place(LEN, place, early, x, w)
                w.length[0] = place[4]
                if less(0, place[2]):
                    copies.prefetch(KV, TABLE, LEN, w)
                    if ring is not None:
                        ring.prefetch_ring(RES, SLOT, w)

    @T.macro
    def find_work(TABLE, LEN, place, early, late, moved, x, w):
        """The CTA's work, where the lengths are others than `early`; a CTA without work ends here."""
        T.call_extern("handle", "tz_lengths<false>", T.access_ptr(late, "w"), T.access_ptr(LEN, "r"), LEN.shape[0], 0)
        differs = T.call_extern("bool", "tz_differ4", T.access_ptr(early, "r"), T.access_ptr(late, "r"))
        moved[0] = T.Cast("int32", T.call_extern("bool", "tz_any", differs))
        if less(0, moved[0]):
            find_place(LEN, place, late, x, w)
        if less(place[2], 1):
            T.thread_return()
        w.now[0] = place[4]
        if early_start:
            if less(0, moved[0]):
                copies.again(TABLE, w)
        else:
            w.length[0] = place[4]

    return expect_work, find_work
