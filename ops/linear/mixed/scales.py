"""What scales activations of W4Ax have, in numbers that programs, calls and the oracle share."""

GRANULARITIES = ("two_level", "block", "token", "static")
UNIFORM = ("two_level", "token")
"""Of them, in bytes: one scale for all blocks of a token and precision, so that sums run over blocks as integers."""
UNITS = 125.9375
"""Units in a token's largest INT4 value: 7 * 18, and what cutting the unit to 16 bits may take off it."""
LARGEST_FACTOR = 18
TINY = 2.0**-119
"""Activations up to here count as 0: the float32 of 127 / max would be infinite."""
OUT_DTYPES = ("float16", "bfloat16", "float32")
