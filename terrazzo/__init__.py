"""Terrazzo: mixed-precision operators for LLM inference, with layouts derived from tensor-core fragments."""

from __future__ import annotations

__version__ = "0.1.0"
