"""Host side of W8A8, weights of bytes beside those of 4 bits; `terrazzo.ops.w8a8` is its public name."""
