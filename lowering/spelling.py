""" "did you mean": the known name that a misspelt one most likely stands for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["closest", "did_you_mean"]


def __dir__() -> list[str]:
    return sorted(__all__)


def closest(word: object, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one most likely stands for, or None."""
    if not isinstance(word, str) or not word.strip():
        return None
    names = sorted(known, key=len)
    found = difflib.get_close_matches(word.lower()[:100], names, n=1, cutoff=0.6)
    found = found or [name for name in names if len(word) > 2 and word.lower() in name]
    return found[0] if found else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`did you mean 'x'? ` or nothing."""
    found = closest(word, known)
    return f"did you mean {found!r}? " if found else ""
