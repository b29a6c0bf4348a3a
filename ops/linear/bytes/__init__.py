"""The tile programs on activations of 8 bits: int8 with sums in int32, and e4m3."""
