"""Operator families and their registry."""
