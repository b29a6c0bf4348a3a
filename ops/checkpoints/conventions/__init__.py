"""Conventions of published checkpoints: each file says how one stores layers, what its config states, and reads it."""
