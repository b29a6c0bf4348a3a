"""What a named piece of CUDA text is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Primitive:
    """One device function (or a small family of templates) and the reason for its existence."""

    name: str
    why: str
    source: str
