"""Products of 16-bit activations with a weight of few bits, whatever its format: host code of all of them.

What differs between formats is a value of `terrazzo.ops.products`; a family's own modules hold its public names.
"""
