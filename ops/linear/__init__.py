"""y = x w^T for every format of weights: the tile programs."""
