"""Kinds of linear layers as frozen values: codes x ways x activations; kv.py: how keys and values are stored.

Builders import codes, ways and kv alone.
"""
