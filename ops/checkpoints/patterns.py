"""Regular expressions that a checkpoint's config states, matched in bounded time.

Python's `re` backtracks: `(a+)+$` takes years on forty letters. It says what is a pattern; `regex` matches it, which
guards repeats and takes a time limit.
"""

from __future__ import annotations

import math
import re
import warnings
from functools import lru_cache

import regex
from terrazzo.lowering.errors import ArgumentError

LONGEST_PATTERN, LONGEST_NAME = 2000, 1000
SECONDS = 1.0
"""Of processor time that one name may take."""
_MOST_PARTS = 200_000
"""Letters of a pattern times its counts of repeats, which `regex` writes out: more would fill the memory."""
_LOOKS_BACK = re.compile(r"(?<!\\)(?:\\\\)*(?:\\[1-9]|\(\?(?:>|P=|\())")
"""Back references, atomic groups, conditions: exporters write none, and no limit but time bounds them."""
_OTHERWISE = re.compile(r"(?<!\\)(?:\\\\)*{[^\d,}]|\[:")
"""What `regex` alone reads as more than letters: errors that a match may have, `{e<=1}`, and classes, `[[:alpha:]]`."""


def matches(pattern: str, name: str, argument: str = "pattern", *, search: bool = False) -> bool:
    """Whether a pattern matches from the start of a name, or, with `search`, anywhere in it.

    Raises:
        ArgumentError: no pattern, a pattern or name that is too long, or one that takes longer than `SECONDS`.
    """
    compiled = compile_pattern(pattern, argument)
    if len(name) > LONGEST_NAME:
        remedy = "the checkpoint is damaged: get it again"
        raise ArgumentError("name", name[:50] + "...", f"must have at most {LONGEST_NAME} characters", remedy)
    try:
        return bool((compiled.search if search else compiled.match)(name, timeout=SECONDS))
    except TimeoutError:
        constraint = f"takes longer than {SECONDS:g} s on the name {name[:50]!r}"
        raise ArgumentError(argument, pattern, constraint, "write it without repeats of what repeats") from None


def compile_pattern(pattern: str, argument: str = "pattern") -> regex.Pattern[str]:
    """The compiled pattern; ArgumentError for what is none, and for what is not followed here."""
    if not isinstance(pattern, str) or len(pattern) > LONGEST_PATTERN:
        seen = pattern[:50] + "..." if isinstance(pattern, str) else type(pattern).__name__
        constraint = f"must be a regular expression of at most {LONGEST_PATTERN} characters"
        raise ArgumentError(argument, seen, constraint, "correct it")
    return _compiled(pattern, argument)


@lru_cache(maxsize=4096)
def _compiled(pattern: str, argument: str) -> regex.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
            if len(pattern) * math.prod(max(1, int(count)) for count in re.findall(r"{(\d+)", pattern)) > _MOST_PARTS:
                raise ValueError("its counts of repeats are too large")
            made = regex.compile(pattern)
    except (re.error, regex.error, OverflowError, RecursionError, ValueError) as error:
        said = str(error) or type(error).__name__
        raise ArgumentError(argument, pattern, f"must be a regular expression ({said})", "correct it") from None
    if _LOOKS_BACK.search(pattern):
        constraint = "back references and atomic groups are not followed"
        raise ArgumentError(argument, pattern, constraint, "write it without them")
    if _OTHERWISE.search(pattern):
        constraint = "braces without counts and classes in brackets are letters to some readers, and not to others"
        raise ArgumentError(argument, pattern, constraint, "write it without them")
    return made
