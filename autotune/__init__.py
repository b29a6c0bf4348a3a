"""Measuring of operators on a GPU."""
