"""Regular expressions that a checkpoint's config states, matched in bounded time.

Python's `re` backtracks: `(a+)+$` takes years on forty letters. A pattern that may is run on sets of positions instead,
which gives the same answer in time polynomial in the length of the name.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Any

from terrazzo.lowering.errors import ArgumentError

try:
    from re import _compiler, _constants, _parser
except ImportError:  # Python 3.10
    import sre_compile as _compiler
    import sre_constants as _constants
    import sre_parse as _parser

LONGEST_PATTERN, LONGEST_NAME = 2000, 1000
_MOST_WAYS = 10_000
"""Ways to split a name among the parts of a pattern, up to which backtracking is quick."""
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
_ONE_WAY = (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN, _constants.AT)


def matches(pattern: str, name: str, argument: str = "pattern", *, search: bool = False) -> bool:
    """Whether a pattern matches from the start of a name, or, with `search`, anywhere in it.

    Raises:
        ArgumentError: no pattern, a pattern or name that is too long, or one that may backtrack for long and uses what
            cannot be bounded (back references, atomic groups).
    """
    compiled, tree = compile_pattern(pattern, argument)
    if len(name) > LONGEST_NAME:
        remedy = "the checkpoint is damaged: get it again"
        raise ArgumentError("name", name[:50] + "...", f"must have at most {LONGEST_NAME} characters", remedy)
    starts = len(name) + 1 if search else 1
    if starts * _ways(tree, name, bool(compiled.flags & re.IGNORECASE)) <= _MOST_WAYS:
        return bool(compiled.search(name) if search else compiled.match(name))
    walk = _Walk(name, argument, pattern, tree.state)
    return any(walk.ends(tree, at, compiled.flags) for at in range(starts))


def compile_pattern(pattern: str, argument: str = "pattern") -> tuple[re.Pattern, Any]:
    """(compiled, parsed) pattern; ArgumentError for what is none."""
    if not isinstance(pattern, str) or len(pattern) > LONGEST_PATTERN:
        seen = pattern[:50] + "..." if isinstance(pattern, str) else type(pattern).__name__
        constraint = f"must be a regular expression of at most {LONGEST_PATTERN} characters"
        raise ArgumentError(argument, seen, constraint, "correct it")
    return _compiled(pattern, argument)


@lru_cache(maxsize=4096)
def _compiled(pattern: str, argument: str) -> tuple[re.Pattern, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern), _parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        said = str(error) or type(error).__name__
        raise ArgumentError(argument, pattern, f"must be a regular expression ({said})", "correct it") from None


def _ways(tree: Any, name: str, any_case: bool) -> int:
    """Bound, cut above `_MOST_WAYS`, on the ways in which backtracking may try a pattern at one place of a name."""
    ways, length = 1, len(name)
    for index, (op, value) in enumerate(tree):
        if op is _constants.BRANCH:
            found = sum(_ways(alternative, name, any_case) for alternative in value[1])
        elif op is _constants.SUBPATTERN:
            found = _ways(value[3], name, any_case or bool(value[1] & re.IGNORECASE))
        elif op in (_constants.ASSERT, _constants.ASSERT_NOT):
            found = _ways(value[1], name, any_case)
        elif op in _REPEATS:
            low, high, inner = value
            each, (narrow, wide) = _ways(inner, name, any_case), inner.getwidth()
            times = min(int(high), length + 1)
            if each == 1 and narrow == wide > 0:
                found = max(1, times - min(int(low), times) + 1)
                behind, letter = tree[index + 1] if index + 1 < len(tree) else (None, None)
                if behind is _constants.LITERAL and not any_case:  # only places before this letter go on
                    found = min(found, name.count(chr(letter)) + 1)
            elif times <= 1:
                found = each + 1
            else:
                found = _MOST_WAYS + 1
        elif op in _ONE_WAY:
            found = 1
        else:  # back references, atomic groups and what later versions add
            found = _MOST_WAYS + 1 if length > 30 else 1
        ways = min(ways * found, _MOST_WAYS + 1)
    return ways


class _Walk:
    """One name: where each part of a pattern may end, as a set of positions in the bits of an integer."""

    def __init__(self, name: str, argument: str, pattern: str, state: Any) -> None:
        self.name, self.argument, self.pattern, self.state = name, argument, pattern, state
        self.known: dict[tuple[int, int, int], int] = {}
        self.parts: dict[tuple[int, int], re.Pattern] = {}

    def ends(self, tree: Any, start: int, flags: int) -> int:
        """Positions where a sequence of parts that starts at `start` may end."""
        key = (id(tree), start, flags)
        if key not in self.known:
            reached = 1 << start
            for index in range(len(tree)):
                reached = self._from(reached, lambda at, i=index: self._part(tree, i, at, flags))
            self.known[key] = reached
        return self.known[key]

    @staticmethod
    def _from(positions: int, step: Any) -> int:
        """Union of `step` over positions."""
        reached = 0
        while positions:
            lowest = positions & -positions
            reached |= step(lowest.bit_length() - 1)
            positions ^= lowest
        return reached

    def _part(self, tree: Any, index: int, at: int, flags: int) -> int:
        op, value = tree[index]
        if op in _ONE_WAY:
            found = self._one(tree, index, flags).match(self.name, at)
            return 1 << found.end() if found else 0
        if op is _constants.BRANCH:
            reached = 0
            for alternative in value[1]:
                reached |= self.ends(alternative, at, flags)
            return reached
        if op is _constants.SUBPATTERN:
            return self.ends(value[3], at, (flags | value[1]) & ~value[2])
        if op in (_constants.ASSERT, _constants.ASSERT_NOT):
            direction, inner = value
            back = inner.getwidth()[0] if direction < 0 else 0
            held = back <= at and self.ends(inner, at - back, flags)
            held = bool(held >> at & 1) if direction < 0 else bool(held)
            return 1 << at if held == (op is _constants.ASSERT) else 0
        if op in _REPEATS:
            return self._repeat(value, at, flags)
        constraint = "back references and atomic groups are not followed in a pattern that may backtrack for long"
        raise ArgumentError(self.argument, self.pattern, constraint, "write it without them")

    def _repeat(self, value: Any, at: int, flags: int) -> int:
        low, high, inner = value
        step, reached = lambda i: self.ends(inner, i, flags), 1 << at
        for _ in range(min(int(low), len(self.name) + 2)):  # what is reached then is reached by any larger number
            reached = self._from(reached, step)
        seen = fresh = reached
        for _ in range(min(int(high), int(low) + len(self.name) + 2) - int(low)):
            fresh = self._from(fresh, step) & ~seen
            if not fresh:
                break
            seen |= fresh
        return seen

    def _one(self, tree: Any, index: int, flags: int) -> re.Pattern:
        """The part alone, compiled: a letter, a set, an anchor."""
        key = (id(tree), index, flags)
        if key not in self.parts:
            self.parts[key] = _compiler.compile(_parser.SubPattern(self.state, [tree[index]]), flags & ~re.DEBUG)
        return self.parts[key]
