"""Measurements beside other packages, and what README.md quotes from them. Run as modules from the root."""
