"""Tile programs of W4Ax, whose x has 4 and 8 bits: the package has modules only."""
