"""Kernels that quantize activations for products: the package has modules only."""
