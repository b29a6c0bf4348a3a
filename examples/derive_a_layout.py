"""Derive a packed layout from an instruction, a conversion and a load; prove it; see a bad one refused.

python examples/derive_a_layout.py
"""

from __future__ import annotations

import numpy as np
from terrazzo.layouts import Fragment, derive, get_converter
from terrazzo.lowering.errors import LayoutError


def main() -> None:
    # wgmma m64nNk16 takes its 16-bit A operand in registers; four k steps come with one 16-byte load.
    convert = get_converter("u4_f16_subnormal")
    steps = tuple((0, step) for step in range(4))  # (row, k) of each step, in tiles of the fragment
    layout = derive(Fragment.wgmma_a(16), convert, 4, 4, steps, "atom", "rk")
    print(layout.identity)
    print("proof:", layout.prove())

    codes = np.random.default_rng(0).integers(0, 16, (128, 256), dtype=np.uint8)
    words = layout.pack(codes)
    assert (layout.unpack(words, 128, 256) == codes).all()
    print(f"codes {codes.shape} -> words {words.shape} {words.dtype}, and back without a loss")

    place = layout.map(field=5, word=2, thread=37)
    print(f"field 5 of word 2 of thread 37 holds w[{place['row']}, {place['k']}] of its block")

    try:  # eight steps cannot come with one load of four words
        derive(Fragment.wgmma_a(16), convert, 4, 4, tuple((0, step) for step in range(8)), "atom", "rk")
    except LayoutError as error:
        print("refused:", error)
    else:
        raise AssertionError("a layout that does not add up was accepted")


if __name__ == "__main__":
    main()
