"""Measurements beside other packages, and what README.md quotes from them. Run as modules from the root."""

import os

# What is timed is the kernel that is meant, and no compiler runs beside it (lowering/replacing.py).
os.environ.setdefault("TERRAZZO_BACKGROUND", "0")
