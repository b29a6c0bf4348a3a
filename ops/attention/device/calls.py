"""The primitives of attention (device.py) as functions of TileLang expressions, beside those of ops/tiles/calls.py.

A function has its primitive's name without `tz_`, or a longer one where that would say too little. Addresses, elements
and buffers are as in ops/tiles/calls.py.
"""

from terrazzo.ops.tiles.calls import address
from terrazzo.ops.tiles.language import T
from terrazzo.ops.tiles.types import Expr, Place


def _call(returns: str, name: str, *arguments: Expr) -> Expr:
    return T.call_extern(returns, f"tz_{name}", *arguments)


# addresses


def at32(base: Place, words: Expr) -> Expr:
    """The address `words` 32-bit words behind an address or an element."""
    return _call("handle", "at32", address(base, "r", 4), words)


def at8(base: Place, nbytes: Expr, access: str = "r") -> Expr:
    """The address `nbytes` bytes behind an element."""
    return _call("handle", "at8", address(base, access, 4), nbytes)


def at_page(pages: Place, page: Expr, word: Expr) -> Expr:
    """The address of word `word` of a page of a tensor int32 [pages, heads, words], counted through the heads; it may
    lie past 2^31 words."""
    _, heads, words = pages.shape
    return _call("handle", "page", address(pages[0, 0, 0], "r", 4), page, heads * words, word)


def uniform(x: Expr) -> Expr:
    """An int that all lanes of a warp have, as ptxas then knows: what is made of it needs no registers of lanes."""
    return _call("int32", "of_lane", x, 0)


def row16(base: Place, row: Expr, pitch: Expr, at: Expr) -> Expr:
    """The address of 16-bit value `at` of row `row`, rows `pitch` values apart."""
    return _call("handle", "row16", address(base, "r", 2), row, pitch, at)


# between memory and registers


def load_words(words: int, to: Place, at: Place) -> Expr:
    """1, 2 or 4 words to registers."""
    return _call("handle", f"load<{words}>", address(to, "w", 4 * words), address(at, "r", 4 * words))


def load32(at: Place) -> Expr:
    """The word at an address, as a uint32."""
    return _call("uint32", "load32", address(at, "r", 4))


def read128(to: Place, at: Place) -> Expr:
    """16 bytes of global memory that the kernel ahead may have written, to registers."""
    return _call("handle", "read128", address(to, "w", 16), address(at, "r", 16))


def store_words(words: int, to: Place, at: Place) -> Expr:
    """1, 2 or 4 words from registers."""
    return _call("handle", f"store<{words}>", address(to, "w", 4 * words), address(at, "r", 4 * words))


def flip_words(words: int, at: Place, bits: Place) -> Expr:
    """1, 2 or 4 words of global memory get those bits flipped, whatever other warps flip at the same time."""
    return _call("handle", f"flip<{words}>", address(at, "rw", 4 * words), address(bits, "r", 4 * words))


# floats


def ex2(x: Expr) -> Expr:
    """2^x."""
    return _call("float32", "ex2", x)


def log2(x: Expr) -> Expr:
    """The logarithm to base 2."""
    return _call("float32", "log2", x)


def tanh(x: Expr) -> Expr:
    """The hyperbolic tangent, from one exponential."""
    return _call("float32", "tanh", x)


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c, rounded once."""
    return _call("float32", "fma", a, b, c)


# two 16-bit values in a word


def hmul2(a: Expr, b: Expr) -> Expr:
    """Products of f16 pairs."""
    return _call("uint32", "hmul2", a, b)


def hfma2(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c of f16 pairs, rounded once."""
    return _call("uint32", "hfma2", a, b, c)


def min2(a: Expr, b: Expr, *, bf16: bool) -> Expr:
    """The smaller one of each half."""
    return _call("uint32", f"min2<{str(bf16).lower()}>", a, b)


def max2(a: Expr, b: Expr, *, bf16: bool) -> Expr:
    """The larger one of each half."""
    return _call("uint32", f"max2<{str(bf16).lower()}>", a, b)


def byte_perm(a: Expr, b: Expr, select: int) -> Expr:
    """Four of the bytes of a (0 to 3) and b (4 to 7), by the hexadecimal digits of `select`."""
    return T.call_extern("uint32", "__byte_perm", a, b, select)


def clamp2(low: Expr, high: Expr, *, bf16: bool) -> Expr:
    """Two floats as the halves of a uint32, none beyond the largest finite value."""
    return _call("uint32", f"clamp2<{str(bf16).lower()}>", low, high)


# the lanes of a warp


def transpose(word: Expr) -> Expr:
    """An 8x8 matrix of 16-bit values, two in each lane, transposed."""
    return _call("uint32", "transpose", word)


def xor_shuffle(x: Expr, mask: int) -> Expr:
    """The float x of the lane whose number differs in the bits of `mask`."""
    return _call("float32", "xor_shuffle", x, mask)


def xor_word(word: Expr, mask: int) -> Expr:
    """The same of a uint32."""
    return _call("uint32", "xor_word", word, mask)


def any_lane(condition: Expr) -> Expr:
    """Whether it holds in any lane."""
    return _call("bool", "any", condition)


# conditions that TileLang does not try to prove (device.py says why)


def among(at: Expr, end: Expr, span: Expr) -> Expr:
    """Whether `at` is one of the `span` integers right below `end`."""
    return _call("bool", "among", at, end, span)


def less_mask(a: Expr, b: Expr) -> Expr:
    """All ones if a < b, else 0, as a uint32."""
    return _call("uint32", "less_mask", a, b)
