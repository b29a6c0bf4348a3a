"""What a cache of keys and values is, host side, and what its kernels are handed."""
